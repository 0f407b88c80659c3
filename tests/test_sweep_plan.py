"""The plan of a sweep: predicted bytes, contexts, refusals, and no weight that is read."""

import dataclasses
import json

import pytest
import torch
from checkpoint_kinds import TOKENIZER

import checkpoint_base
import machine
import preflight
from checkpoint_random import RandomCheckpoint
from config import UserError, parse, repro_command
from durable import append_line
from eval_config import EvalConfig
from eval_plan import make_plan as eval_plan_of
from generate_config import GenerateConfig
from programs import config_of
from results import Row, format_row
from scripts import sweep_plan, sweep_rough
from scripts.sweep_cases import FITS, Order, Planned, ask_plan, read_order
from scripts.sweep_plan import PROGRAM, make_plan
from scripts.sweep_sections import LOSSY_CACHES, Case
from scripts.tiny_checkpoint import TINY, random_weights, write_hf

CPU = torch.device("cpu")
COMMON = {"device": "cpu"}
EAGER = ("--no-compile", "--threads", "1")
CONTEXT = 1024


@pytest.fixture(autouse=True)
def no_probes(monkeypatch):
    """No time is spent on bandwidth and arithmetic of this machine; nothing is remembered."""
    monkeypatch.setattr(sweep_rough, "bandwidth_gb_s", lambda device: 10.0)
    monkeypatch.setattr(sweep_rough, "flops_per_s", lambda device, dtype: 1e11)
    monkeypatch.setattr(machine, "source_commit", lambda: "abcdef0")
    sweep_plan.found_model.cache_clear()
    sweep_plan.system.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder whose context is short."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    config = dataclasses.replace(TINY, max_seq_len=CONTEXT)
    return str(write_hf(folder, config, random_weights(config), files=TOKENIZER.hf_files))


@pytest.fixture
def no_weights(monkeypatch):
    """Whatever reads or makes a weight fails."""

    def refuse(*_):
        raise AssertionError("a weight was read")

    for kind in (checkpoint_base.FileCheckpoint, RandomCheckpoint):
        monkeypatch.setattr(kind, "weights", refuse)
    monkeypatch.setattr(checkpoint_base, "model_sha", refuse)


def plan_of(*sections, path=None, extra=EAGER, **values):
    common = COMMON | ({"checkpoint_path": path} if path else {})
    return make_plan(Order(sections=sections, common=common, extra=extra, **values))


@pytest.mark.usefixtures("no_weights")
def test_what_a_case_will_hold_is_what_its_own_preflight_says(checkpoint):
    plan = plan_of("quick", path=checkpoint)
    assert [case.refused for case in plan.cases] == [""] * 4
    for case in plan.cases:
        config = config_of(case.repro)
        expected = preflight.preflight(config)
        assert {**case.sizes, PROGRAM: 0} == {**expected.expected_bytes, PROGRAM: 0}
        assert case.sizes[PROGRAM] > 0
        assert case.columns["cache_len"] == expected.request.cache_len
        assert case.columns["prompt_sha"] == expected.request.prompt_sha
        assert case.repro == repro_command("generate.py", parse(GenerateConfig, case.words))
        assert case.fits
        assert case.is_rough
        assert case.seconds > 0


@pytest.mark.usefixtures("no_weights")
def test_quality_cases_are_planned_without_their_text(checkpoint, monkeypatch):
    monkeypatch.setattr("eval_plan.read_text", lambda name: pytest.fail("a text was read"))
    plan = plan_of("quality", path=checkpoint, extra=("--threads", "1"))
    *runnable, last = plan.cases
    kinds = [(case.columns["kind"], case.columns["context"]) for case in runnable]
    # The largest multiple of 128 beside 256 scored tokens is 768.
    of_caches = [("quality", 512)] * len(LOSSY_CACHES) + [("quality", 768)] * 2
    assert kinds == [*of_caches, ("needle", 512), ("quality", 512)]
    assert "channels are no multiple of 32" in last.refused  # the tiny model has no int4
    assert (last.columns["kind"], dict(last.sizes)) == ("quality", {})
    for case in runnable:
        assert dict(case.sizes) == dict(eval_plan_of(config_of(case.repro)).expected_bytes)
        assert isinstance(config_of(case.repro), EvalConfig)


def test_the_deepest_case_fills_the_context_and_none_goes_beyond(checkpoint):
    plan = plan_of("kv", path=checkpoint)
    # 1024 - 512 - 128 = 384
    assert [case.columns["depth"] for case in plan.cases] == [0, 0, 384, 384]
    assert plan.left_out == (
        f"left out of kv: more than the checkpoint's context of {CONTEXT} tokens (8 cases)",
    )
    slots = [case.columns["cache_len"] for case in plan_of("cache", path=checkpoint).cases]
    assert slots == [1024, 1024]
    prompts = [case.columns["prompt_len"] for case in plan_of("prefill", path=checkpoint).cases]
    assert prompts == [512, 512, *[896] * 6]


def test_random_weights_have_no_context_to_fill():
    plan = plan_of("kv", path="random:tiny")
    assert max(case.columns["depth"] for case in plan.cases) == 65536
    assert "random weights have no trained context" in plan.left_out[0]


def test_a_case_of_two_sections_is_one(checkpoint):
    both = plan_of("kv", "weights", path=checkpoint).cases
    assert len({case.repro for case in both}) == len(both)
    shared = {case.repro for case in plan_of("kv", path=checkpoint).cases}
    shared &= {case.repro for case in plan_of("weights", path=checkpoint).cases}
    assert {case.section for case in both if case.repro in shared} == {"kv"}


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    case = plan_of("million", path="random:tiny").cases[-1]
    for free, fits in ((case.total_bytes / FITS * 1.01, True), (case.total_bytes, False)):
        monkeypatch.setattr(machine, "free_bytes", lambda device, free=free: int(free))
        monkeypatch.setattr(sweep_plan, "program_bytes", lambda *_: case.sizes[PROGRAM])
        again = plan_of("million", path="random:tiny").cases[-1]
        assert (again.fits, again.refused == "") == (fits, fits)
    assert again.refused.startswith("needs ")
    assert again.refused.endswith(" free")


def test_weights_that_a_checkpoint_cannot_have_are_one_refused_case(monkeypatch):
    def channels(*_):
        raise UserError("--quantization int4: 40 channels")

    monkeypatch.setattr(preflight, "planned_formats", channels)
    [case, *_] = plan_of("quick", path="random:tiny").cases
    assert case.refused == "--quantization int4: 40 channels"
    assert case.columns["model"] == "random:tiny"
    assert not case.sizes


def test_a_wrong_flag_leaves_no_columns():
    cases = plan_of("quick", path="random:tiny", extra=("--no-such-flag",)).cases
    assert {(case.refused, tuple(case.columns)) for case in cases} == {
        ("--no-such-flag: unknown flag; --help lists all", ())
    }


def test_cases_without_a_section_stay_two_even_if_they_are_one():
    case = Case(None, "generate.py", ("--checkpoint_path", "random:tiny", *EAGER))
    first, second = make_plan(Order(cases=(case, case))).cases
    assert first.repro == second.repro
    assert first.section is None


def test_rows_of_cases_alike_tell_the_time(tmp_path):
    [case, *_] = plan_of("kv", path="random:tiny").cases
    results = tmp_path / "rows.txt"
    figures = {"decode_tok_s": 100.0, "prefill_tok_s": 1000.0, "new_tokens": 128, "status": "ok"}
    row = Row(**case.columns | figures | {"time": "t", "repro": case.repro})
    append_line(results, format_row(row))
    told = plan_of("kv", path="random:tiny", results=str(results)).cases[0]
    assert not told.is_rough
    assert 10 < told.seconds < 30


def test_the_plan_comes_back_whole_from_a_process_of_its_own(checkpoint):
    order = Order(sections=("quick",), common=COMMON | {"checkpoint_path": checkpoint}, extra=EAGER)
    assert read_order(json.dumps(dataclasses.asdict(order))) == order
    plan = ask_plan(order)
    expected = plan_of("quick", path=checkpoint).cases
    moving = {"free_bytes": 0, "sizes": {}, "seconds": 0, "columns": {}}
    assert [dataclasses.replace(case, **moving) for case in plan.cases] == [
        dataclasses.replace(case, **moving) for case in expected
    ]
    for case, wanted in zip(plan.cases, expected, strict=True):
        assert isinstance(case, Planned)
        assert case.columns["cache_len"] == wanted.columns["cache_len"]
        assert case.columns["depth"] == wanted.columns["depth"]
