"""Decode speed beside other engines, on the same weights, prompt ids and threads.

    python scripts/compare_peers.py transformers HF_FOLDER --peer_python PYTHON
    python scripts/compare_peers.py gpt-fast META_FOLDER --peer_python PYTHON --peer_source CLONE
    python scripts/compare_peers.py llama.cpp GGUF_FILE --peer_python PYTHON

`scripts/tiny_checkpoint.py OUT --source CHECKPOINT` writes one model in all three formats. PYTHON
is the interpreter of an environment of the peer's own (`python -m venv ENV`), filled with its pip:

    transformers    pip install torch==2.13.0 transformers==5.24.0
    gpt-fast        pip install torch==2.13.0 sentencepiece tiktoken
                    CLONE: git clone of meta-pytorch/gpt-fast, commit 6ecad9b
    llama.cpp       pip install cmake ninja
                    export CFLAGS=-mno-amx-int8 CXXFLAGS=-mno-amx-int8
                    pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
                    (x86: its AMX code crashes on some virtual machines)

Every side runs in a fresh process, in the order A B B A; all are greedy. A process decodes
`--new_tokens` once to compile and then three times; its figure is the median rate after the first
token. The last column tells whether the peer runs the same model: how many characters of its text
are those of kv-fast with a bf16 cache. Near ties part the texts of two right engines too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import json
import logging
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from typing import Any

from checkpoint import Checkpoint, open_checkpoint
from checkpoint_gguf import GGUFCheckpoint
from checkpoint_hf import HFCheckpoint
from checkpoint_meta import MetaCheckpoint
from config import UserError, flag, printable, to_argv
from generate_config import GenerateConfig
from request import read_inputs, resolve_request
from scripts.peers.harness import Request
from text_printer import text_of

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts" / "peers"

log = logging.getLogger("kv_fast")

KV_FORMATS = ("bf16", "int8")
NUM_SAMPLES = 3
PROMPT_TOKENS = 16  # of --depth, those that generate.py stores anew for every sample


@dataclass(frozen=True)
class Peer:
    """A script of scripts/peers, what it opens, and the KV formats it tries."""

    script: str
    checkpoint: type[Checkpoint]
    kv_formats: tuple[str, ...]


PEERS = {
    "transformers": Peer("with_transformers.py", HFCheckpoint, ("bf16",)),
    "gpt-fast": Peer("with_gpt_fast.py", MetaCheckpoint, ("bf16",)),
    "llama.cpp": Peer("with_llama_cpp.py", GGUFCheckpoint, ("f16", "f16-flash", "q8_0-flash")),
}


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Decode speed beside another engine, on the same weights, prompt ids and threads."""

    peer: str = flag(MISSING, choices=tuple(PEERS), help="engine to compare with")
    checkpoint: Path = flag(MISSING, help="what both load, in the peer's format")
    peer_python: Path = flag(Path("python3"), help="interpreter of the peer's environment")
    peer_source: Path | None = flag(None, help="folder of modules for it: the clone of gpt-fast")
    quantization: str | None = flag(None, help="weights of kv-fast; default: as stored there")
    depth: int = flag(16, minimum=1, help="tokens stored before the first new one")
    new_tokens: int = flag(128, minimum=2, help="tokens of a sample")
    rounds: int = flag(2, minimum=1, help="turns of each side")
    threads: int = flag(2, minimum=1, help="CPU threads of each side")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


@dataclass(frozen=True)
class Result:
    """What one process gave: its rate in tok/s, the new text, and what ran."""

    tok_s: float
    text: str
    versions: dict[str, str]


class Comparison:
    """One piece of work, done by any side in a fresh process.

    Raises:
        UserError: a checkpoint that the two cannot both open, or no room for the tokens.
    """

    def __init__(self, config: CompareConfig) -> None:
        self.config = config
        self.peer = PEERS[config.peer]
        checkpoint = open_checkpoint(config.checkpoint)
        if not isinstance(checkpoint, self.peer.checkpoint):
            wanted = self.peer.checkpoint.__name__.removesuffix("Checkpoint")
            raise UserError(
                f"checkpoint {config.checkpoint}: {config.peer} opens the {wanted} format only;"
                " scripts/tiny_checkpoint.py --source writes it"
            )
        self.tokenizer = checkpoint.tokenizer()
        options = self.options("bf16")
        inputs = read_inputs(options)
        self.work = resolve_request(options, inputs, checkpoint.config, self.tokenizer)

    def sides(self) -> Mapping[str, Callable[[], Result]]:
        """Every side by name, the peer's first."""
        theirs = {
            f"{self.config.peer} {kv}": partial(self.theirs, kv) for kv in self.peer.kv_formats
        }
        return theirs | {f"kv-fast {kv}": partial(self.ours, kv) for kv in KV_FORMATS}

    def options(self, kv_format: str) -> GenerateConfig:
        """The work as a run of generate.py."""
        prompt_tokens = min(PROMPT_TOKENS, self.config.depth)
        return GenerateConfig(
            checkpoint_path=str(self.config.checkpoint.resolve()),
            depth=self.config.depth - prompt_tokens,
            prompt_tokens=prompt_tokens,
            max_new_tokens=self.config.new_tokens,
            quantization=self.config.quantization,
            kv_cache_quantization=kv_format,
            device="cpu",
            temperature=0,
            ignore_eos=True,
            num_samples=NUM_SAMPLES,
            threads=self.config.threads,
        )

    def ours(self, kv_format: str) -> Result:
        """A run of generate.py."""
        command = [sys.executable, str(ROOT / "generate.py"), *to_argv(self.options(kv_format))]
        document = answer([*command, "--json"])
        names = ("commit", "weight_format", "attention", "device_name")
        versions = {name: document[name] for name in names}
        return Result(document["decode_tok_s"], self.after_prompt(document["texts"][0]), versions)

    def theirs(self, kv_format: str) -> Result:
        """A run of the peer's script."""
        request = Request(
            checkpoint=str(self.config.checkpoint.resolve()),
            kv_format=kv_format,
            prompt_ids=[*self.work.depth_ids, *self.work.prompt_ids],
            new_tokens=self.work.new_tokens,
            num_samples=NUM_SAMPLES,
            threads=self.config.threads,
        )
        command = [str(self.config.peer_python), str(SCRIPTS / self.peer.script)]
        document = answer(command, json.dumps(asdict(request)), self.config.peer_source)
        text = text_of(document["ids"], self.work.prompt_ids, self.tokenizer)
        return Result(document["tok_s"], self.after_prompt(text), document["versions"])

    def after_prompt(self, text: str) -> str:
        return text[len(self.tokenizer.decode(self.work.prompt_ids)) :]


def answer(
    command: Sequence[str], stdin: str = "", module_folder: Path | None = None
) -> dict[str, Any]:
    """The JSON document in the last line that a side prints.

    Args:
        command: Interpreter, script and its flags.
        stdin: What the script reads.
        module_folder: Where it finds modules besides its environment.

    Raises:
        UserError: no such interpreter, or the script failed: with the last line of its stderr.
    """
    path = {"PYTHONPATH": str(module_folder.resolve())} if module_folder else {}
    try:
        ended = subprocess.run(
            command, input=stdin, env=os.environ | path, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(
            f"--peer_python {command[0]}: {error.strerror}; give an interpreter"
        ) from None
    if ended.returncode:
        last = [f"exit code {ended.returncode}", *ended.stderr.strip().splitlines()][-1]
        raise UserError(
            f"{Path(command[1]).name}: {printable(last)};"
            " the head of scripts/compare_peers.py says what a side needs"
        )
    return json.loads(ended.stdout.splitlines()[-1])


def measure(sides: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """The results of every side, each round in the reverse order of the one before."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            results[name].append(sides[name]())
            log.info("%s: %.2f tok/s", name, results[name][-1].tok_s)
    return results


def table(config: CompareConfig, results: Mapping[str, Sequence[Result]]) -> str:
    """Rates per side with their ratio to the peer's best, then what ran."""
    rates = {name: [result.tok_s for result in runs] for name, runs in results.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(rate for name, rate in medians.items() if name.startswith(config.peer))
    baseline = results["kv-fast bf16"][0].text
    lines = [f"| depth {config.depth} | tok/s | lowest to highest | ratio | same text |"]
    lines.append("|---|---|---|---|---|")
    for name, values in rates.items():
        same = len(os.path.commonprefix([results[name][0].text, baseline]))
        lines.append(
            f"| {name} | {medians[name]:.2f} | {min(values):.2f} to {max(values):.2f}"
            f" | {medians[name] / best:.2f}x | {same} of {len(baseline)} |"
        )
    versions: dict[str, str] = {}
    for runs in results.values():
        versions |= runs[0].versions
    what_ran = ", ".join(f"{name} {value}" for name, value in versions.items())
    return "\n".join(lines) + (
        f"\n\n{config.checkpoint.name}, {config.new_tokens} new tokens, {config.threads} threads,"
        f" {config.rounds} rounds; {what_ran}"
    )


def main(config: CompareConfig) -> None:
    """Run all sides in turns, then print one table."""
    print(table(config, measure(Comparison(config).sides(), config.rounds)))


if __name__ == "__main__":
    sys.exit(run(main, CompareConfig))
