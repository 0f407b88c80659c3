"""Decode speed beside transformers' compiled static cache, on the same weights.

    python scripts/compare_transformers.py HF_FOLDER --peer_python PYTHON [--rounds 3]

HF_FOLDER comes from `scripts/tiny_checkpoint.py OUT --source CHECKPOINT`; PYTHON is an interpreter
of its own environment with torch and transformers. Both run in turns, a fresh process each, greedy,
bf16, with the same threads; a figure is the median over rounds of the median decode rate.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from config import flag, run  # noqa: E402

DEPTHS = (16, 2048)
NEW_TOKENS = 128
PEER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, StaticCache

folder, depth, new_tokens, samples = sys.argv[1], *map(int, sys.argv[2:])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
step = torch.compile(model.forward, fullgraph=True)
torch.manual_seed(1234)
prompt = torch.randint(100, model.config.vocab_size, (1, depth))
cache = StaticCache(config=model.config, max_cache_len=depth + new_tokens)


def sample():
    cache.reset()
    logits = model(prompt, past_key_values=cache, cache_position=torch.arange(depth)).logits
    token = logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for position in range(depth, depth + new_tokens - 1):
        where = torch.tensor([position])
        logits = step(token, past_key_values=cache, cache_position=where,
                      position_ids=where[None]).logits
        token = logits[:, -1:].argmax(-1)
    int(token)
    return (new_tokens - 1) / (time.perf_counter() - start)


with torch.inference_mode():
    sample()
    print(json.dumps(sorted(sample() for _ in range(samples))[samples // 2]))
"""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Decode speed beside transformers' compiled static cache, on the same weights."""

    folder: Path = flag(MISSING, help="Hugging Face folder that both load")
    peer_python: Path = flag(Path(sys.executable), help="interpreter that has transformers")
    rounds: int = flag(3, minimum=1, help="turns of each side")
    debug: bool = flag(False, repro=False, help="show the traceback of an error")


def ours(folder: Path, kv_format: str, depth: int) -> float:
    """Median decode rate of one fresh process of generate.py, tok/s."""
    command = f"""{sys.executable} generate.py --kv_cache_quantization {kv_format} --json
        --prompt_tokens {depth} --max_new_tokens {NEW_TOKENS} --temperature 0 --ignore_eos
        --num_samples 3 --checkpoint_path"""
    result = subprocess.run(
        [*command.split(), str(folder.resolve())], cwd=ROOT, capture_output=True, check=True
    )
    return json.loads(result.stdout)["decode_tok_s"]


def theirs(folder: Path, peer_python: Path, depth: int) -> float:
    """The same of transformers."""
    command = [str(peer_python), "-c", PEER, str(folder), str(depth), str(NEW_TOKENS), "3"]
    result = subprocess.run(command, capture_output=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main(config: CompareConfig) -> None:
    """Print a line per depth: rates and the ratio of ours to theirs."""
    for depth in DEPTHS:
        rates: dict[str, list[float]] = {"transformers": [], "bf16": [], "int8": []}
        for turn in range(config.rounds):
            sides = list(rates)
            for side in reversed(sides) if turn % 2 else sides:
                peer = side == "transformers"
                rates[side].append(
                    theirs(config.folder, config.peer_python, depth)
                    if peer
                    else ours(config.folder, side, depth)
                )
        medians = {side: statistics.median(values) for side, values in rates.items()}
        base = medians["transformers"]
        print(
            f"depth {depth}: "
            + ", ".join(
                f"{side} {rate:.2f} tok/s ({rate / base:.2f}x)" for side, rate in medians.items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run(main, CompareConfig))
