"""What the call of all layers refuses: arguments that would have it read or write elsewhere."""

import pytest
import torch
from cache_case import INSTRUCTION_SETS
from quantized_case import seeded_weight

from kv_cache import KVCache

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")

WIDTH, HEAD_DIM, INTERMEDIATE, NUM_LAYERS = 96, 64, 160, 2
SHAPES = [(4 * HEAD_DIM, WIDTH), (WIDTH, 2 * HEAD_DIM), (2 * INTERMEDIATE, WIDTH)]
SHAPES.append((WIDTH, INTERMEDIATE))


def arguments(name="int8"):
    """Of two layers by name: B = 2, T = 3, Hq = 2, Hkv = 1, S = 128."""
    caches = [KVCache(name, name, (2, 1, 128, HEAD_DIM)) for _ in range(NUM_LAYERS)]
    angles = torch.ones(2, 3, HEAD_DIM // 2)
    return {
        "x": torch.ones(2, 3, WIDTH),
        "cos": angles,
        "sin": 0 * angles,
        "start_pos": torch.tensor([50, 90]),
        "weights": [torch.ones(shape) / 100 for shape in NUM_LAYERS * SHAPES],
        "num_parts": [1] * 4 * NUM_LAYERS,
        "norms": [torch.ones(WIDTH) for _ in range(2 * NUM_LAYERS)],
        "eps": 1e-5,
        "qkv_biases": [torch.ones(4 * HEAD_DIM) for _ in range(NUM_LAYERS)],
        "o_biases": [torch.ones(WIDTH) for _ in range(NUM_LAYERS)],
        "head_norms": [torch.ones(HEAD_DIM) for _ in range(2 * NUM_LAYERS)],
        "k_channels": [torch.ones(1, HEAD_DIM) for _ in range(NUM_LAYERS)],
        "rotates_v": False,
        "k": [part for cache in caches for part in cache.k_parts],
        "v": [part for cache in caches for part in cache.v_parts],
        "num_heads": 2,
        "intermediate_size": INTERMEDIATE,
    }


def call(given):
    return torch.ops.kv_fast.decode_layers(*given.values())


def last(change):
    return lambda tensors: [*tensors[:-1], change(tensors[-1])]


def double(tensors):
    return [tensor.double() for tensor in tensors]


FAULTS = {  # what is wrong: argument, its change, part of the message
    "x of two dimensions": ("x", lambda x: x[0], "not .B, T, C."),
    "no tokens": ("x", lambda x: x[:, :0], "not .B, T, C."),
    "x of another width": ("x", lambda x: x[..., :80].contiguous(), "for rows of 80"),
    "x in fp64": ("x", torch.Tensor.double, "Double"),
    "angles of one token": ("cos", lambda x: x[:, :1], "angles"),
    "sines of fewer pairs": ("sin", lambda x: x[..., :16], "angles"),
    "angles in bf16": ("cos", torch.Tensor.bfloat16, "angles"),
    "a length beyond the slots": ("start_pos", lambda x: x + 36, "start_pos 126 and 3"),
    "a negative length": ("start_pos", lambda x: x - 51, "start_pos -1"),
    "one length for all": ("start_pos", lambda x: x[:1], "is not .B."),
    "lengths with fractions": ("start_pos", lambda x: x + 0.5, "not integers"),
    "a weight too few": ("weights", lambda x: x[:-1], "parts of weights"),
    "a narrow weight": ("weights", last(lambda x: x[:, :80].contiguous()), "for rows of 160"),
    "a strided weight": ("weights", last(lambda x: x.T.contiguous().T), "for rows of 160"),
    "a weight in bf16": ("weights", last(torch.Tensor.bfloat16), "BFloat16"),
    "a count too few": ("num_parts", lambda x: x[:-1], "no number of layers"),
    "a weight of no parts": ("num_parts", lambda x: [0, *x[1:]], "0 parts"),
    "a count below zero": ("num_parts", lambda x: [-1, *x[1:]], "parts of weights"),
    "no layers": ("norms", lambda _: [], "no number of layers"),
    "an odd norm": ("norms", lambda x: x[:-1], "no number of layers"),
    "a short norm": ("norms", last(lambda x: x[:5]), "for rows of"),
    "scales of channels of one layer": ("k_channels", lambda x: x[:-1], "of a list for 2 layers"),
    "scales of too few channels": ("k_channels", last(lambda x: x[:, :16]), "scales of channels"),
    "scales of channels in bf16": ("k_channels", last(torch.Tensor.bfloat16), "scales of channels"),
    "norms in fp64": ("norms", double, "no CPU kernel for Double"),
    "norms of integers": ("norms", lambda x: [each.int() for each in x], "no CPU kernel for Int"),
    "a bias too few": ("qkv_biases", lambda x: x[:1], "a list for 2 layers"),
    "a short bias": ("o_biases", last(lambda x: x[:5]), "bias"),
    "a norm of heads too few": ("head_norms", lambda x: x[:2], "a list for 2 layers"),
    "a short norm of heads": ("head_norms", last(lambda x: x[:5]), "norm of a head"),
    "a norm of heads in bf16": ("head_norms", last(torch.Tensor.bfloat16), "norm of a head"),
    "no keys": ("k", lambda _: [], "no number of layers"),
    "keys of one layer": ("k", lambda x: x[:1], "no number of layers|parts"),
    "keys without scales": ("k", lambda x: x[::2], "1 parts"),
    "keys without dimensions": ("k", lambda x: [x[0][0, 0, 0], *x[1:]], "cache"),
    "values of one sequence": ("v", last(lambda x: x[:1]), "scale"),
    "a layer of fewer slots": (
        "k",
        lambda x: [*x[:2], *(part[:, :, : part.shape[2] // 2].contiguous() for part in x[2:])],
        "not of one cache",
    ),
    "more heads": ("num_heads", lambda _: 3, "for rows of|weight"),
    "no heads": ("num_heads", lambda _: 0, "0 heads"),
    "no gates": ("intermediate_size", lambda _: -16, "-16 gates"),
    "fewer gates": ("intermediate_size", lambda _: INTERMEDIATE - 16, "weight"),
}


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("fault", FAULTS)
def test_arguments_that_do_not_fit_are_refused_and_end_no_process(fault, num_threads):
    name, change, message = FAULTS[fault]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with pytest.raises(ValueError, match=message):
            call(arguments() | {name: change(arguments()[name])})
        assert call(arguments()).isfinite().all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_what_no_kernel_multiplies_is_refused_with_weights_of_codes_too(dtype):
    given = arguments()
    shapes = [tuple(weight.shape) for weight in given["weights"]]
    weights = [seeded_weight(shape, 32, 8, False)[0].tiled() for shape in shapes]
    given["weights"] = [part for weight in weights for part in weight.parts]
    given["num_parts"] = [2] * len(weights)
    assert call(given).isfinite().all()
    with pytest.raises(ValueError, match="no CPU kernel for"):
        call(given | {"x": given["x"].to(dtype)})


@pytest.mark.parametrize("name", ["int8", "bf16", "int4", "fp8"])
def test_the_last_slot_may_be_written(name):
    given = arguments(name) | {"start_pos": torch.tensor([125, 0], dtype=torch.int32)}
    assert call(given).isfinite().all()
