import dataclasses

import pytest
import torch
from attention_case import as_rows, overwrite_
from cache_case import INSTRUCTION_SETS, filled_cache, oracle, stored_attention, tolerance
from conftest import TINY

from config import UserError
from kernels import native
from kernels.flash import flash_attention
from kv_cache import KVCache, bytes_per_token, describe_caches, make_caches, parse_formats
from kv_formats import FORMATS, K_FORMATS, V_FORMATS
from model_config import ModelConfig

SHAPES = [  # G, D
    (3, 100),
    (1, 64),
    (2, 80),
    (3, 64),
    (4, 128),
    (7, 96),
    (8, 256),
]


@pytest.mark.parametrize(
    "formats",
    [
        *(("fp32", "fp32"), ("int8", "int8"), ("bf16", "int8"), ("fp16", "bf16")),
        *(("int4", "int4"), ("int8", "int4"), ("int4", "fp8"), ("fp8", "int8")),
    ],
)
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
@pytest.mark.parametrize("length", [1, 2, 16])
def test_stored_attention_equals_the_fp64_oracle(formats, group, head_dim, length, implementation):
    start = torch.tensor([0, 131, 256 - length])
    cache, k, v = filled_cache(*formats, (3, 2, 256, head_dim))
    q = torch.randn(3, 2 * group, length, head_dim, generator=torch.Generator().manual_seed(1))
    out, lse = stored_attention(cache, q, start)
    expected_out, expected_lse = oracle(q, k, v, start[:, None] + torch.arange(length))
    torch.testing.assert_close(out, expected_out.float(), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("filled", [31, 32, 33, 63, 64, 65, 127, 128, 129, 199])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_stored_attention_over_many_tiles_and_blocks_equals_the_oracle(
    name, filled, monkeypatch, implementation
):
    monkeypatch.setattr("kernels.reference.BLOCK", 50)
    cache, k, v = filled_cache(name, name, (1, 2, 256, 64))
    q = torch.randn(1, 4, 5, 64)
    out, lse = stored_attention(cache, q, torch.tensor([filled]))
    expected_out, expected_lse = oracle(q, k, v, [filled + torch.arange(5)])
    torch.testing.assert_close(out, expected_out.float(), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_query_without_slots_gives_zero_and_minus_infinity(name, implementation):
    cache, _, _ = filled_cache(name, name, (1, 2, 128, 64))
    out, lse = stored_attention(cache, torch.randn(1, 4, 1, 64), torch.tensor([0]))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_query_t_equals_the_same_query_alone_one_slot_later(name, implementation):
    cache, _, _ = filled_cache(name, name, (1, 2, 128, 64))
    q = torch.randn(1, 4, 5, 64)
    together = stored_attention(cache, q, torch.tensor([90]))
    for t in range(5):
        alone = stored_attention(cache, q[:, :, t : t + 1], torch.tensor([90 + t]))
        torch.testing.assert_close(
            together[0][:, :, t : t + 1],
            alone[0],
            atol=tolerance(implementation, name),
            rtol=1e-5,
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("filled", [3, 100])
def test_a_bad_value_that_a_query_sees_stays_visible(bad, name, filled, implementation):
    torch.manual_seed(0)
    for place in ("q", "k", "v"):
        q, k, v = torch.randn(1, 6, 2, 64), *torch.randn(2, 1, 2, 128, 64)
        {"q": q[:, :3, 0], "k": k[:, 0, 1].abs_(), "v": v[:, 0, 1]}[place][..., 5] = bad
        q[:, :3, 1] = 1.0  # sees an infinite key from the front: its score is inf, not -inf
        cache = KVCache(name, name, (1, 2, 128, 64))
        for parts, x in ((cache.k_parts, k), (cache.v_parts, v)):
            for part, new in zip(parts, FORMATS[name].encode(x), strict=True):
                overwrite_(part, new)
        out, lse = stored_attention(cache, q, torch.tensor([filled]))
        seen = out[0, :3, 0 if place == "q" else 1]  # by the head with it
        assert not seen.isfinite().all(-1).any()
        assert out[0, 3:].isfinite().all() and lse[0, 3:].isfinite().all()


def poison(cache, start, codes, others):
    for part in (*cache.k_parts, *cache.v_parts):
        rows = as_rows(part)
        rows[:, :, start:] = others if part.is_floating_point() else codes
        overwrite_(part, rows)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("past_len", [None, 90])
def test_unwritten_slots_change_nothing_bit_for_bit(name, past_len, implementation):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 3, 64), torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 64)
    answers = []
    for codes, others in ((0x7F, torch.nan), (0x1F, 1e4)):
        cache, _, _ = filled_cache(name, name, (1, 2, 256, 64))
        poison(cache, 90, codes, others)
        answers.append(cache.attend(q, k, v, torch.tensor([90]), past_len))
    assert bool(answers[0].isfinite().all())
    assert torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_each_row_of_a_mixed_batch_equals_its_own_run_whatever_its_neighbours_hold(
    name, implementation
):
    torch.manual_seed(0)
    start = torch.tensor([0, 131, 60])
    q, k, v = torch.randn(3, 6, 2, 64), torch.randn(3, 2, 2, 64), torch.randn(3, 2, 2, 64)
    cache, _, _ = filled_cache(name, name, (3, 2, 256, 64))
    for part in (*cache.k_parts, *cache.v_parts):
        rows = as_rows(part)
        for row in range(3):
            rows[row, :, start[row] :] = torch.nan if part.is_floating_point() else 0x7F
        overwrite_(part, rows)
    together = cache.attend(q, k, v, start)
    for row in range(3):
        alone = KVCache(name, name, (1, 2, 256, 64))
        for one, every in zip(alone.buffers(), cache.buffers(), strict=True):
            one.copy_(every[row : row + 1])
        r = slice(row, row + 1)
        torch.testing.assert_close(together[r], alone.attend(q[r], k[r], v[r], start[r]))


@pytest.mark.parametrize("name", FORMATS)
def test_decode_sees_its_own_token_exactly_and_earlier_ones_as_stored(name, implementation):
    torch.manual_seed(0)
    cache, k_past, v_past = filled_cache(name, name, (1, 2, 128, 64))
    q, k, v = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64)
    answer = cache.attend(q, k, v, torch.tensor([100]))
    seen_k, seen_v = torch.cat((k_past[:, :, :100], k), 2), torch.cat((v_past[:, :, :100], v), 2)
    expected, _ = oracle(q, seen_k, seen_v, [torch.tensor([101])])
    torch.testing.assert_close(
        answer, expected.float(), atol=tolerance(implementation, name), rtol=1e-4
    )


@pytest.mark.parametrize("name", FORMATS)
def test_verification_of_several_tokens_equals_decoding_them_one_by_one(name, implementation):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 5, 64), torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, 64)
    together, _, _ = filled_cache(name, name, (1, 2, 128, 64))
    one_by_one, _, _ = filled_cache(name, name, (1, 2, 128, 64))
    answer = together.attend(q, k, v, torch.tensor([70]))
    for t in range(5):
        new = (x[:, :, t : t + 1] for x in (q, k, v))
        alone = one_by_one.attend(*new, torch.tensor([70 + t]))
        torch.testing.assert_close(
            answer[:, :, t : t + 1], alone, atol=tolerance(implementation, name), rtol=1e-4
        )
    for a, b in zip(together.buffers(), one_by_one.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("past_len", [70, 128, 150])
def test_prefill_sees_its_chunk_exactly_and_earlier_chunks_as_stored(
    name, past_len, monkeypatch, implementation
):
    monkeypatch.setattr("kv_cache.PREFILL_BLOCK", 30)
    torch.manual_seed(0)
    cache, k_past, v_past = filled_cache(name, name, (1, 2, 256, 64))
    q, k, v = torch.randn(1, 6, 20, 64), torch.randn(1, 2, 20, 64), torch.randn(1, 2, 20, 64)
    answer = cache.attend(q, k, v, torch.tensor([past_len]), past_len)
    seen_k = torch.cat((k_past[:, :, :past_len], k), 2)
    seen_v = torch.cat((v_past[:, :, :past_len], v), 2)
    expected, _ = oracle(q, seen_k, seen_v, [past_len + 1 + torch.arange(20)])
    torch.testing.assert_close(answer, expected.float(), atol=1e-5, rtol=1e-4)
    for parts, new in ((cache.k_parts, k), (cache.v_parts, v)):
        for part, encoded in zip(parts, FORMATS[name].encode(new), strict=True):
            assert torch.equal(as_rows(part)[:, :, past_len : past_len + 20], encoded)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_flash_attention_gives_the_natural_log_sum_exp(causal, group, head_dim):
    torch.manual_seed(0)
    q = torch.randn(2, 2 * group, 33, head_dim)
    k, v = torch.randn(2, 2, 33, head_dim), torch.randn(2, 2, 33, head_dim)
    out, lse = flash_attention(q, k, v, causal=causal)
    bound = 1 + torch.arange(33) if causal else torch.full((33,), 33)
    expected_out, expected_lse = oracle(q, k, v, [bound, bound])
    torch.testing.assert_close(out, expected_out.float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_answer_and_the_same_bits_twice(threads):
    cache, k, v = filled_cache("int8", "int8", (1, 3, 1024, 64))
    q = torch.randn(1, 9, 1, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (out, lse), again = (stored_attention(cache, q, torch.tensor([1000])) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    expected_out, expected_lse = oracle(q, k, v, [torch.tensor([1000])])
    atol = tolerance(INSTRUCTION_SETS[0] if INSTRUCTION_SETS else "reference", "int8")
    torch.testing.assert_close(out, expected_out.float(), atol=atol, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse.float(), atol=atol, rtol=1e-5)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


REFUSED = {  # Hq, T
    "17 queries per call, at most 16": (4, 17),
    "5 query heads are not a multiple of 2 KV heads": (5, 1),
}


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("message", REFUSED)
def test_queries_of_wrong_number_are_refused(message, has_kernels, monkeypatch):
    num_heads, length = REFUSED[message]
    if not has_kernels:
        monkeypatch.setattr(native, "is_loaded", lambda: False)
    cache, _, _ = filled_cache("int8", "int8", (1, 2, 128, 64))
    q, k, v = (torch.randn(1, heads, length, 64) for heads in (num_heads, 2, 2))
    with pytest.raises(ValueError, match=message):
        stored_attention(cache, q, torch.tensor([50]))
    with pytest.raises(ValueError, match=message):
        cache.attend(q, k, v, torch.tensor([50]))


@pytest.mark.parametrize(("start", "length"), [(129, 1), (125, 5), (-1, 1)])
def test_a_length_beyond_the_cache_is_refused(start, length, implementation):
    cache, _, _ = filled_cache("int8", "int8", (1, 2, 128, 64))
    message = f"start_pos {start} and {length} queries in a cache of 128 slots"
    with pytest.raises(ValueError, match=message):
        stored_attention(cache, torch.randn(1, 4, length, 64), torch.tensor([start]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(6, 6, 16), (6, 2, 16), (6, 1, 40)])
def test_bytes_per_token_is_what_the_tensors_take(name, shape):
    num_heads, num_kv_heads, head_dim = shape
    config = dataclasses.replace(
        TINY, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    caches = make_caches(config, (name, "int8"), 2, 256)
    total = sum(buffer.nbytes for buffer in caches.buffers())
    assert total == 2 * 256 * bytes_per_token(config, (name, "int8"))


@pytest.mark.parametrize(
    ("layers", "num_kv_heads", "head_dim", "bf16", "int8", "int4"),
    [
        (32, 32, 128, 524288, 266240, 139264),
        (32, 8, 128, 131072, 66560, 34816),
        (30, 3, 64, 23040, 11880, 6480),
    ],
    ids=["Llama-2-7B", "Llama-3.1-8B", "SmolLM2-135M"],
)
def test_bytes_per_token_of_known_models(layers, num_kv_heads, head_dim, bf16, int8, int4):
    config = ModelConfig(
        num_layers=layers,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=64,
        intermediate_size=64,
        vocab_size=64,
        max_seq_len=64,
    )
    assert bytes_per_token(config, ("bf16", "bf16")) == bf16
    assert bytes_per_token(config, ("int8", "int8")) == int8
    assert bytes_per_token(config, ("fp8", "fp8")) == int8
    assert bytes_per_token(config, ("int4", "int4")) == int4
    assert bytes_per_token(config, ("int8", "int4")) == (int8 + int4) // 2


def test_caches_are_buffers_that_are_not_saved():
    caches = make_caches(TINY, ("int8", "bf16"), 1, 128)
    assert len(list(caches.buffers())) == 3 * TINY.num_layers
    assert caches.state_dict() == {}


def test_the_description_is_read_from_the_tensors():
    text = describe_caches(make_caches(TINY, ("int8", "int4"), 1, 12800))
    vectors = 3 * 2 * 12800 / 1e6
    assert f"3 layers of K int8, V int4 [1, 2, 12800, 16], {vectors * (16 + 8):.1f} MB data" in text
    assert f"+ {vectors * (2 + 2 + 2):.1f} MB scales (bf16: {vectors * 2 * 2 * 16:.1f})" in text


@pytest.mark.parametrize(
    ("spec", "formats"),
    [("int8", ("int8", "int8")), ("int8,bf16", ("int8", "bf16")), ("fp32", ("fp32", "fp32"))],
)
def test_one_format_name_is_for_both_sides_and_two_are_for_k_and_v(spec, formats):
    assert parse_formats(spec) == formats


@pytest.mark.parametrize("spec", ["int3", "", "int8,", "int8,bf16,int8", "INT8"])
def test_an_unknown_format_is_refused_with_the_list(spec):
    with pytest.raises(UserError, match="give one of ") as refused:
        parse_formats(spec)
    assert all(name in str(refused.value) for name in {*K_FORMATS, *V_FORMATS})
