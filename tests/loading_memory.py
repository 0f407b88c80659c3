"""How much memory loading a checkpoint needs, seen from inside a process of its own."""

import json
import math
from pathlib import Path

import torch

from accounting import model_size_bytes
from checkpoint import open_checkpoint
from engine import load_model
from quantize import parse_scheme, planned_formats
from weight_formats import WEIGHT_FORMATS, encode, parameter_shapes


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure_loading(
    path: Path, dtype: torch.dtype, result: Path, quantization: str | None = "none"
) -> None:
    """Write [growth at the peak, bytes of the model, elements of its largest tensor] to `result`.

    Args:
        quantization: as the flag; None: as the file has its weights.
    """
    checkpoint = open_checkpoint(path)
    scheme = None if quantization is None else parse_scheme(quantization)
    formats = planned_formats(checkpoint, scheme)
    shapes = parameter_shapes(checkpoint.config)
    largest = max(map(math.prod, shapes.values()))
    for kind in WEIGHT_FORMATS.values():  # their code comes into memory when it first runs
        encode(torch.ones(64, 768), kind, kind.groups[0]).laid_out_for(torch.device("cpu"))
    for name in sorted(checkpoint.kept, key=lambda name: math.prod(shapes[name]))[:1]:
        checkpoint.read_kept(name).laid_out_for(torch.device("cpu"))  # the same of their readers
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    start = resident_bytes("VmRSS")
    model = load_model(checkpoint, torch.device("cpu"), dtype, formats)
    used = resident_bytes("VmHWM") - start
    result.write_text(json.dumps([used, model_size_bytes(model), largest]))
