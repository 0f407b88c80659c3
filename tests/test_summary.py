"""A row is told to people in figures that apply, in units that suit them."""

import dataclasses
import re
from pathlib import Path

import pytest
from test_results import ROW

import summary as summary_module
from results import Row
from summary import FLAG_WORDS, summary

ROOT = Path(summary_module.__file__).parent


def test_the_flags_that_a_report_raises_have_words():
    raised = re.findall(r'yield "(\w+)"', (ROOT / "report.py").read_text())
    assert sorted(FLAG_WORDS) == sorted(raised)


def test_the_summary_says_what_the_row_says():
    assert summary(dataclasses.replace(ROW, flags=("short", "dirty"))).splitlines() == [
        "prefill    512 tokens in 36.20 ms (TTFT), 14145.6 tok/s",
        "decode     128 tokens, 217.13 tok/s ± 0.04 % at depth 4608, 4.61 ms per token",
        "bandwidth  3326.5 GB/s of weights and KV read, 77.2 % of the measured peak",
        "memory     peak 16.69 GB; weights 16.06 GB, KV cache 0.32 GB (int8), unexplained 0.23 GB",
        "compile    41.3 s (before the clock)",
        "total      621.12 ms from prompt to last token",
        "flags      decode took less than 0.5 s; the code has uncommitted changes",
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"decode_ci_pct": None}, "128 tokens, 217.13 tok/s at depth 4608, 4.61 ms per token"),
        ({"decode_tok_s": 0.8}, "0.80 tok/s ± 0.04 % at depth 4608, 1.25 s per token"),
        ({"ttft_s": 0.99999}, "512 tokens in 999.99 ms (TTFT)"),
        ({"ttft_s": 1.0}, "512 tokens in 1.00 s (TTFT)"),
        ({"kv_cache_gb": 0.0072}, "KV cache 7.2 MB (int8)"),
        ({"kv_cache_gb": 0.0999}, "KV cache 99.9 MB (int8)"),
        ({"kv_cache_gb": 0.1}, "KV cache 0.10 GB (int8)"),
        ({"v_format": "bfloat16"}, "KV cache 0.32 GB (int8,bfloat16)"),
        ({"unexplained_gb": -0.03}, "unexplained -30.0 MB"),
        ({"unexplained_gb": -0.3}, "unexplained -0.30 GB"),
        # 1.1, 5.0 and 3.0: not the sum of the medians, 2.0 + 1.0
        (
            {"ttft_samples_s": (1.0, 3.0, 2.0), "decode_samples_s": (0.1, 2.0, 1.0)},
            "total      3.00 s from",
        ),
        ({"decode_samples_s": ()}, "total      36.20 ms from"),
    ],
)
def test_a_summary_shows_figures_in_units_that_suit_them(values, text):
    assert text in summary(dataclasses.replace(ROW, **values))


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"compile_s": None}, ["compile"]),
        ({"decode_tok_s": None, "decode_ci_pct": None}, ["decode"]),
        ({"bandwidth_gb_s": None, "mbu_pct": None}, ["bandwidth"]),
        ({"decode_samples_s": (0.5,)}, ["total"]),  # which sample it belongs to is unknown
    ],
)
def test_a_summary_leaves_out_what_does_not_apply(values, missing):
    lines = summary(dataclasses.replace(ROW, **values)).splitlines()
    rest = [line for line in summary(ROW).splitlines() if line.split()[0] not in missing]
    assert lines == rest


def test_the_summary_of_a_failed_run_has_no_figures():
    row = Row(time="t", status="oom", error="prefill: \x1b", model="m", repro="python generate.py")
    assert summary(row) == r"status     oom: prefill: \x1b"
