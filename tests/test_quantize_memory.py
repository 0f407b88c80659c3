"""Loading quantised weights never needs two full copies of them, nor a dense one."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import CODE_WRITERS
from loading_memory import measure_loading
from test_checkpoint_loading import LARGER, LARGER_WRITERS, Weights, larger_weights

pytest_plugins = ["generate_process"]
__all__ = ["larger_weights"]

KEPT = ("gguf-q8_0", "gguf-q4_0", "gguf-q4_1", "gguf-q4_0-parts", "quantized")
SCHEMES: list[tuple[str, str | None]] = [
    (kind, spec) for kind in ("hf", "meta-shards", "gguf") for spec in ("int8", "int4")
]
SCHEMES += [(kind, None) for kind in KEPT]
SCHEMES += [
    ("gguf-q8_0", "int4"),
    ("hf", "int4:64,none"),
    ("hf-float32", "int8"),
]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize(("kind", "spec"), SCHEMES)
def test_loading_needs_the_quantised_model_one_dense_tensor_and_a_tenth(
    kind: str, spec: str | None, larger_weights: Weights, processes, tmp_path: Path
) -> None:
    path = (LARGER_WRITERS | CODE_WRITERS)[kind](tmp_path / "model", LARGER, larger_weights)
    result = tmp_path / "result"
    arguments = (path, torch.bfloat16, result, spec)
    process = processes.Process(target=measure_loading, args=arguments)
    process.start()
    process.join()
    used, model_bytes, largest = json.loads(result.read_text())
    assert 24e6 < model_bytes < 75e6
    itemsize = 4 if kind == "hf-float32" else 2
    assert model_bytes < used <= model_bytes * 1.1 + largest * itemsize
    shutil.rmtree(tmp_path)
