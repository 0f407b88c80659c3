"""Blocks of a GGUF file that are weights of 8 or 4 bits as they stand: Q8_0, Q4_0 and Q4_1.

A block holds 32 channels of a row: an fp16 scale, in Q4_1 an fp16 minimum, and the codes. Nibble i
of the low halves is channel i, of the high halves channel 16 + i.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, block_q8_0 and so on.
"""

from collections.abc import Mapping, Sequence

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from checkpoint_base import Source, half_split_rows
from checkpoint_gguf_header import Entry
from kernels.quantized import QuantizedWeight, pack_nibbles
from stored_tensor import fill, opened_at, short_lived_tensor
from weight_formats import LAYOUTS

KEPT_TYPES = {
    GGMLQuantizationType.Q8_0: "q8_0",
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
}
READ_BYTES = 1 << 18  # of a file at a time: what is made of them takes several times as much


def kept_layouts(
    sources: Mapping[str, Sequence[Source]], entries: Mapping[str, Entry]
) -> dict[str, str]:
    """The layout of each parameter whose tensors in the file are all of one type that is kept."""
    kept = {}
    for name, stacked in sources.items():
        types = {entries[source.name].tensor_type for source in stacked}
        if len(types) == 1 and len(stacked[0].shape) == 2:
            kept[name] = KEPT_TYPES.get(types.pop(), "")
    return {name: layout for name, layout in kept.items() if layout}


def read_blocks(
    layout: str, sources: Sequence[Source], entries: Mapping[str, Entry]
) -> QuantizedWeight:
    """The tensors of one parameter, stacked, as they stand in the file."""
    rows, width = [source.shape[0] for source in sources], sources[0].shape[1]
    described = LAYOUTS[layout].parts((sum(rows), width))
    parts = [short_lived_tensor(shape, dtype) for dtype, shape in described.values()]
    for source, *places in zip(sources, *(part.split(rows) for part in parts), strict=True):
        read_tensor(entries[source.name], LAYOUTS[layout].bits, places)
        if source.num_heads is not None:
            for place in places:
                place.copy_(half_split_rows(place, source.num_heads))
    return QuantizedWeight((sum(rows), width), *parts)


def read_tensor(entry: Entry, bits: int, places: Sequence[Tensor]) -> None:
    """Fill the rows of codes, scales and mins of one tensor of the file, some rows at a time."""
    num_rows, width = entry.shape
    row_bytes = entry.num_bytes // num_rows
    count = max(1, READ_BYTES // row_bytes)
    with opened_at(entry.file, entry.offset, entry.num_bytes) as opened:
        for codes, *around in zip(*(place.split(count) for place in places), strict=True):
            data = torch.empty((len(codes), row_bytes), dtype=torch.uint8)
            fill(opened, data)
            head_bytes = 2 * len(around)
            blocks = data.unflatten(1, (-1, head_bytes + 32 * bits // 8))
            for i, part in enumerate(around):
                part.copy_(blocks[..., 2 * i : 2 * i + 2].contiguous().view(torch.float16)[..., 0])
            packed = blocks[..., head_bytes:]
            codes.copy_(packed.flatten(1).view(torch.int8) if bits == 8 else nibbles_of(packed))


def nibbles_of(packed: Tensor) -> Tensor:
    """[N, blocks, 16] as GGUF packs them -> [N, C / 2] as `pack_nibbles` does."""
    values = torch.cat((packed & 15, packed >> 4), dim=-1)
    return pack_nibbles(values.flatten(1))
