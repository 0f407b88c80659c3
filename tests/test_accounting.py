"""Computed bytes against the bytes of real tensors, closed forms and published sizes."""

import dataclasses

import pytest
import torch
from conftest import TINY, seeded_model

import accounting
from kv_cache import PREFILL_BLOCK, bytes_per_token, make_caches
from kv_formats import FORMATS
from model import Transformer
from model_config import ModelConfig
from request import Request

LLAMA_31_8B = ModelConfig(
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    max_seq_len=131072,
)
SMOLLM2_135M = ModelConfig(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    max_seq_len=8192,
    tie_embeddings=True,
)
SHAPES = {
    "grouped heads, head_dim of its own": TINY,
    "a KV head per head": dataclasses.replace(TINY, num_kv_heads=6),
    "one KV head": dataclasses.replace(TINY, num_kv_heads=1),
    "tied": dataclasses.replace(TINY, tie_embeddings=True),
}
every_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)


def make_request(*, depth=0, prompt=1, cache_len=128, formats=("bf16", "bf16"), chunk=2048):
    return Request(
        depth_ids=(1,) * depth,
        prompt_ids=(1,) * prompt,
        new_tokens=10,
        cache_len=cache_len,
        formats=formats,
        prefill_chunk=chunk,
    )


def empty_model(config, dtype=torch.bfloat16):
    with torch.device("meta"):
        return Transformer(config).to(dtype)


@every_shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_model_size_is_the_sum_of_all_matrices_and_norms(config, dtype):
    c, hidden = config, config.hidden_size
    qkv_and_o = hidden * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    layer = qkv_and_o + 3 * hidden * c.intermediate_size + 2 * hidden
    matrices = 1 if c.tie_embeddings else 2
    numbers = matrices * c.vocab_size * hidden + c.num_layers * layer + hidden
    assert accounting.model_size_bytes(seeded_model(c, dtype)) == numbers * dtype.itemsize


@every_shape
def test_a_decode_step_reads_every_weight_its_logits_depend_on_but_an_untied_embedding(config):
    model = seeded_model(config).requires_grad_()
    caches = make_caches(config, ("fp32", "fp32"), 1, 128)
    x = model(torch.tensor([[5]]), torch.tensor([0]), caches, past_len=0)
    model.logits(x).sum().backward()
    used = {name: p.nbytes for name, p in model.named_parameters() if p.grad is not None}
    if not config.tie_embeddings:
        del used["embed_tokens.weight"]
    assert accounting.weight_read_bytes(model) == sum(used.values())


@pytest.mark.parametrize(
    ("config", "stored_gb", "read_gb"),
    [(LLAMA_31_8B, 16.0605, 15.0098), (SMOLLM2_135M, 0.2690, 0.2690)],
)
def test_known_models_have_their_known_sizes_in_bf16(config, stored_gb, read_gb):
    model = empty_model(config)
    assert accounting.model_size_bytes(model) / 1e9 == pytest.approx(stored_gb, abs=5e-5)
    assert accounting.weight_read_bytes(model) / 1e9 == pytest.approx(read_gb, abs=5e-5)


@pytest.mark.parametrize(
    ("config", "formats", "expected"),
    [
        (LLAMA_31_8B, ("bf16", "bf16"), 131072),
        (LLAMA_31_8B, ("int8", "int8"), 66560),
        (LLAMA_31_8B, ("bf16", "int8"), (131072 + 66560) // 2),
        (SMOLLM2_135M, ("bf16", "bf16"), 23040),
        (SMOLLM2_135M, ("int8", "int8"), 11880),
        (LLAMA_31_8B, ("fp8", "fp8"), 66560),
        (LLAMA_31_8B, ("int8", "int4"), (66560 + 34816) // 2),
        (SMOLLM2_135M, ("int4", "int4"), 6480),
    ],
)
def test_known_models_have_their_known_bytes_per_cached_token(config, formats, expected):
    assert bytes_per_token(config, formats) == expected


@every_shape
@pytest.mark.parametrize("k_format", FORMATS)
@pytest.mark.parametrize("v_format", FORMATS)
def test_the_kv_cache_is_as_large_as_its_tensors(config, k_format, v_format):
    caches = make_caches(config, (k_format, v_format), 2, 256)
    held = sum(part.nbytes for cache in caches for part in cache.k_parts + cache.v_parts)
    assert accounting.kv_cache_bytes(caches) == held
    assert held == 2 * 256 * bytes_per_token(config, (k_format, v_format))


@every_shape
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
def test_expected_bytes_equal_what_is_then_allocated(config, kv_format):
    request = make_request(cache_len=384, formats=(kv_format, kv_format))
    expected = accounting.expected_bytes(request, config, torch.bfloat16)
    assert list(expected) == ["weights", "KV cache data", "KV cache scales", "workspace"]
    model = seeded_model(config, torch.bfloat16)
    caches = make_caches(config, request.formats, 1, request.cache_len)
    assert expected["weights"] == accounting.model_size_bytes(model)
    parts = [cache.k_parts + cache.v_parts for cache in caches]
    data = sum(part.nbytes for cache in parts for part in cache if part.shape[-1] > 1)
    assert expected["KV cache data"] == data
    assert data + expected["KV cache scales"] == accounting.kv_cache_bytes(caches)


def test_an_expected_size_takes_no_memory_to_compute():
    huge = dataclasses.replace(LLAMA_31_8B, num_layers=200, hidden_size=32768)
    request = make_request(cache_len=1 << 20)
    expected = accounting.expected_bytes(request, huge, torch.float32)
    assert sum(expected.values()) > 1e12


MLP_VALUES = 2 * 4096 + 4 * 14336  # of Llama-3.1-8B, per token of a chunk
ATTENTION_VALUES = 3 * 4096 + 2 * (32 + 2 * 8) * 128
RESULT_BYTES = 32 * 128 * (2 + 4 * 4)  # one result in bf16, and four in fp32 in the merge
LOGITS_BYTES = 128256 * 4


@pytest.mark.parametrize(
    ("request_", "rows"),
    [
        (make_request(prompt=7), 7),
        (make_request(prompt=900, depth=7), 900),
        (make_request(prompt=7, depth=900), 900),
        (make_request(prompt=7, depth=5000, chunk=1600), 1600),
    ],
)
def test_the_workspace_is_that_of_the_mlp_where_the_largest_chunk_is_large(request_, rows):
    expected = rows * MLP_VALUES * 2 + LOGITS_BYTES
    assert accounting.workspace_bytes(request_, LLAMA_31_8B, torch.bfloat16) == expected


@pytest.mark.parametrize(
    ("kv_format", "value_bytes"),
    [("bf16", 0), *((name, 2 + 2 + 4 + 4) for name in ("int8", "fp8", "int4"))],
    # K and V, fp32 codes and product
)
@pytest.mark.parametrize(("depth", "slots"), [(90, 97), (10**5, PREFILL_BLOCK)])
def test_the_workspace_behind_a_depth_holds_a_merge_and_one_decoded_block(
    kv_format, value_bytes, depth, slots
):
    small_mlp = dataclasses.replace(LLAMA_31_8B, intermediate_size=4096)
    request = make_request(prompt=7, depth=depth, chunk=16, formats=(kv_format, kv_format))
    attention = 16 * (ATTENTION_VALUES * 2 + RESULT_BYTES) + slots * 8 * 128 * value_bytes
    expected = attention + LOGITS_BYTES
    assert accounting.workspace_bytes(request, small_mlp, torch.bfloat16) == expected


def test_one_chunk_without_a_depth_merges_nothing():
    small_mlp = dataclasses.replace(LLAMA_31_8B, intermediate_size=4096)
    expected = 7 * ATTENTION_VALUES * 2 + LOGITS_BYTES
    request = make_request(prompt=7, formats=("int8", "int8"))
    assert accounting.workspace_bytes(request, small_mlp, torch.bfloat16) == expected


def test_bytes_are_described_by_their_sum_and_their_parts():
    text = accounting.describe_bytes({"weights": 2 * 10**9, "scales": 0, "workspace": 45_100_000})
    assert text == "2.05 GB (weights 2.00 GB, workspace 45.1 MB)"


@pytest.mark.parametrize("new_tokens", [2, 3, 9])
def test_a_mean_step_reads_the_weights_and_what_is_stored_at_that_step(new_tokens):
    request = make_request(depth=20, prompt=5, formats=("int8", "int8"))
    model = empty_model(TINY)
    filled = [20 + 5 + i - 1 for i in range(1, new_tokens)]
    per_token = 3 * 2 * 2 * (16 + 2)
    mean_kv_bytes = sum(filled) / len(filled) * per_token
    expected = accounting.weight_read_bytes(model) + mean_kv_bytes
    assert accounting.step_bytes(model, request, new_tokens) == pytest.approx(expected, abs=1)
