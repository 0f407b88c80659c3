"""What is scored is read from the cache as stored, whatever the widths of steps and chunks."""

import math

import pytest
import torch
from attention_case import use_reference
from conftest import TINY, seeded_model

import scoring
from engine import Engine
from kv_cache import make_caches
from kv_formats import FORMATS
from quality import score, summarise
from scoring import Stream, cut_windows, is_exact, other_chunk, other_width, score_window

CONTEXT, SCORED = 70, 45
PLAIN = "fp32"
LOSSY = [name for name in FORMATS if name != PLAIN]
EXACT_STEPS = 5e-5  # of logits, fp32 sums in another order
# Kernels may round q to 16 bits, and an 8-bit code goes the other way for another last bit.
OTHER_CODES = 5e-3


def window(seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY.vocab_size, (CONTEXT + SCORED + 1,), generator=generator)


def stream(model, name=PLAIN, *, v_name=None, chunk=2048, width=16) -> Stream:
    caches = make_caches(TINY, (name, v_name or name), 1, 128)
    engine = Engine(model, caches, compile=False, prefill_chunk=chunk)
    return Stream(engine=engine, score_width=width)


def decoded(each: Stream, ids: torch.Tensor) -> torch.Tensor:
    """Logits [SCORED, V] behind the context."""
    each.prefill(ids[:CONTEXT])
    parts = [
        each.logits(ids[lo : min(lo + 16, CONTEXT + SCORED)], lo)
        for lo in range(CONTEXT, CONTEXT + SCORED, 16)
    ]
    return torch.cat(parts)


class EmulatedCache:
    """Attention of a whole window at once, as decode steps behind a context would see it.

    Tokens of the context see each other exactly; a later one sees itself exactly and all earlier
    ones as stored.
    """

    def __init__(self, name: str) -> None:
        self.format = FORMATS[name]

    def attend(self, q, k, v, start_pos, past_len=None):
        groups = q.shape[1] // k.shape[1]
        k_stored, v_stored = (self.format.decode(self.format.encode(x), x.dtype) for x in (k, v))
        k, v, k_stored, v_stored = (
            x.repeat_interleave(groups, 1) for x in (k, v, k_stored, v_stored)
        )
        count = q.shape[2]
        rows, columns = torch.arange(count)[:, None], torch.arange(count)[None]
        exact = (rows == columns) | (rows < CONTEXT)
        scores = torch.where(exact, q @ k.mT, q @ k_stored.mT) / math.sqrt(q.shape[-1])
        p = scores.masked_fill(columns > rows, -math.inf).softmax(-1)
        return (p * exact) @ v + (p * ~exact) @ v_stored


def emulated(model, name: str, ids: torch.Tensor) -> torch.Tensor:
    caches = [EmulatedCache(name)] * TINY.num_layers
    x = model(ids[None, :-1], torch.zeros(1, dtype=torch.long), caches, past_len=0)
    return model.logits(x[0, CONTEXT:])


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_one_pass_over_the_emulated_cache(name, tiny_model, monkeypatch):
    ids = window()
    found = decoded(stream(tiny_model, name), ids)
    assert (found - emulated(tiny_model, name, ids)).abs().max() < OTHER_CODES
    use_reference(monkeypatch)
    found = decoded(stream(tiny_model, name), ids)
    of_tokens = (found - emulated(tiny_model, name, ids)).abs().amax(-1)
    # A stored value that is rounded the other way moves the tokens that attend to it most.
    largest = of_tokens.max() if name == PLAIN else of_tokens.median()
    assert largest < EXACT_STEPS
    assert of_tokens.max() < OTHER_CODES


@pytest.mark.parametrize("name", LOSSY)
def test_the_kl_of_a_format_is_that_of_the_emulation_within_a_percent(name, tiny_model):
    ids = window()
    reference = stream(tiny_model)
    scores = score_window(ids, CONTEXT, reference, {"tested": stream(tiny_model, name)})["tested"]
    pair = (emulated(tiny_model, each, ids) for each in (name, PLAIN))
    expected = score(*pair, ids[CONTEXT + 1 :])
    assert scores.kl.shape == (SCORED,)
    assert scores.kl.mean().item() == pytest.approx(expected.kl.mean().item(), rel=0.01)
    torch.testing.assert_close(scores.nll, expected.nll, rtol=0, atol=OTHER_CODES)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("side", ["K and V", "K", "V"])
def test_a_lossy_format_never_shows_a_distance_of_zero(side, name, tiny_model):
    names = {"K and V": (name, name), "K": (name, PLAIN), "V": (PLAIN, name)}[side]
    floor = stream(tiny_model, chunk=other_chunk(2048, CONTEXT), width=other_width(16))
    others = {"floor": floor, "tested": stream(tiny_model, names[0], v_name=names[1])}
    found = score_window(window(), CONTEXT, stream(tiny_model), others)
    assert not is_exact([found["tested"]])
    assert found["tested"].kl.min() > 0
    kl = {which: summarise([scores]).kl_mean for which, scores in found.items()}
    assert kl["tested"] > 10 * kl["floor"]


def test_a_window_scored_by_one_prefill_reads_nothing_and_shows_zero(tiny_model):
    ids = window()
    logits = []
    for name in (PLAIN, "int8"):
        engine = stream(tiny_model, name).engine
        x = tiny_model(ids[None, :-1], torch.zeros(1, dtype=torch.long), engine.caches, past_len=0)
        logits.append(tiny_model.logits(x[0]))
    assert is_exact([score(*logits, ids[1:])])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_the_width_of_a_step_changes_no_logits(width, name, tiny_model):
    ids = window()
    wide, narrow = (decoded(stream(tiny_model, name, width=w), ids) for w in (16, width))
    assert (wide - narrow).abs().max() < (EXACT_STEPS if name == PLAIN else OTHER_CODES)


def test_the_chunk_of_the_prefill_changes_no_logits_of_a_plain_cache(tiny_model):
    ids = window()
    whole, cut = (decoded(stream(tiny_model, chunk=chunk), ids) for chunk in (2048, 7))
    assert (whole - cut).abs().max() < EXACT_STEPS


def test_streams_may_have_weights_of_their_own():
    reference, other = seeded_model(), seeded_model()
    other.layers[1].mlp.down_proj.weight.data.mul_(1.01)
    scores = score_window(window(), CONTEXT, stream(reference), {"tested": stream(other)})
    assert scores["tested"].kl.min() > 0


def test_no_more_than_sixteen_rows_of_logits_exist_at_once(tiny_model, monkeypatch):
    rows = []

    def watched(logits, ref_logits, next_ids):
        rows.append((len(logits), len(ref_logits), len(next_ids)))
        return score(logits, ref_logits, next_ids)

    monkeypatch.setattr(scoring, "score", watched)
    score_window(window(), CONTEXT, stream(tiny_model), {"tested": stream(tiny_model, "int8")})
    assert rows == [(16, 16, 16), (16, 16, 16), (13, 13, 13)]


def test_a_window_does_not_depend_on_the_one_before(tiny_model):
    streams = stream(tiny_model), {"tested": stream(tiny_model, "int8")}
    first = score_window(window(0), CONTEXT, *streams)["tested"]
    score_window(window(1), CONTEXT, *streams)
    again = score_window(window(0), CONTEXT, *streams)["tested"]
    for before, after in zip(first, again, strict=True):
        assert torch.equal(before, after)


def test_windows_are_spread_evenly_and_begin_with_a_bos_where_there_is_one():
    ids = torch.arange(100)
    assert [w.tolist() for w in cut_windows(ids, 3, 10, None)] == [
        list(range(start, start + 10)) for start in (0, 30, 60)
    ]
    assert [w.tolist()[:2] for w in cut_windows(ids, 2, 10, 777)] == [[777, 1], [777, 46]]
    assert torch.equal(ids, torch.arange(100))
    assert cut_windows(ids, 1, 100, None)[0].tolist() == ids.tolist()


@pytest.mark.parametrize("width", range(1, 17))
def test_the_floor_cuts_otherwise(width):
    assert 1 <= other_width(width) <= 16
    assert other_width(width) != width
    for context in (2, 3, 100, 5000):
        assert 1 <= other_chunk(2048, context) < min(2048, context)
    assert other_chunk(2048, 1) == 1
