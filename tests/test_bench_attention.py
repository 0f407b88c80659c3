"""The microbenchmark: what it computes, counts and prints; times come from a clock of the test."""

import contextlib
import dataclasses
import io
import json
import logging
import math

import pytest
import torch

import machine
from command import run
from config import UserError, parse
from kernels import ops, reference
from scripts import attention_methods, bench_attention
from scripts.attention_methods import Case, Heads, Method
from scripts.attention_table import COLUMNS, table
from scripts.bench_attention import (
    BenchAttentionConfig,
    Timing,
    choose_methods,
    main,
    make_cell,
)

CPU = torch.device("cpu")
CASE = Case(Heads(6, 2, 16), filled=40, batch_size=2, queries=3, device=CPU)
WORDS = (
    *("--filled", "16,32,64", "--heads", "4/2/16,3/3/8", "--formats", "bf16,int8,int8+bf16"),
    *("--queries", "3", "--batch_size", "2", "--repeats", "4"),
)
READ_BYTES = 256 * machine.MIB
"""Of the sum where no cache is larger."""

ON_ONE_THREAD = ("--device", "cpu", "--threads", "1")


@pytest.fixture(autouse=True, scope="module")
def quick():
    """No probes of the machine, one thread on tiny tensors, and then the threads as they were."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "last_level_cache_bytes", lambda: 0)
        patch.setattr(machine, "busy_cores", lambda: 0.25)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def printed(*words):
    """What the command writes to stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        main(parse(BenchAttentionConfig, [*words, *ON_ONE_THREAD]))
    return stdout.getvalue()


@pytest.fixture(scope="module")
def document():
    [line] = printed(*WORDS, "--json").splitlines()
    return json.loads(line)


def call_of(method: Method):
    """A layer's call, and its tensors and settings."""
    call = method.make_layer()
    return call, call.args


@pytest.mark.parametrize(
    "formats", [("bf16", "bf16"), ("int8", "int8"), ("int8", "fp32"), ("int4", "fp8")]
)
def test_ours_is_the_op_on_a_cache_of_random_vectors(formats):
    call, (q, k, v, start_pos, *settings) = call_of(attention_methods.stored(CASE, formats))
    assert call.func is ops.stored_attention
    assert q.shape == (2, 6, 3, 16)
    assert start_pos.tolist() == [40, 40]
    assert settings == [*formats, 1 / math.sqrt(16)]
    out, lse = call()
    expected = reference.stored_attention(q, k, v, start_pos, *formats, 1 / math.sqrt(16))
    torch.testing.assert_close((out, lse), expected, atol=1e-3, rtol=1e-3)
    assert len(k[0].unique()) > 100


def test_sdpa_reads_as_many_slots_as_ours():
    call, (q, k, v) = call_of(attention_methods.sdpa(CASE))
    assert k.shape == v.shape == (2, 2, 42, 16)
    expected = [reference.attention(*row, 1 / math.sqrt(16))[0] for row in zip(q, k, v)]  # noqa: B905
    torch.testing.assert_close(call().float(), torch.stack(expected), atol=2e-2, rtol=2e-2)


def test_the_origins_way_is_attention_over_what_is_stored():
    call, (q, k, v) = call_of(attention_methods.origin(CASE))
    at, scale = torch.tensor([42, 42]), 1 / math.sqrt(16)  # one query at a time sees the 42 slots
    expected = [
        reference.stored_attention(q[:, :, t : t + 1], k, v, at, "int8", "int8", scale)[0]
        for t in range(3)
    ]
    torch.testing.assert_close(call().float(), torch.cat(expected, 2), atol=3e-2, rtol=3e-2)


def test_a_method_counts_the_bytes_that_it_allocates():
    for method in (attention_methods.sdpa(CASE), attention_methods.origin(CASE)):
        _, (_, *sides) = call_of(method)
        tensors = [t for side in sides for t in ([side] if torch.is_tensor(side) else side)]
        assert method.held_bytes == method.read_bytes == sum(t.nbytes for t in tensors)
    for formats, per_token in ((("int8", "bf16"), 16 + 2 + 32), (("int4", "int4"), 2 * (8 + 4))):
        ours = attention_methods.stored(CASE, formats)
        _, (_, k, v, *_) = call_of(ours)
        assert ours.held_bytes == sum(t.nbytes for t in (*k, *v)) == 2 * 2 * 128 * per_token
    assert attention_methods.origin(CASE).scratch_bytes == 2 * 42 * (2 + 6) * 16 * 2 * 2


@pytest.mark.parametrize(
    ("touched", "held", "budget", "layers"),
    [(100, 100, 10**6, 10), (300, 100, 10**6, 4), (1, 1, 10**6, 32), (100, 100, 350, 3)]
    + [(100, 100, 0, 1), (5000, 100, 10**6, 1)],
    ids=["evicting", "rounded up", "as a model", "memory", "at least one", "large"],
)
def test_layers_push_each_other_out_of_the_cache(touched, held, budget, layers, monkeypatch):
    monkeypatch.setattr(attention_methods, "evicting_bytes", lambda device: 1000)
    method = Method("m", lambda: lambda: None, touched, held)
    assert attention_methods.num_layers(method, CPU, budget) == layers


def test_a_pass_that_evicts_is_twice_the_last_level_cache(monkeypatch):
    for cache_mib, evicting_mib in ((0, 256), (32, 256), (200, 400)):
        monkeypatch.setattr(machine, "last_level_cache_bytes", lambda n=cache_mib: n * machine.MIB)
        assert attention_methods.evicting_bytes(CPU) == evicting_mib * machine.MIB


def test_the_machines_bandwidth_is_that_of_a_sum_in_the_same_turns(monkeypatch):
    read = attention_methods.reading(CPU)
    assert read.read_bytes == READ_BYTES
    call = read.make_layer()
    assert call() == READ_BYTES / 4  # of ones
    timings = {
        "bf16": Timing(Method("bf16", call, 3_000_000, 1), 1, [2e-3, 1e-3, 9e-3]),
        "sdpa": Timing(Method("sdpa", call, 1, 1), 1, [1e-3]),
        "read": Timing(read, 1, [READ_BYTES / 20e9, READ_BYTES / 5e9, READ_BYTES / 6e9]),
    }
    cell = make_cell(CASE, ("bf16", "bf16"), timings)
    assert cell.bandwidth_gb_s == pytest.approx(1.5)
    assert cell.machine_gb_s == pytest.approx(6)
    assert cell.bandwidth_pct == pytest.approx(25)


def test_methods_run_in_turns_and_each_gets_its_own_times(monkeypatch):
    clock_s, order = 0.0, []

    def make_pass(name, seconds):
        def call():
            nonlocal clock_s
            clock_s += seconds
            order.append(name)

        return attention_methods.Pass(Method(name, lambda: call, 1, 1), 2, CPU)

    passes = [make_pass("a", 1.0), make_pass("b", 10.0)]
    monkeypatch.setattr(attention_methods.time, "perf_counter", lambda: clock_s)
    assert attention_methods.interleaved_s(passes, 3, CPU) == [[2.0] * 3, [20.0] * 3]
    assert order == ["a", "a", "b", "b"] * 4  # once to warm up


def test_the_document_has_the_cells_asked_for(document):
    cells = [(c["heads"], c["k_format"], c["v_format"], c["filled"]) for c in document["cells"]]
    formats = [("bf16", "bf16"), ("int8", "int8"), ("int8", "bf16")]
    assert cells == [
        (heads, *pair, filled)
        for heads in ("4/2/16", "3/3/8")
        for pair in formats
        for filled in (16, 32, 64)
    ]
    assert document["status"] == "ok"
    assert document["attention"] == ops.implementation(CPU)
    assert document["command"].startswith("python scripts/bench_attention.py --filled 16,32,64 ")
    assert {"torch", "threads", "commit", "device_name"} <= set(document)


def test_the_figures_of_a_cell_follow_from_its_times(document):
    bf16_s = {
        (c["heads"], c["filled"]): c["time_s"]
        for c in document["cells"]
        if c["k_format"] == c["v_format"] == "bf16"
    }
    widths = {"bf16": lambda head_dim: 2 * head_dim, "int8": lambda head_dim: head_dim + 2}
    for cell in document["cells"]:
        _, num_kv_heads, head_dim = map(int, cell["heads"].split("/"))
        per_token = widths[cell["k_format"]](head_dim) + widths[cell["v_format"]](head_dim)
        assert cell["read_bytes"] == 2 * num_kv_heads * (cell["filled"] + 2) * per_token
        samples_s = sorted(cell["samples_s"])
        assert len(samples_s) == 4
        assert samples_s[0] > 0
        assert cell["time_s"] == pytest.approx(sum(samples_s[1:3]) / 2)
        rate = cell["read_bytes"] / cell["time_s"] / 1e9
        assert cell["bandwidth_gb_s"] == pytest.approx(rate)
        assert cell["bandwidth_pct"] == pytest.approx(100 * rate / cell["machine_gb_s"])
        assert cell["speedup_over_sdpa"] == pytest.approx(cell["sdpa_s"] / cell["time_s"])
        base_s = bf16_s[cell["heads"], cell["filled"]]
        assert cell["speedup_over_bf16"] == pytest.approx(base_s / cell["time_s"])
        if cell["k_format"] == cell["v_format"] == "int8":
            assert cell["speedup_over_origin"] == pytest.approx(cell["origin_s"] / cell["time_s"])
        else:
            assert cell["origin_s"] is cell["speedup_over_origin"] is None
        assert cell["layers"] == attention_methods.MAX_LAYERS
        assert cell["in_cache"]


def test_a_cell_that_reads_more_than_the_caches_hold_is_not_marked(document):
    cell = {**document["cells"][0], "in_cache": False}
    assert COLUMNS["filled"](document["cells"][0]) == "16\N{DAGGER}"
    assert COLUMNS["filled"](cell) == "16"
    assert "may come from the caches" in table(document)
    assert "may come from the caches" not in table({**document, "cells": [cell]})


def test_the_time_is_fitted_over_the_lengths(document):
    assert len(document["fits"]) == 6
    for fit in document["fits"]:
        cells = [
            cell
            for cell in document["cells"]
            if all(cell[name] == fit[name] for name in ("heads", "k_format", "v_format"))
        ]
        residuals = [
            cell["time_s"] - fit["intercept_s"] - fit["slope_s_per_token"] * cell["filled"]
            for cell in cells
        ]
        mean_s = sum(cell["time_s"] for cell in cells) / 3
        total = sum((cell["time_s"] - mean_s) ** 2 for cell in cells)
        assert sum(residuals) == pytest.approx(0, abs=1e-6 * mean_s)
        assert 1 - sum(r * r for r in residuals) / total == pytest.approx(fit["r_squared"])


def test_two_lengths_have_no_fit():
    document = json.loads(printed(*WORDS[2:], "--filled", "16,32", "--json"))
    assert len(document["cells"]) == 12
    assert document["fits"] == []
    assert "fit" not in table(document)


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]


def test_the_table_says_what_the_document_says(document):
    head, _, *rows = rows_of(table(document))
    assert head == list(COLUMNS)
    fitted, measured = rows[3::4], [row for index, row in enumerate(rows) if index % 4 != 3]
    assert all(row[2] == "fit" for row in fitted)
    for row, cell in zip(measured, document["cells"], strict=True):
        formats = f"{cell['k_format']}, {cell['v_format']}"
        length = f"{cell['filled']}\N{DAGGER}"
        assert row[:4] == [cell["heads"], formats, length, str(cell["layers"])]
        names = ["spread_pct", "bandwidth_gb_s", "machine_gb_s", "bandwidth_pct"]
        names += [f"speedup_over_{peer}" for peer in ("bf16", "sdpa", "origin")]
        assert float(row[4]) == pytest.approx(1e6 * cell["time_s"], abs=0.051)
        for text, name in zip(row[5:], names, strict=True):
            shown = None if text == "-" else float(text)
            assert shown == pytest.approx(cell[name], abs=0.051)
    for row, fit in zip(fitted, document["fits"], strict=True):
        intercept_us, slope = row[4].removesuffix(" n/1000").split(" + ")
        assert float(intercept_us) == pytest.approx(1e6 * fit["intercept_s"], abs=0.051)
        assert float(slope) == pytest.approx(1e9 * fit["slope_s_per_token"], abs=0.00051)
        assert row[5] == f"R2 {fit['r_squared']:.5f}"


def test_without_json_the_table_is_printed():
    head, _, *rows = rows_of(printed("--filled", "8", "--heads", "2/1/8", "--repeats", "2"))
    assert head == list(COLUMNS)
    assert [row[1] for row in rows] == ["bf16, bf16", "int8, int8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--filled 16,x", "--filled 16,x: give a whole number from 1 to "),
        ("--filled 0", "--filled 0: give a whole number"),
        ("--filled 16,", "--filled 16,: give a whole number"),
        ("--filled 1.5", "--filled 1.5: give a whole number"),
        ("--heads 32/8", "--heads 32/8: give Hq/Hkv/D with Hq a multiple of Hkv"),
        ("--heads 32/8/128/1", "--heads 32/8/128/1: give Hq/Hkv/D"),
        ("--heads 32/0/128", "--heads 32/0/128: give Hq/Hkv/D"),
        ("--heads 32/5/128", "--heads 32/5/128: give Hq/Hkv/D"),
        (
            "--formats int7",
            "--formats int7: give one of bf16, fp16, fp32, int8, fp8, int4 or two as K+V",
        ),
        ("--formats int4 --heads 4/2/15", "--heads 4/2/15: int4 packs pairs of channels"),
        ("--formats int8+int8+int8", "--formats int8+int8+int8: give one of"),
        ("--formats \x1b", r"--formats \x1b: give one of"),
        ("--filled 1099511627776", "--filled 1099511627776: one layer of 32/8/128 in all formats"),
        ("--queries 17", "--queries 17: must be at most 16"),
        ("--repeats 1", "--repeats 1: must be at least 2"),
        ("--threads 100000", "--threads 100000: there are "),
    ],
)
def test_a_wrong_request_ends_with_one_line_and_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr(bench_attention, "time_methods", lambda *_: pytest.fail("must not run"))
    assert run(main, BenchAttentionConfig, words.split(" ")) == 2
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert line.startswith(f"error: {message}")
    assert not out


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"takes 0\.00 GB, 0\.00 free"):
        choose_methods(CASE, [("int8", "int8")], 100)


def test_the_origins_way_is_left_out_where_its_copies_do_not_fit(caplog):
    case = dataclasses.replace(CASE, filled=4096, queries=1)
    origin = attention_methods.origin(case)
    others = [attention_methods.stored(case, ("int8", "int8")), attention_methods.sdpa(case)]
    needed = sum(m.held_bytes for m in (*others, origin)) + origin.scratch_bytes
    formats = [("int8", "int8")]
    with caplog.at_level(logging.INFO, logger="kv_fast"):
        chosen = [choose_methods(case, formats, free) for free in (needed, needed - 1)]
    names = [[method.name for method in some] for some in chosen]
    assert names == [["int8", "sdpa", "origin"], ["int8", "sdpa"]]
    assert caplog.text.count("6/2/16, 4096 filled: without the origin's way") == 1
    wanted = choose_methods(case, [("bf16", "bf16")], needed)
    assert [method.name for method in wanted] == ["bf16", "sdpa"]


def test_a_cell_without_the_origins_way_says_so(monkeypatch):
    monkeypatch.setattr(
        bench_attention, "choose_methods", lambda *request: choose_methods(*request)[:-1]
    )
    words = ["--filled", "8", "--heads", "2/1/8", "--formats", "int8", "--repeats", "2", "--json"]
    [cell] = json.loads(printed(*words))["cells"]
    assert cell["origin_s"] is cell["speedup_over_origin"] is cell["speedup_over_bf16"] is None
    assert COLUMNS["x origin"](cell) == COLUMNS["x bf16"](cell) == "-"


@pytest.mark.cuda
def test_on_cuda_every_method_is_measured(capsys):
    words = [*WORDS[2:], "--filled", "128,4096", "--device", "cuda", "--json"]
    main(parse(BenchAttentionConfig, words))
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert len(cells) == 12
    assert all(min(cell["time_s"], cell["sdpa_s"], *cell["samples_s"]) > 0 for cell in cells)
    assert sum(cell["origin_s"] is not None for cell in cells) == 4
