"""The default model on real text, against perplexities of an independent implementation."""

import math

import pytest
import torch
from material import default_model, speeches

from checkpoint import open_checkpoint
from engine import load_model
from kv_cache import make_caches

TEXT_START, TEXT_END = 1_000_000, 1_060_000


@pytest.fixture(scope="module")
def scored():
    checkpoint = open_checkpoint(default_model())
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    ids = checkpoint.tokenizer().encode(speeches()[TEXT_START:TEXT_END])
    return model, ids


@torch.inference_mode()
def mean_nll(model, ids: list[int]) -> float:
    caches = make_caches(model.config, ("fp32", "fp32"), 1, len(ids))
    tokens = torch.tensor([ids])
    logits = model.logits(model(tokens, torch.zeros(1, dtype=torch.long), caches, past_len=0))
    return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).item()


@pytest.mark.network
def test_the_text_has_the_known_ids(scored):
    assert scored[1][:8] == [7952, 284, 653, 4713, 282, 260, 768, 11197]


@pytest.mark.network
@pytest.mark.parametrize(
    ("count", "perplexity"), [(512, 42.18), pytest.param(2048, 33.23, marks=pytest.mark.slow)]
)
def test_perplexity_is_the_known_one_within_half_a_percent(count, perplexity, scored):
    model, ids = scored
    assert math.exp(mean_nll(model, ids[:count])) == pytest.approx(perplexity, rel=0.005)
