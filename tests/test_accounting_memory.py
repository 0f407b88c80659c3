"""Memory that processes of their own take, against what was computed for them."""

import os
import subprocess
import sys

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("peaks of resident memory are read from /proc", allow_module_level=True)

# Without retained free memory what is resident is what is in use, to the page.
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}

SYNTHETIC_FILL = """
import sys, torch
from conftest import TINY
from kv_cache import fill_synthetic_, make_caches, synthetic_scratch_bytes
from machine import PeakMemory

DEPTH = 1 << 17
caches = make_caches(TINY, (sys.argv[1], sys.argv[1]), 1, DEPTH)
fill_synthetic_(caches, 9000)  # what every process needs once
memory = PeakMemory(torch.device("cpu"))
memory.reset()
fill_synthetic_(caches, DEPTH)
print(memory.peak_bytes() - memory.base_bytes, synthetic_scratch_bytes(TINY, DEPTH))
"""

LAST_CHUNK = """
import sys, torch
from accounting import workspace_bytes
from engine import Engine
from kv_cache import make_caches
from machine import PeakMemory, resident_bytes
from model import Transformer
from model_config import ModelConfig
from request import Request

LONGEST, ROWS = 131072, 256
formats = (sys.argv[1], sys.argv[1])
config = ModelConfig(
    num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=128,
    intermediate_size=256, vocab_size=320, max_seq_len=2 * LONGEST,
)
engine = Engine(
    Transformer(config).bfloat16().requires_grad_(False),
    make_caches(config, formats, 1, LONGEST + ROWS),
    compile=False,
)
ids = torch.zeros(1, ROWS, dtype=torch.long)
engine.prefill(ids, 16384)  # what every run needs once, and blocks of a full size
for past_len in (16384, LONGEST):
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    engine.prefill(ids, past_len)
    print(memory.peak_bytes() - memory.base_bytes)
request = Request(
    depth_ids=(1,) * LONGEST, prompt_ids=(1,) * ROWS, new_tokens=1, cache_len=LONGEST + ROWS,
    formats=formats, prefill_chunk=ROWS,
)
print(workspace_bytes(request, config, torch.bfloat16))
"""


def printed(code, *words):
    """The numbers that a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | EXACT_MALLOC | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return map(int, done.stdout.split())


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
def test_prefill_behind_128k_tokens_takes_the_declared_scratch_as_behind_16k(kv_format):
    at_16k, at_128k, declared = printed(LAST_CHUNK, kv_format)
    assert at_128k - at_16k < 500_000
    assert at_128k < declared + 4_000_000


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
def test_a_synthetic_fill_of_128k_slots_takes_the_declared_scratch(kv_format):
    peak, declared = printed(SYNTHETIC_FILL, kv_format)
    assert peak < declared + 1_000_000
