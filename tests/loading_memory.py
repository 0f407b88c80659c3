"""How much memory loading a checkpoint needs, seen from inside a process of its own."""

import json
from pathlib import Path

import torch

from checkpoint import open_checkpoint
from engine import load_model


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure_loading(path: Path, dtype: torch.dtype, result: Path) -> None:
    """Write [growth at the peak, bytes of the model, of its largest tensor] to `result`."""
    checkpoint = open_checkpoint(path)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    start = resident_bytes("VmRSS")
    model = load_model(checkpoint, torch.device("cpu"), dtype)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    result.write_text(json.dumps([resident_bytes("VmHWM") - start, sum(sizes), max(sizes)]))
