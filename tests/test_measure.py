"""Clock stamps against a fake clock, and samples of a real tiny engine."""

import dataclasses
import gc

import pytest
import torch
from conftest import TINY, seeded_model
from torch import Tensor

import measure
from engine import Engine, Sampling
from kv_cache import fill_synthetic_, make_caches
from measure import WARMUP_STEPS, Recording, Runner
from request import Request

PROMPT = (5, 300, 17, 42, 42, 7, 119, 256)
GREEDY = Sampling(320, temperature=0)


class Clock:
    """Replaces time.perf_counter; it stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SlowToken(Tensor):
    """An id whose reading takes a quarter of a second and is counted."""

    clock: Clock
    reads: list[int]

    def __int__(self) -> int:
        self.clock.now_s += 0.25
        self.reads.append(self.position)
        return self.item()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", clock)
    SlowToken.clock, SlowToken.reads = clock, []
    return clock


def slow_tokens(clock, ids):
    """Prefill takes 2 s, each decode step 0.5 s."""
    for position, token_id in enumerate(ids, start=1):
        clock.now_s += 2 if position == 1 else 0.5
        token = torch.tensor([[token_id]]).as_subclass(SlowToken)
        token.position = position
        yield token


@pytest.fixture
def recording():
    return Recording()


def test_ttft_ends_with_the_first_id_on_the_host_and_decode_with_the_last(clock, recording):
    recording.run(slow_tokens(clock, [7, 8, 9, 10, 11]))
    assert recording.ttft_s == 2.25  # prefill and one read
    assert recording.decode_s == 4 * 0.5 + 0.25  # four steps for five ids, and one read
    assert recording.ids == [7, 8, 9, 10, 11]


def test_one_token_has_no_decode_time(clock, recording):
    recording.run(slow_tokens(clock, [7]))
    assert recording.ttft_s == 2.25
    assert recording.decode_s is None


def test_a_stop_id_at_step_5_of_200_counts_and_ends(clock, recording):
    ids = [7, 8, 9, 10, 3] + [11] * 195
    recording.run(slow_tokens(clock, ids), stop_ids={3, 4})
    assert recording.ids == ids[:5]
    assert recording.decode_s > 4 * 0.5


def test_without_stop_ids_nothing_is_read_between_the_first_and_the_last_id(clock, recording):
    recording.run(slow_tokens(clock, range(20)))
    assert sorted(set(SlowToken.reads)) == [1, 20]


@pytest.mark.parametrize("keywords", [{"stop_ids": {99}}, {"show": lambda token_id: None}])
def test_with_stop_ids_or_text_to_show_each_id_is_read(keywords, clock, recording):
    recording.run(slow_tokens(clock, range(20)), **keywords)
    assert sorted(set(SlowToken.reads)) == list(range(1, 21))


def test_ids_are_shown_as_they_come_the_stop_id_too(clock, recording):
    shown = []
    recording.run(slow_tokens(clock, [7, 8, 3, 9]), stop_ids={3}, show=shown.append)
    assert shown == [7, 8, 3]


@pytest.mark.parametrize("stop_ids", [(), {99}])
@pytest.mark.parametrize("position", [1, 3, 5])
def test_non_finite_logits_raise_with_the_position_of_the_first(
    position, stop_ids, clock, recording
):
    ids = [7, 8, 9, 10, 11]
    ids[position - 1] = -1
    with pytest.raises(FloatingPointError, match=f"^non-finite logits at new token {position}$"):
        recording.run(slow_tokens(clock, ids), stop_ids)


def test_statistics_are_known_at_every_moment(clock, recording):
    lines = [recording.statistics()]

    def tokens():
        for token in slow_tokens(clock, [7, 8, 9]):
            lines.append(recording.statistics())
            yield token
            lines.append(recording.statistics())

    recording.run(tokens())
    assert lines == [
        "before the first token",
        "before the first token",
        "1 token, TTFT 2.250 s",
        "1 token, TTFT 2.250 s",
        "2 tokens, TTFT 2.250 s, decode 2.00 tok/s",
        "2 tokens, TTFT 2.250 s, decode 1.00 tok/s",
        "3 tokens, TTFT 2.250 s, decode 2.00 tok/s",
    ]


def make_runner(model, *, sampling=GREEDY, depth=0, new_tokens=16, stop_ids=frozenset()):
    request = Request(
        depth_ids=PROMPT[:depth],
        prompt_ids=PROMPT[depth:],
        new_tokens=new_tokens,
        cache_len=128,
        formats=("fp32", "fp32"),
        prefill_chunk=2048,
    )
    caches = make_caches(TINY, request.formats, 1, request.cache_len)
    return Runner(
        engine=Engine(model, caches, compile=False),
        request=request,
        sampling=sampling,
        stop_ids=stop_ids,
    )


def sampled(runner, seed=0):
    recording = Recording()
    runner.sample(seed, recording)
    return recording.ids


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(320, temperature=0.9, top_k=50)])
def test_a_sample_depends_on_its_seed_and_on_nothing_before_it(sampling, tiny_model):
    alone = sampled(make_runner(tiny_model, sampling=sampling), seed=7)
    runner = make_runner(tiny_model, sampling=sampling)
    runner.warm_up("warming up")
    others = [sampled(runner, seed) for seed in (5, 6)]
    assert sampled(runner, seed=7) == alone
    assert (others[0] != alone) == (sampling.temperature > 0)
    assert len(alone) == 16


def test_samples_behind_a_filled_depth_equal_those_of_the_whole_prompt(tiny_model):
    whole, behind = make_runner(tiny_model), make_runner(tiny_model, depth=5)
    behind.fill()
    assert [sampled(behind) for _ in range(2)] == [sampled(whole)] * 2


def test_a_synthetic_depth_is_filled_without_the_model_and_lies_before_the_prompt(tiny_model):
    runner = make_runner(tiny_model)
    runner = dataclasses.replace(
        runner, request=dataclasses.replace(runner.request, synthetic_depth=90)
    )
    runner.fill()
    expected = make_caches(TINY, ("fp32", "fp32"), 1, 128)
    fill_synthetic_(expected, 90)
    for part, filled in zip(runner.engine.caches.buffers(), expected.buffers(), strict=True):
        assert torch.equal(part, filled)
    assert sampled(runner) == sampled(runner)
    stored = next(runner.engine.caches.buffers())[0, 0].abs().sum(-1) > 0
    assert stored.sum() == 90 + len(PROMPT) + 15  # the last new id is never stored


def test_each_of_several_stop_ids_ends_a_sample(tiny_model):
    ids = sampled(make_runner(tiny_model))
    end = next(i for i in range(3, 16) if ids[i] not in ids[:i])
    unused = min(set(range(320)) - set(ids))
    runner = make_runner(tiny_model, stop_ids={ids[end], unused})
    assert sampled(runner) == ids[: end + 1]


@pytest.mark.parametrize(("new_tokens", "steps"), [(1, 0), (4, 3), (100, WARMUP_STEPS)])
def test_the_warm_up_takes_the_steps_of_a_sample_up_to_its_limit(
    new_tokens, steps, tiny_model, monkeypatch
):
    assert WARMUP_STEPS >= 3
    runner = make_runner(tiny_model, new_tokens=new_tokens)
    calls, decode = [], runner.engine.decode
    monkeypatch.setattr(runner.engine, "decode", lambda *args: calls.append(1) or decode(*args))
    assert runner.warm_up("warming up") > 0
    assert len(calls) == steps


def test_the_garbage_collector_rests_during_a_sample_only(tiny_model):
    states = []
    make_runner(tiny_model).sample(0, Recording(), show=lambda _: states.append(gc.isenabled()))
    assert set(states) == {False}
    assert gc.isenabled()


def test_the_garbage_collector_is_back_after_an_error():
    model = seeded_model()
    model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="new token 1$"):
        sampled(make_runner(model))
    assert gc.isenabled()
