"""What the C++ attention op refuses: arguments that would have them read outside of a tensor."""

import pytest
import torch
from cache_case import INSTRUCTION_SETS, filled_cache

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")

HALF = slice(0, 64)  # of the slots


def arguments(name):
    """Of stored_attention by name: B = 2, Hkv = 2, Hq = 4, T = 2, D = 64, S = 128."""
    cache, _, _ = filled_cache(name, name, (2, 2, 128, 64))
    return {
        "q": torch.randn(2, 4, 2, 64),
        "k": cache.k_parts,
        "v": cache.v_parts,
        "start_pos": torch.tensor([50, 90]),
    }


def call(given):
    return torch.ops.kv_fast.stored_attention(*given.values(), "any", "any", 0.125)


def each(cut):
    return lambda parts: [cut(part).contiguous() for part in parts]


def scale(cut):
    return lambda parts: [parts[0], cut(parts[1]), *parts[2:]]


def zero(cut):
    return lambda parts: [*parts[:2], cut(parts[2])]


REFUSED = {  # what is wrong: argument, its change, part of the message
    "a length beyond the slots": ("start_pos", lambda x: x + 38, r"start_pos 128 .* 128 slots"),
    "a length far beyond": ("start_pos", lambda x: x << 40, "128 slots"),
    "a negative length": ("start_pos", lambda x: x - 51, "start_pos -1"),
    "too few lengths": ("start_pos", lambda x: x[:1], r"start_pos \[1\] is not"),
    "too many lengths": ("start_pos", lambda x: x.repeat(2), r"start_pos \[4\] is not"),
    "one length for all": ("start_pos", lambda x: x[0], r"start_pos \[\] is not"),
    "lengths with fractions": ("start_pos", lambda x: x + 0.5, "Float are not integers"),
    "no query heads": ("q", lambda x: x[:, :0], r"q \[2, 0, 2, 64\] is not"),
    "no sequences": ("q", lambda x: x[:0], r"q \[0, 4, 2, 64\] is not"),
    "no tokens": ("q", lambda x: x[:, :, :0], "is not"),
    "no channels": ("q", lambda x: x[..., :0], "is not"),
    "queries of three dimensions": ("q", lambda x: x[0], r"q \[4, 2, 64\] is not"),
    "queries of five dimensions": ("q", lambda x: x[..., None], "is not"),
    "queries of more sequences": ("q", lambda x: x.repeat(2, 1, 1, 1), r"for q \[4, 4, 2, 64\]"),
    "queries of fewer sequences": ("q", lambda x: x[:1], r"for q \[1, 4, 2, 64\]"),
    "heads that do not divide": ("q", lambda x: x[:, :3], r"for q \[2, 3, 2, 64\]"),
    "fewer heads than the cache": ("q", lambda x: x[:, :1], r"for q \[2, 1, 2, 64\]"),
    "no keys": ("k", lambda _: [], "parts"),
    "no values": ("v", lambda _: [], "parts"),
    "keys without dimensions": ("k", each(lambda x: x[0, 0, 0]), "no CPU kernel for a cache"),
    "keys of one sequence": ("k", each(lambda x: x[:1]), "for q"),
    "values of one sequence": ("v", each(lambda x: x[:1]), "for q"),
    "keys of no head": ("k", each(lambda x: x[:, :0]), "for q"),
    "keys of one head": ("k", each(lambda x: x[:, :1]), "not of one cache"),
    "values of one head": ("v", each(lambda x: x[:, :1]), "not of one cache"),
    "fewer keys": ("k", each(lambda x: x[:, :, : x.shape[2] // 2]), "not of one cache"),
    "fewer values": ("v", each(lambda x: x[:, :, : x.shape[2] // 2]), "not of one cache"),
    "a part too many": ("v", lambda parts: [*parts, parts[-1]], "parts"),
}

REFUSED_OF_CODES = {
    "no scale": ("k", lambda parts: parts[:1], "1 parts"),
    "half a scale": ("k", scale(lambda x: x[:, :, ::2]), "strided"),
    "a short scale": ("k", scale(lambda x: x[:, :, HALF].contiguous()), "scale"),
    "a scale of one sequence": ("v", scale(lambda x: x[:1]), "scale"),
    "two scales per vector": ("v", scale(lambda x: x.repeat(1, 1, 1, 2)), "scale"),
    "a scale of three dimensions": ("k", scale(lambda x: x[..., 0]), "scale"),
    "a scale in fp32": ("k", scale(torch.Tensor.float), "scale"),
}

REFUSED_OF_INT4 = {
    "no zero": ("v", lambda parts: parts[:2], "2 parts"),
    "a short zero": ("k", zero(lambda x: x[:, :, HALF].contiguous()), "scale or zero"),
    "a zero in fp32": ("v", zero(torch.Tensor.float), "scale or zero"),
    "signed codes": ("k", lambda parts: [parts[0].view(torch.int8), *parts[1:]], "a cache"),
    "queries of half the channels": ("q", lambda x: x[..., :32], "no CPU kernel for a cache"),
    "queries of one channel more": ("q", lambda x: torch.cat((x, x[..., :1]), -1), "no CPU kernel"),
}

CASES = [
    *((name, wrong) for name in ("bf16", "int8", "int4") for wrong in REFUSED.items()),
    *((name, wrong) for name in ("int8", "fp8", "int4") for wrong in REFUSED_OF_CODES.items()),
    *(("int4", wrong) for wrong in REFUSED_OF_INT4.items()),
]


@pytest.mark.parametrize(
    ("name", "wrong"), CASES, ids=[f"{name}-{wrong}" for name, (wrong, _) in CASES]
)
def test_arguments_that_do_not_fit_each_other_are_refused(name, wrong):
    _, (key, change, message) = wrong
    given = arguments(name)
    call(given)
    given[key] = change(given[key])
    with pytest.raises(ValueError, match=message):
        call(given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_last_slot_may_be_read(dtype):
    given = arguments("int8")
    given["start_pos"] = torch.tensor([127, 0], dtype=dtype)
    call(given)
