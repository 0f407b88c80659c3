"""A word stands only where the rows bear it: noise, drift and few runs give none."""

import dataclasses

import pytest
from result_rows import in_blocks, in_turns, sides, speed_row

from reporting.metrics import METRICS
from reporting.verdict import Rule, judge

DECODE = METRICS["decode_tok_s"]


def verdict(rows_a, rows_b, metric="decode_tok_s", **rule):
    return judge(METRICS[metric], rows_a, rows_b, Rule(**rule))


@pytest.mark.parametrize(
    ("ratio", "word"),
    [(0.95, "SLOWER"), (1.05, "FASTER"), (1.0, "SAME"), (0.99, "SAME"), (2.0, "FASTER")],
)
def test_pairs_in_turns_find_a_change_and_no_change(ratio, word):
    found = verdict(*sides(in_turns(10, ratio, noise=0.005)))
    assert found.word == word
    assert found.ratio == pytest.approx(ratio, rel=0.01)
    assert found.interval[0] < ratio < found.interval[1]
    assert found.n == 10


def test_a_drift_of_the_machine_cancels_in_turns_and_warns_in_blocks():
    in_pairs = verdict(*sides(in_turns(10, 1.0, drift=0.04, noise=0.001)))
    assert in_pairs.word == "SAME"
    assert in_pairs.ratio == pytest.approx(1, abs=0.002)
    in_a_row = verdict(*in_blocks(10, 1.0, drift=0.04, noise=0.001))
    assert in_a_row.ratio == pytest.approx(0.98, abs=0.004)
    assert "not in turns" in in_a_row.why
    assert in_a_row.word not in ("FASTER", "SLOWER")  # below twice the least effect
    assert verdict(*in_blocks(10, 0.9, drift=0.04, noise=0.001)).word == "SLOWER"


def test_a_configuration_against_itself_gives_no_change_in_twenty_comparisons():
    for noise in (0.005, 0.02, 0.06):
        words = [
            verdict(*sides(in_turns(10, 1.0, noise=noise, seed=seed))).word for seed in range(20)
        ]
        assert not {"FASTER", "SLOWER"} & set(words), noise


def test_five_percent_less_is_found_in_nine_of_ten():
    words = [verdict(*sides(in_turns(10, 0.95, noise=0.015, seed=seed))).word for seed in range(40)]
    assert words.count("SLOWER") >= 36
    assert "FASTER" not in words


def test_noise_beyond_the_least_effect_is_unclear_and_says_how_many_pairs_would_tell():
    found = verdict(*sides(in_turns(10, 1.0, noise=0.06)))
    assert found.word == "UNCLEAR"
    needed = int(found.why.split()[1])
    assert needed > 10
    words = [
        verdict(*sides(in_turns(2 * needed, 1.0, noise=0.06, seed=seed))).word for seed in range(5)
    ]
    assert words.count("SAME") >= 3


@pytest.mark.parametrize("count", [1, 4, 5])
def test_few_pairs_give_no_verdict(count):
    found = verdict(*sides(in_turns(count, 0.95)))
    assert (found.word, found.interval) == ("", None)
    assert found.why == f"{count} sure pairs of 6"


@pytest.mark.parametrize(
    ("ratio", "device", "word"),
    [
        (1.3, "AMD EPYC", "FASTER?"),
        (0.7, "AMD EPYC", "SLOWER?"),
        (1.15, "AMD EPYC", ""),
        (1.15, "NVIDIA H200", "FASTER?"),
        (1.05, "NVIDIA H200", ""),
    ],
)
def test_two_single_rows_give_at_most_a_hint(ratio, device, word):
    found = verdict([speed_row(device_name=device)], [speed_row(100 * ratio, device_name=device)])
    assert (found.word, found.interval) == (word, None)
    assert found.why == "too few processes"


def test_samples_that_overlap_give_no_hint():
    steps = speed_row().new_tokens - 1
    wide = speed_row(130, decode_samples_s=(steps / 130, steps / 99))
    assert verdict([speed_row()], [wide]).word == ""


@pytest.mark.parametrize("flag", ["throttled", "busy", "first_slow"])
def test_a_disturbed_row_gives_no_word(flag):
    rows_a, rows_b = in_blocks(10, 0.5)
    disturbed = [*rows_b[:-1], dataclasses.replace(rows_b[-1], flags=(flag,))]
    assert verdict(rows_a, rows_b).word == "SLOWER"
    assert verdict(rows_a, disturbed).word == "UNCLEAR"
    assert verdict([speed_row(flags=(flag,))], [speed_row(300)]).word == ""


def test_disturbed_pairs_are_left_out_of_those_in_turns():
    rows = in_turns(10, 1.0, noise=0.002)
    rows = [
        dataclasses.replace(row, decode_tok_s=30, flags=("busy",)) if row.round == 3 else row
        for row in rows
    ]
    found = verdict(*sides(rows))
    assert (found.word, found.n, found.why) == ("SAME", 9, "1 doubtful pairs left out")
    five = [dataclasses.replace(r, flags=("busy",)) if r.round > 5 else r for r in rows]
    assert verdict(*sides(five)).why == "4 sure pairs of 6"


def test_a_gate_of_many_comparisons_asks_for_more():
    rows = sides(in_turns(8, 0.96, noise=0.03, seed=3))
    alone, of_many = verdict(*rows), verdict(*rows, num_comparisons=100)
    assert of_many.interval[0] < alone.interval[0] < alone.interval[1] < of_many.interval[1]


def test_the_least_effect_is_the_users_choice():
    rows = sides(in_turns(12, 0.98, noise=0.002))
    assert verdict(*rows).word == "SAME"
    assert verdict(*rows, min_effect_pct=1).word == "SLOWER"


def test_what_is_not_to_be_judged_keeps_its_figures():
    found = verdict(*sides(in_turns(10, 0.5)), no_verdict="different machines")
    assert (found.word, found.why) == ("", "different machines")
    assert found.ratio == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "a", "b", "word"),
    [
        ("peak_mem_gb", 1.0, 1.06, "SAME"),  # below 64 MiB
        ("peak_mem_gb", 1.0, 1.07, "LARGER"),
        ("peak_mem_gb", 10.0, 10.2, "SAME"),  # below 3 %
        ("peak_mem_gb", 10.0, 9.6, "SMALLER"),
        ("kv_cache_gb", 1.0, 1.0001, "LARGER"),
        ("kv_cache_gb", 1.0, 1.0, "SAME"),
        ("kv_cache_gb", 0.0, 1.0, "LARGER"),
        ("model_size_gb", 1.0, 0.5, "SMALLER"),
    ],
)
def test_bytes_are_judged_by_size(name, a, b, word):
    rows = [speed_row(**{name: value}) for value in (a, b)]
    assert verdict(rows[:1], rows[1:], name).word == word


@pytest.mark.parametrize(
    ("a", "b", "error", "floor", "word"),
    [
        (5e-4, 9e-4, 1e-4, 1e-5, "WORSE"),
        (9e-4, 5e-4, 1e-4, 1e-5, "BETTER"),
        (5e-4, 7e-4, 1e-4, 1e-5, "SAME"),  # 2 * hypot(1e-4, 1e-4) = 2.8e-4
        (5e-4, 9e-4, 1e-5, 5e-4, "SAME"),  # within the floor
    ],
)
def test_quality_is_judged_by_errors_and_floor(a, b, error, floor, word):
    rows = [speed_row(kl_mean=x, kl_se=error, kl_floor=floor) for x in (a, b)]
    assert verdict(rows[:1], rows[1:], "kl_mean").word == word


def test_a_figure_that_one_side_lacks_is_not_compared():
    assert verdict([speed_row()], [speed_row(decode_tok_s=None)]) is None
    assert verdict([speed_row(compile_s=0.0)], [speed_row()], "compile_s") is None
