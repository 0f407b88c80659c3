"""One call for all layers: what the layers one by one give, results and caches alike."""

import dataclasses

import pytest
import torch
from attention_case import as_rows
from cache_case import INSTRUCTION_SETS
from conftest import TINY, seeded_model

import model as model_module
from kernels.slots import read_slots, write_slots_
from kv_cache import KVCache, fill_synthetic_, make_caches
from kv_formats import FORMATS, base_name, format_of
from weight_formats import Int4Linear, Int8Linear

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no C++ compiler here")

LLAMA = dataclasses.replace(TINY, hidden_size=96, head_dim=32, intermediate_size=160)
SCHEMES = {"dense": {}, "int8": {"int8": 4}, "int4 and dense": {"int4": 2}}
OPTIONS = {
    "qkv bias": {"qkv_bias": True},
    "both biases": {"qkv_bias": True, "o_bias": True},
    "one KV head": {"num_kv_heads": 1},
    "a KV head for each": {"num_kv_heads": LLAMA.num_heads},
    "head_dim 40": {"head_dim": 40},
    "head_dim 128": {"head_dim": 128},
    "norms of heads": {"qk_norm": True},
}
STEPS = [(1, 1), (2, 3), (16, 1), (1, 16)]
"""(B, T)."""


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    torch.ops.kv_fast.use_instruction_set(request.param)
    yield request.param
    torch.ops.kv_fast.use_instruction_set(INSTRUCTION_SETS[0])


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def quantise_(model, scheme):
    """Replace some linears of each layer; `scheme` as in SCHEMES."""
    for name, count in SCHEMES[scheme].items():
        kind = {"int8": Int8Linear, "int4": Int4Linear}[name]
        for layer in model.layers:
            attention, mlp = layer.attention, layer.mlp
            places = [(attention, "o_proj"), (mlp, "gate_up_proj"), (attention, "qkv_proj")]
            for module, leaf in [*places, (mlp, "down_proj")][:count]:
                setattr(module, leaf, kind.from_linear(getattr(module, leaf)))
    return model


def step(monkeypatch, model, formats, shape, *, in_one_call):
    """Hidden states of T tokens behind 70 and more stored ones, and the caches after them."""
    batch_size, num_tokens = shape
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, LLAMA.vocab_size, shape, generator=generator)
    caches = make_caches(model.config, formats, batch_size, 128)
    fill_synthetic_(caches, 128)
    for cache in caches:
        if cache.k_channels is not None:
            exponents = torch.randint(-3, 4, cache.k_channels.shape, generator=generator)
            cache.k_channels.copy_(exponents.float().exp2())
    calls = []
    ready = model_module.runs_in_one_call

    def counted(*args):
        calls.append(in_one_call and ready(*args))
        return calls[-1]

    monkeypatch.setattr(model_module, "runs_in_one_call", counted)
    with torch.inference_mode():
        x = model(ids, torch.arange(70, 70 + batch_size), caches)
    monkeypatch.undo()
    assert calls == [in_one_call]
    return x, caches


def vectors_in(caches):
    """What is stored stands for: [B, Hkv, S, D] of each layer's K and V."""
    for cache in caches:
        for parts, name in ((cache.k_parts, cache.k_format), (cache.v_parts, cache.v_format)):
            yield format_of(name).decode(tuple(map(as_rows, parts)), torch.float32)


def numbers_in(part):
    """Of nibbles each."""
    numbers = torch.stack((part & 15, part >> 4)) if part.dtype == torch.uint8 else part
    return numbers.float()


CODE_STEPS = {torch.int8: 1, torch.uint8: 1, torch.float8_e4m3fn: 32}


def assert_same(monkeypatch, model, formats, shape):
    """Of the first layer all that is stored; of the others what roundings of sums may differ by.

    Partial results are merged to base e layer by layer and to base 2 in the call: some eps of a
    dtype in each of three layers, of two digits where codes are multiplied; and a step of a code.
    Behind fp32 a value stored in fewer bits that is rounded the other way moves what attends to it.
    """
    x, caches = step(monkeypatch, model, formats, shape, in_one_call=True)
    expected, expected_caches = step(monkeypatch, model, formats, shape, in_one_call=False)
    eps = max(
        torch.finfo(x.dtype).eps, 2**-16 if {"int8", "int4"} & {*map(base_name, formats)} else 0
    )
    moved = sum(
        (vectors - others).abs().sum().item()
        for vectors, others in zip(vectors_in(caches), vectors_in(expected_caches), strict=True)
        if x.dtype == torch.float32
    )
    atol = 16 * eps * x.abs().max().item() + moved
    torch.testing.assert_close(x, expected, atol=atol, rtol=0)
    stored, expected_stored = list(caches.buffers()), list(expected_caches.buffers())
    per_layer = len(stored) // len(model.layers)
    for i, (part, expected_part) in enumerate(zip(stored, expected_stored, strict=True)):
        if i < per_layer:
            assert torch.equal(part, expected_part)
        atol = CODE_STEPS.get(part.dtype, 16 * max(eps, 2**-8))
        numbers = numbers_in(part), numbers_in(expected_part)
        torch.testing.assert_close(*numbers, atol=atol, rtol=0)


@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "formats",
    [
        *(("int8", "int8"), ("bf16", "fp16"), ("fp32", "int8"), ("int8", "int4"), ("int4", "fp8")),
        *(("int8-channel", "int4-rotated"), ("int4-channel", "int8")),
    ],
)
def test_one_call_gives_what_the_layers_give(instruction_set, monkeypatch, formats, dtype, shape):
    assert_same(monkeypatch, seeded_model(LLAMA, dtype), formats, shape)


@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_of_codes_and_any_number_of_threads_give_the_same(
    instruction_set, monkeypatch, scheme, shape, threads
):
    model = quantise_(seeded_model(LLAMA, torch.bfloat16), scheme)
    assert_same(monkeypatch, model, ("int8", "int8"), shape)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "formats",
    [("int8", "int8"), ("bf16", "bf16"), ("int4", "int4"), ("int8-channel", "int8-rotated")],
)
def test_options_of_the_model_give_the_same(monkeypatch, option, formats):
    model = seeded_model(dataclasses.replace(LLAMA, **OPTIONS[option]), torch.bfloat16)
    assert_same(monkeypatch, model, formats, (2, 3))


@pytest.mark.parametrize(
    ("changes", "shape"), [({}, (17, 1)), ({"intermediate_size": 40}, (1, 1))], ids=str
)
def test_what_cannot_be_one_call_runs_layer_by_layer(changes, shape):
    model = seeded_model(dataclasses.replace(LLAMA, **changes))
    tensors = model._layer_tensors()
    with torch.inference_mode():
        assert not model_module.runs_in_one_call(torch.ones(*shape, LLAMA.hidden_size), tensors)
        caches = make_caches(model.config, ("fp32", "fp32"), shape[0], 128)
        x = model(torch.ones(shape, dtype=torch.long), torch.zeros(shape[0], dtype=int), caches)
    assert x.isfinite().all()


HEAD_DIM = 64
EDGES = {
    "zeros": [0.0],
    "halves": [127.0, 0.5, 1.5, -0.5, -2.5, 126.5, -126.5],
    "tiny": [1e-8, -1e-9, 1e-30, 1e-45],
    "huge": [3e38, -3.4e38, 1e30],
    "steps": [i * 0.37 - 11 for i in range(HEAD_DIM)],
    "fp16's ends": [65504.0, 65520.0, 6e-8, 2.9e-8, -65504.0],
    "infinity": [float("inf"), 1.0, -3.0],
    "minus infinity": [float("-inf"), 1.0, -3.0],
    "far from 0": [100.3, 100.0, 101.7, 100.9],
    "far below 0": [-100.3, -100.0, -101.7],
    "NaN": [float("nan"), 1.0, -3.0],
}

NOT_FINITE = "infinity", "minus infinity", "NaN"


def stored_alone(cache, value, slot, dtype=torch.float32):
    """The step of a layer whose new V is `value` [D], at `slot`; it changes nothing else."""
    width, weight = 16, torch.zeros(3 * HEAD_DIM, 16)
    weight[2 * HEAD_DIM :, 0] = value  # of a norm that keeps the first channel of ones alone
    norm, angles = torch.eye(width)[0], torch.ones(1, 1, HEAD_DIM // 2)
    weights = [weight, torch.zeros(width, HEAD_DIM), *2 * [torch.zeros(2 * width, width)]]
    weights[3] = torch.zeros(width, width)
    to = [each.to(dtype) for each in (torch.ones(1, 1, width), norm, *weights)]
    x, norm, *weights = to
    return torch.ops.kv_fast.decode_layers(
        *(x, angles, 0 * angles, torch.tensor([slot]), weights, [1] * 4, [norm, norm], 0.0),
        *([], [], [], [], False, cache.k_parts, cache.v_parts, 1, width),
    )


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_what_the_format_encodes(instruction_set, name, edge):
    value = torch.tensor(EDGES[edge]).repeat(HEAD_DIM)[:HEAD_DIM]
    for slot in (0, 77, 127):
        cache, expected = (KVCache(name, name, (1, 1, 128, HEAD_DIM)) for _ in range(2))
        stored_alone(cache, value, slot)
        encoded = FORMATS[name].encode(value.view(1, 1, 1, -1))
        for part, expected_part, new in zip(cache.v_parts, expected.v_parts, encoded, strict=True):
            write_slots_(expected_part, torch.tensor([[slot]]), new)
            if edge in NOT_FINITE and not part.is_floating_point():
                continue  # codes of a vector without a finite scale say nothing
            torch.testing.assert_close(part, expected_part, atol=0, rtol=0, equal_nan=True)
    if edge == "NaN":
        assert read_slots(cache.v_parts[-1], 127, 128).isnan().any()


def test_the_compiler_is_told_what_the_call_changes():
    cache = KVCache("int8", "int8", (1, 1, 128, HEAD_DIM))
    width = 16
    angles = torch.ones(1, 1, HEAD_DIM // 2)
    shapes = (3 * HEAD_DIM, width), (width, HEAD_DIM), (2 * width, width), (width, width)
    weights = [torch.randn(shape) for shape in shapes]
    args = (
        *(torch.randn(1, 1, width), angles, 0 * angles, torch.tensor([3]), weights, [1] * 4),
        *(
            [torch.ones(width)] * 2,
            1e-5,
            [],
            [],
            [],
            [],
            False,
            cache.k_parts,
            cache.v_parts,
            1,
            width,
        ),
    )
    torch.library.opcheck(
        torch.ops.kv_fast.decode_layers.default, args, test_utils=["test_schema", "test_faketensor"]
    )
