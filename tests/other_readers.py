"""What the libraries of the file formats read out of a checkpoint, without any code of ours."""

from pathlib import Path

import gguf
import safetensors.torch
import torch
from torch import Tensor


def read_gguf(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in sorted(folder.rglob("*.gguf")):
        for tensor in gguf.GGUFReader(file).tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            tensors[tensor.name] = torch.from_numpy(values.copy())
    return tensors


def read_pth(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "consolidated.00.pth", weights_only=True)


def read_bin(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.bin")):
        tensors |= torch.load(file, weights_only=True)
    return tensors


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load(file.read_bytes())
    return tensors


def read_quantized(folder: Path) -> dict[str, Tensor]:
    """Under our own names, with nibbles taken out of their words one channel after the other."""
    stored = read_safetensors(folder)
    names = [name.removesuffix(".codes") for name in stored if name.endswith(".codes")]
    dense = {name: w for name, w in stored.items() if not name.startswith(tuple(names))}
    for name in names:
        codes, scales = stored[f"{name}.codes"], stored[f"{name}.scales"]
        if codes.dtype == torch.uint8:
            nibbles = [word >> shift & 15 for word in codes.split(4, dim=1) for shift in (0, 4)]
            codes = torch.cat(nibbles, dim=1)
        group = codes.shape[1] // scales.shape[1]
        dense[name] = codes.float() * scales.float().repeat_interleave(group, 1)
        if (mins := stored.get(f"{name}.mins")) is not None:
            dense[name] += mins.float().repeat_interleave(group, 1)
    return dense
