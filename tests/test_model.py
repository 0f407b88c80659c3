import dataclasses

import pytest
import torch
from conftest import TINY, seeded_model
from plain_llama import full_forward

from kv_cache import make_caches
from model import Transformer
from model_config import ModelConfig, RopeScaling

IDS = torch.randint(0, 320, (1, 48), generator=torch.Generator().manual_seed(3))


def prefill_hidden(model, ids, dtype="fp32"):
    caches = make_caches(model.config, (dtype, dtype), 1, 128)
    return model(ids, torch.zeros(1, dtype=torch.long), caches, past_len=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 6},
        {"num_kv_heads": 1},
        {"num_heads": 14, "num_kv_heads": 2},
        {"head_dim": 40},
        {"tie_embeddings": True},
        {"rope_theta": 100000.0, "norm_eps": 1e-6},
        {"qkv_bias": True},
        {"qkv_bias": True, "o_bias": True},
        {"qk_norm": True, "head_dim": 40},
    ],
    ids=str,
)
def test_logits_equal_a_forward_without_cache(changes):
    model = seeded_model(dataclasses.replace(TINY, **changes))
    logits = model.logits(prefill_hidden(model, IDS))[0]
    expected = full_forward(model, IDS[0].tolist()).float()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_tied_head_is_the_embedding():
    model = Transformer(dataclasses.replace(TINY, tie_embeddings=True))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_logits_are_fp32_of_only_the_rows_asked_for(tiny_model):
    x = prefill_hidden(tiny_model, IDS)
    last = tiny_model.logits(x[:, -1])
    assert last.shape == (1, TINY.vocab_size)
    assert last.dtype == torch.float32
    torch.testing.assert_close(last, tiny_model.logits(x)[:, -1])


def test_an_attention_factor_scales_both_sides_of_a_score():
    config = dataclasses.replace(TINY, rope_scaling=RopeScaling(kind="linear", attention_factor=3))
    model = seeded_model(config)
    expected = full_forward(model, IDS[0].tolist()).float()
    torch.testing.assert_close(
        model.logits(prefill_hidden(model, IDS))[0], expected, atol=1e-4, rtol=1e-4
    )
    plain = seeded_model(dataclasses.replace(config, rope_scaling=None))
    assert (full_forward(plain, IDS[0].tolist()) - expected).abs().max() > 0.1


def test_a_model_without_options_has_no_parameters_for_them(tiny_model):
    names = {name.rpartition(".")[2] for name, _ in tiny_model.named_parameters()}
    assert names == {"weight"}
    assert not any("q_norm" in name for name, _ in tiny_model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "6 heads over 4 KV heads"),
        ({"head_dim": 15}, "head_dim 15: even"),
        ({"head_dim": 2}, "head_dim 2: even"),
        ({"rope_theta": 1.0}, "rope_theta 1.0: numbers above 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_no_buffer_grows_with_the_context():
    sizes = []
    for max_seq_len in (512, 1 << 20):
        model = Transformer(ModelConfig(**{**vars(TINY), "max_seq_len": max_seq_len}))
        sizes.append(sum(buffer.nbytes for buffer in model.buffers()))
    assert sizes[0] == sizes[1] == TINY.head_dim // 2 * 4
