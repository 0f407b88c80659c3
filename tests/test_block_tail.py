import pytest
import torch
from cache_case import INSTRUCTION_SETS
from quantized_case import seeded_weight

from kernels.block_tail import block_tail, product
from kernels.linear import linear

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")

WIDTH, HEADS_WIDTH, INTERMEDIATE = 96, 64, 160
SHAPES = [(WIDTH, HEADS_WIDTH), (2 * INTERMEDIATE, WIDTH), (WIDTH, INTERMEDIATE)]


def dense(shape, dtype):
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype)


def codes(shape, bits, with_mins):
    return seeded_weight(shape, 32, bits, with_mins)[0].tiled()


WEIGHTS = {
    "dense": dense,
    "int8": lambda shape, dtype: codes(shape, 8, False),
    "int4 with mins": lambda shape, dtype: codes(shape, 4, True),
    "int4 and dense": lambda shape, dtype: (
        dense(shape, dtype) if shape[0] == WIDTH else codes(shape, 4, False)
    ),
}


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    torch.ops.kv_fast.use_instruction_set(request.param)
    yield request.param
    torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (16, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_one_call_gives_the_bits_of_three(instruction_set, kind, dtype, shape, num_threads):
    generator = torch.Generator().manual_seed(8)
    attended = torch.randn(*shape, HEADS_WIDTH, generator=generator).to(dtype)
    x = torch.randn(*shape, WIDTH, generator=generator).to(dtype)
    norm = torch.rand(WIDTH, generator=generator).to(dtype), 1e-5
    o_proj, gate_up, down = (WEIGHTS[kind](shape, dtype) for shape in SHAPES)
    h = product(attended, o_proj, None, x)
    expected = product(product(h, gate_up, norm, swiglu=True), down, None, h)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    y = block_tail(attended, x, o_proj, norm, gate_up, down)
    torch.set_num_threads(threads_before)
    assert torch.equal(y, expected)


def test_what_cannot_be_one_call_is_three():
    norm = torch.rand(WIDTH), 1e-5
    odd = [(WIDTH, HEADS_WIDTH), (2 * 40, WIDTH), (WIDTH, 40)]
    for shapes, num_rows in ((odd, 1), (SHAPES, 17)):
        o_proj, gate_up, down = (dense(shape, torch.float32) for shape in shapes)
        x, attended = torch.ones(num_rows, WIDTH), torch.ones(num_rows, HEADS_WIDTH)
        h = linear(attended, o_proj, None, x)
        expected = linear(linear(h, gate_up, norm, swiglu=True), down, None, h)
        assert torch.equal(block_tail(attended, x, o_proj, norm, gate_up, down), expected)


def test_weights_that_do_not_follow_each_other_are_refused():
    x, attended = torch.ones(1, WIDTH), torch.ones(1, HEADS_WIDTH)
    norm = torch.ones(WIDTH), 1e-5
    for change in range(3):
        weights = [dense(shape, torch.float32) for shape in SHAPES]
        weights[change] = weights[change][:, 16:].contiguous()
        o_proj, gate_up, down = weights
        with pytest.raises(ValueError, match="for rows of"):
            block_tail(attended, x, o_proj, norm, gate_up, down)
    with pytest.raises(ValueError, match="0 parts"):
        torch.ops.kv_fast.block_tail(attended, x, [], *norm, [gate_up], [down], INTERMEDIATE)


PARTS = {
    "attended": torch.ones(1, HEADS_WIDTH),
    "x": torch.ones(1, WIDTH),
    "o_proj": [dense(SHAPES[0], torch.float32)],
    "norm": torch.ones(WIDTH),
    "eps": 1e-5,
    "gate_up_proj": [dense(SHAPES[1], torch.float32)],
    "down_proj": [dense(SHAPES[2], torch.float32)],
    "intermediate_size": INTERMEDIATE,
}
FAULTS = {
    "a short norm": ({"norm": torch.ones(5)}, "for rows of"),
    "a norm in fp64": ({"norm": torch.ones(WIDTH).double()}, "no CPU kernel for Double"),
    "a norm of integers": ({"norm": torch.ones(WIDTH).int()}, "no CPU kernel for Int"),
    "attended of no channels": (
        {"attended": torch.ones(1, 0), "o_proj": [torch.ones(WIDTH, 0)]},
        "no channels",
    ),
    "attended of no dimension": ({"attended": torch.tensor(1.0)}, "no channels"),
    "x of no dimension": ({"x": torch.tensor(1.0)}, "no channels"),
    "no gates": (
        {
            "intermediate_size": 0,
            "gate_up_proj": [torch.ones(0, WIDTH)],
            "down_proj": [torch.ones(WIDTH, 0)],
        },
        "no channels",
    ),
    "all in fp64": (
        {
            name: [part[0].double()] if isinstance(part, list) else part.double()
            for name, part in PARTS.items()
            if name not in ("eps", "intermediate_size")
        },
        "no CPU kernel for Double",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_fault_that_threads_find_is_raised_and_ends_no_process(fault, num_threads):
    changes, message = FAULTS[fault]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with pytest.raises(ValueError, match=message):
            torch.ops.kv_fast.block_tail(*(PARTS | changes).values())
        assert torch.ops.kv_fast.block_tail(*PARTS.values()).isfinite().all()
    finally:
        torch.set_num_threads(before)
