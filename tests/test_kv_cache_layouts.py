"""How the parts of a cache lie in memory, on each device and for each instruction set."""

import pytest
import torch
from attention_case import as_rows, use_reference
from cache_case import INSTRUCTION_SETS, filled_cache, reads_fours_here, stored_attention

from kernels import ops
from kernels.slots import KEY_FOURS, ROWS, SLOTS_INNERMOST, VALUE_FOURS, layout_of
from kv_formats import FORMATS


@pytest.mark.parametrize("past_len", [None, 120])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_layout_stores_the_same_slots(name, past_len, implementation, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 16, 64), torch.randn(2, 2, 16, 64), torch.randn(2, 2, 16, 64)
    starts = torch.tensor([120, 120 if past_len else 200])
    cache, _, _ = filled_cache(name, name, (2, 2, 256, 64))
    cache.attend(q, k, v, starts, past_len)
    use_reference(monkeypatch)
    monkeypatch.setattr(ops, "layout", lambda *_: ROWS)
    rows, _, _ = filled_cache(name, name, (2, 2, 256, 64))
    rows.attend(q, k, v, starts, past_len)
    for part, expected in zip(cache.buffers(), rows.buffers(), strict=True):
        assert torch.equal(as_rows(part), expected)


FOURS = KEY_FOURS, VALUE_FOURS
LAYOUTS_READ = [  # instruction set or device, format, head_dim, layouts of the codes of K and V
    ("cuda", "int8", 64, (ROWS, SLOTS_INNERMOST)),
    ("cuda", "int4", 64, (ROWS, ROWS)),
    ("mps", "int8", 64, (ROWS, ROWS)),
    ("avx512vnni", "int8", 80, FOURS),
    ("avx512vnni", "int8", 100, (ROWS, ROWS)),
    ("avx512vnni", "int4", 96, FOURS),
    ("avx512", "int8", 64, (ROWS, ROWS)),
    ("avx512", "int4", 64, (ROWS, ROWS)),
    ("avx2", "int8", 80, FOURS),
    ("avx2", "int8", 100, (ROWS, ROWS)),
    ("avx2", "int4", 96, FOURS),
    ("avx2", "int4", 80, (ROWS, ROWS)),
    ("avx2", "fp8", 64, (ROWS, ROWS)),
    ("baseline", "int8", 64, (ROWS, ROWS)),
]


@pytest.mark.parametrize(("where", "name", "head_dim", "layouts"), LAYOUTS_READ)
def test_caches_lie_as_the_kernels_read_them(where, name, head_dim, layouts):
    is_device = where in ("cuda", "mps")
    if not is_device and where not in INSTRUCTION_SETS:
        pytest.skip(f"this processor has no {where}")
    device = torch.device(where if is_device else "cpu")
    if not is_device:
        torch.ops.kv_fast.use_instruction_set(where)
    codes, *scales = FORMATS[name].parts(head_dim)
    (bf16,) = FORMATS["bf16"].parts(head_dim)
    found = tuple(ops.layout(side, codes, device) for side in "kv")
    others = [ops.layout(side, part, device) for side in "kv" for part in (*scales, bf16)]
    if not is_device:
        torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])
    assert found == layouts
    assert others == [ROWS] * 2 * (len(scales) + 1)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")
def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="instruction set vax"):
        torch.ops.kv_fast.use_instruction_set("vax")


def codes_in(layout):
    return torch.zeros(1, 2, *layout.sizes(128, 64), dtype=torch.int8)


REFUSED = {  # payloads of K and V
    "the cache is strided": (codes_in(ROWS)[:, :, ::2], codes_in(ROWS)),
    "no CPU kernel for a cache": (codes_in(ROWS), codes_in(SLOTS_INNERMOST)),
    "no CPU kernel for a cache ": (codes_in(KEY_FOURS).float(), codes_in(ROWS)),
    "no CPU kernel for a cache .* of Byte": (codes_in(ROWS).byte(), codes_in(ROWS)),
    "no CPU kernel for a cache of": (codes_in(ROWS).short(), codes_in(ROWS)),
}


@reads_fours_here
@pytest.mark.parametrize("message", REFUSED)
def test_a_cache_that_lies_otherwise_is_refused(message):
    scale = torch.ones(1, 2, 128, 1, dtype=torch.bfloat16)
    q = torch.randn(1, 4, 1, 64)
    k, v = ([codes, scale] for codes in REFUSED[message])
    with pytest.raises(ValueError, match=message):
        ops.stored_attention(q, k, v, torch.tensor([9]), "int8", "int8", 0.1)


@reads_fours_here
def test_fours_are_refused_by_what_cannot_read_them():
    cache, _, _ = filled_cache("int8", "int8", (1, 2, 128, 64))
    assert layout_of(cache.k_codes) is KEY_FOURS
    torch.ops.kv_fast.use_instruction_set("baseline")
    try:
        with pytest.raises(ValueError, match="no CPU kernel for a cache"):
            stored_attention(cache, torch.randn(1, 4, 1, 64), torch.tensor([9]))
    finally:
        torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])
