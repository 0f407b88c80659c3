"""A quantised cache that is read wrongly is found, whatever is wrong; a right one passes."""

import dataclasses

import pytest
import torch
from conftest import TINY, seeded_model

import self_check as module
from engine import Engine, Sampling
from kv_cache import KVCache, make_caches
from kv_formats import FORMATS
from measure import Runner
from request import Request
from results import read_rows
from self_check import Checked, is_quantized, judge, limits_of, self_check

pytest_plugins = ["generate_process"]

QUANTIZED = [name for name, kv_format in FORMATS.items() if kv_format.kl_limits]
GREEDY = Sampling(320, temperature=0)
LIMITS = (0.01, 0.05)


def make_runner(
    formats=("int8", "int8"),
    *,
    compile=False,
    sampling=GREEDY,
    stored=40,
    cache_len=128,
    model=None,
):
    model = model or seeded_model()
    ids = tuple(range(3, 3 + stored))
    request = Request(
        depth_ids=ids[:-7],
        prompt_ids=ids[-7:],
        new_tokens=8,
        cache_len=cache_len,
        formats=formats,
        prefill_chunk=16,
    )
    caches = make_caches(model.config, formats, 1, cache_len)
    engine = Engine(model, caches, compile=compile, prefill_chunk=16)
    return Runner(engine=engine, request=request, sampling=sampling, stop_ids=())


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_right_cache_passes_and_its_kl_is_not_zero(name):
    checked = self_check(make_runner((name, name)), 32)
    assert checked.verdict != "fail"
    assert 0 < checked.kl < limits_of((name, name))[0]


def test_int8_in_fp32_arithmetic_is_fine():
    assert self_check(make_runner(), 64).verdict == "ok"


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(320, 0.8, 200), Sampling(320, 1.5, 0), Sampling(300, 0.8, 7)]
)
def test_the_step_that_was_timed_is_checked_and_no_other_is_compiled(sampling):
    runner = make_runner(compile=True, sampling=sampling)
    runner.warm_up("warming up")
    kinds = set(runner.engine._steps)
    assert self_check(runner, 8).verdict == "ok"
    assert set(runner.engine._steps) == kinds


def spoil_scales(monkeypatch):
    store = KVCache._store

    def spoiled(self, *args):
        store(self, *args)
        self.v_scale.mul_(1.5)

    monkeypatch.setattr(KVCache, "_store", spoiled)


def forget_codes(monkeypatch):
    store = KVCache._store

    def spoiled(self, *args):
        store(self, *args)
        self.k_codes.zero_()

    monkeypatch.setattr(KVCache, "_store", spoiled)


def choose_wrongly(monkeypatch):
    """As a compiled step would whose layers, called one by one, are right."""
    decode = Engine.decode
    monkeypatch.setattr(Engine, "decode", lambda *args: (decode(*args) + 1) % 300)


@pytest.mark.parametrize("break_it", [spoil_scales, forget_codes, choose_wrongly])
def test_what_computes_wrongly_fails(break_it, monkeypatch):
    # The whole-step call stores by itself; layer by layer `_store` does.
    monkeypatch.setattr("model.runs_in_one_call", lambda *_: False)
    assert self_check(make_runner(), 32).verdict == "ok"
    break_it(monkeypatch)
    assert self_check(make_runner(), 32).verdict == "fail"


def test_logits_that_are_not_finite_fail():
    nan = torch.full((3, 10), torch.nan)
    assert judge(torch.zeros(1, 3), nan, torch.randn(3, 10), LIMITS) == Checked(verdict="fail")


def distributions(kl):
    """Logits [50, 2] of a fair coin, and of one whose distribution is `kl` nats from it."""
    # KL = -ln(2) - ln(p (1 - p)) / 2 for p of one side, so p (1 - p) = exp(-2 (KL + ln 2)).
    product = torch.tensor(-2 * kl, dtype=torch.float64).exp() / 4
    p = 0.5 + (0.25 - product).sqrt()
    return torch.stack([p, 1 - p]).log().expand(50, 2), torch.zeros(50, 2)


@pytest.mark.parametrize(
    ("kl", "same", "verdict"),
    [
        (0.0099, 50, "ok"),
        (0.0099, 47, "ok"),
        (0.0099, 46, "warn"),
        (0.0101, 50, "warn"),
        (0.0499, 25, "warn"),
        (0.0499, 24, "fail"),
        (0.0501, 50, "fail"),
    ],
)
def test_verdicts_follow_from_kl_and_from_the_chosen_ids(kl, same, verdict):
    logits, ref_logits = distributions(kl)
    chosen = torch.tensor([[0] * same + [1] * (50 - same)])
    checked = judge(chosen, logits, ref_logits, LIMITS)
    assert checked.verdict == verdict
    assert checked.kl == pytest.approx(kl, rel=1e-6)
    assert checked.top1_pct == 2 * same


def test_the_coarser_format_sets_the_limits():
    fine, wrong = FORMATS["int8"].kl_limits
    assert limits_of(("bf16", "int8")) == limits_of(("int8", "int8")) == (5 * fine, 5 * wrong)
    assert is_quantized(("bf16", "int8"))
    assert not is_quantized(("bf16", "fp32"))


@pytest.mark.parametrize(("stored", "cache_len"), [(1, 128), (100, 128), (3000, 3328)])
def test_any_length_can_be_checked(stored, cache_len, monkeypatch):
    model = seeded_model(dataclasses.replace(TINY, max_seq_len=4096))
    seen = []
    exact = module.exact_logits
    monkeypatch.setattr(module, "exact_logits", lambda *a: (seen.append(a[1].shape), exact(*a))[1])
    runner = make_runner(stored=min(stored, 300), cache_len=cache_len, model=model)
    ids = tuple(i % 300 for i in range(stored))
    request = dataclasses.replace(runner.request, depth_ids=(), prompt_ids=ids)
    assert self_check(dataclasses.replace(runner, request=request), 80).verdict == "ok"
    context = min(stored, module.MAX_CONTEXT, cache_len // 2)
    assert seen == [(1, context + min(80, cache_len // 2))]


def test_time_that_runs_out_leaves_what_was_checked(monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", 0.0)
    seen = []
    monkeypatch.setattr(module, "judge", lambda *args: seen.append(args[0].shape))
    self_check(make_runner(), 32)
    assert seen == [(1, 1)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_without_memory_it_is_skipped(error, monkeypatch, caplog):
    def refuse(*_):
        raise error

    monkeypatch.setattr(module, "exact_logits", refuse)
    assert self_check(make_runner(), 8) == Checked(verdict="skipped")
    assert "no memory for the self-check" in caplog.text


SHORT = ("--max_new_tokens", 4, "--dtype", "float32")


@pytest.mark.parametrize(
    ("words", "verdict", "flags"),
    [
        (("--kv_cache_quantization",), "ok", set()),
        (("--kv_cache_quantization", "bf16,int8"), "ok", set()),
        (("--kv_cache_quantization", "--check_tokens", 0), None, {"unchecked"}),
        ((), None, set()),
    ],
)
def test_a_row_says_what_the_check_found(words, verdict, flags, run_generate, tmp_path):
    file = tmp_path / "rows.txt"
    run = run_generate(*SHORT, *words, "--write_result", file)
    assert run.code == 0
    [row] = read_rows(file)
    assert (row.check, set(row.flags) & {"unchecked", "check_failed"}) == (verdict, flags)
    assert (row.check_kl is None) == (verdict is None)
    assert ("check      ok: KL" in run.stderr) == (verdict == "ok")


def spoil_decode():
    choose_wrongly(pytest.MonkeyPatch())


def test_a_failed_check_leaves_its_row_and_exits_1(run_generate, tmp_path):
    file = tmp_path / "rows.txt"
    words = ("--kv_cache_quantization", "--write_result", file, "--json")
    run = run_generate(*SHORT, *words, prepare=spoil_decode)
    assert run.code == 1
    [row] = read_rows(file)
    assert (row.status, row.check) == ("ok", "fail")
    assert "check_failed" in row.flags
    assert run.document["check"] == "fail"
