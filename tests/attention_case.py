"""Random calls of the attention op, and what they must answer."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import native, ops, reference
from kernels.slots import layout_of, read_slots, write_slots_
from kv_formats import FORMATS

reference_attention = torch.library.custom_op(
    "kv_fast_tests::stored_attention", reference.stored_attention, mutates_args=()
)
"""The reference as an op, so that a compiled step can call it where the C++ kernel is loaded."""


@reference_attention.register_fake
def _(q, *_):
    return q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:-1], dtype=torch.float32)


CHOOSE_LAYOUT = ops.layout


def use_reference(monkeypatch):
    monkeypatch.setattr(ops, "stored_attention", reference_attention)
    monkeypatch.setattr(native, "is_loaded", lambda: False)


def use_tiles(monkeypatch):
    """Allocate caches on the CPU as on CUDA; the reference answers for all layouts."""
    use_reference(monkeypatch)
    cuda = torch.device("cuda")
    monkeypatch.setattr(ops, "layout", lambda side, part, _: CHOOSE_LAYOUT(side, part, cuda))


def tile_values(codes):
    """Int8 values [B, Hkv, S, D] as CUDA reads them: [B, Hkv, S / 128, D, 128]."""
    return codes.unflatten(2, (-1, 128)).transpose(3, 4).contiguous()


def as_rows(part):
    """[B, Hkv, S, width], a copy if the part is tiled."""
    return read_slots(part, 0, part.shape[2] * layout_of(part).num_slots)


def overwrite_(part, rows):
    """Make rows [B, Hkv, S, width] what the part stores, in its layout."""
    slots = torch.arange(rows.shape[2], device=rows.device).expand(len(rows), -1)
    write_slots_(part, slots, rows.clone())


class Case(NamedTuple):
    """The arguments of stored_attention."""

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    start_pos: Tensor
    k_format: str
    v_format: str
    sm_scale: float


def make_case(
    device, start_pos, formats=("int8", "int8"), *, shape=(1, 3, 1, 32), slots=256, q_dtype="fp32"
):
    """shape: (Hkv, G, T, D). Slots that no query may read hold NaN, and 127 where integers are."""
    num_kv_heads, group_size, num_queries, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(len(start_pos), *sizes, generator=generator)

    k, v = (
        [part.to(device) for part in FORMATS[name].encode(random(num_kv_heads, slots, head_dim))]
        for name in formats
    )
    q = random(num_kv_heads * group_size, num_queries, head_dim)
    q = q.to(device, FORMATS[q_dtype].dtype)
    case = Case(q, k, v, torch.tensor(start_pos, device=device), *formats, head_dim**-0.5)
    fill_unread_slots(case, float("nan"), 127)
    return case


def fill_unread_slots(case, float_value, code):
    for row, filled in enumerate(case.start_pos.tolist()):
        for part in (*case.k, *case.v):
            value = float_value if part.is_floating_point() else code
            part[row, :, filled + case.q.shape[2] - 1 :] = value


def oracle(case):
    """Out and lse in fp64, from the decoded cache."""
    k = FORMATS[case.k_format].decode(tuple(case.k), torch.float64)
    v = FORMATS[case.v_format].decode(tuple(case.v), torch.float64)
    tokens = torch.arange(case.q.shape[2], device=k.device)[:, None]
    slots = torch.arange(k.shape[2], device=k.device)
    visible = slots < case.start_pos[:, None, None] + tokens  # [B, T, S]
    v = v.masked_fill(~visible.any(1)[:, None, :, None], 0)
    q_groups = case.q.double().unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, T, D]
    scores = torch.einsum("bhgtd,bhsd->bhgts", q_groups, k) * case.sm_scale
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=-1e30)[..., None])
    return torch.einsum("bhgts,bhsd->bhgtd", weights, v).flatten(1, 2), lse.flatten(1, 2)
