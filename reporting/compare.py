"""`results.py compare`: rows set against rows, each figure with a word or with none.

python results.py compare benchmark_results.txt --vary kv     cache formats of one file
python results.py compare old.txt new.txt --gate              two files, for CI
python results.py compare FILE:run=RUN                        arms A and B of sweep.py ab
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from config import MISSING, UserError, flag, printable
from reporting.compare_text import EXPLANATION, Judged, text
from reporting.matching import Comparison, by_arm, by_file, by_setting, usable, varied
from reporting.metrics import DEFAULT_METRICS, METRICS
from reporting.select import FILE_HELP, select
from reporting.verdict import Rule, Verdict, judge

GATED = {"SLOWER", "LARGER", "WORSE"}
ORIGIN_METRICS = ("overall_tok_s", "peak_mem_gb")
AB = "python scripts/sweep.py ab -- FLAGS_A -- FLAGS_B"


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Set rows against rows: ratios, intervals, and a word where the rows bear one."""

    a: str = flag(MISSING, help=FILE_HELP)
    b: str | None = flag(None, positional=True, help="the same; without it, see --vary")
    vary: str = flag(
        "", help="columns that may differ, with commas; kv: both cache formats; one file without:"
        " arms A and B of each run"
    )  # fmt: skip
    base: str | None = flag(
        None, help="one file: the value in --vary to compare with, as it stands"
    )
    metric: str | None = flag(None, help="columns to compare, with commas")
    min_effect: float | None = flag(None, minimum=0, help="least change worth a word, in percent")
    across_systems: bool = flag(False, help="compare rows of different machines, without a word")
    gate: bool = flag(False, help="exit 1 if anything is SLOWER, LARGER or WORSE")
    strict: bool = flag(False, help="with --gate: UNCLEAR too")
    explain: bool = flag(False, help="say how words come about")
    json: bool = flag(False, help="print one JSON document instead of a table")
    debug: bool = flag(False, help="show the traceback of an error")

    def __post_init__(self) -> None:
        if self.base is not None and (self.b is not None or not self.vary):
            raise UserError(f"--base {printable(self.base)}: needs --vary and one file")
        if self.strict and not self.gate:
            raise UserError("--strict: has no effect without --gate; give both")


def compare(config: CompareConfig) -> int:
    """Print the comparisons; 1 where a gate is closed.

    Raises:
        UserError: nothing can be compared, saying what differs.
    """
    metrics = metric_names(config.metric)
    comparisons, refused = find(config)
    if not comparisons:
        raise UserError(*(refused or [nothing(config)]))
    rule = Rule(
        min_effect_pct=config.min_effect, num_comparisons=len(comparisons) if config.gate else 1
    )
    judged = [(each, verdicts(each, metrics, rule)) for each in comparisons]
    if config.json:
        print(json.dumps(document(judged, refused)))
    else:
        print(text(judged, refused))
        if config.explain:
            print(EXPLANATION)
    words = {verdict.word for _, found in judged for verdict in found}
    closed = GATED | ({"UNCLEAR"} if config.strict else set())
    return int(config.gate and bool(words & closed))


def metric_names(spec: str | None) -> Sequence[str]:
    """The figures that `--metric` names, or None's default."""
    names = spec.split(",") if spec else DEFAULT_METRICS
    for name in names:
        if name not in METRICS:
            raise UserError(f"--metric {printable(name)}: unknown; known: {', '.join(METRICS)}")
    return names


def find(config: CompareConfig) -> tuple[list[Comparison], list[str]]:
    """What is to be compared, and a line for each row that has no partner."""
    vary = varied(config.vary)
    rows = usable(select(config.a))
    if config.b is not None:
        others = usable(select(config.b))
        return by_file(rows, others, vary, across=config.across_systems)
    if vary:
        return by_setting(rows, vary, config.base, across=config.across_systems), []
    return by_arm(rows), []


def nothing(config: CompareConfig) -> str:
    if config.b is not None:
        return f"{config.a}, {config.b}: no rows that count in one of them"
    if config.vary:
        return f"{config.a}: no rows that differ in {config.vary} alone"
    return f"{config.a}: no run with two arms; give a second file, or --vary kv, or make one: {AB}"


def verdicts(comparison: Comparison, names: Sequence[str], rule: Rule) -> list[Verdict]:
    """Of each figure that both sides have."""
    if comparison.has_origin:
        rule = Rule(no_verdict="system and prompt unknown")
        names = ORIGIN_METRICS
    elif comparison.is_across_systems:
        rule = Rule(no_verdict="different machines")
    found = (judge(METRICS[name], comparison.a, comparison.b, rule) for name in names)
    return [verdict for verdict in found if verdict]


def document(judged: Sequence[Judged], refused: Sequence[str]) -> dict[str, Any]:
    """All comparisons as one JSON object."""
    entries = []
    for comparison, found in judged:
        figures = [
            {
                "metric": one.metric.name,
                **{name: getattr(one, name) for name in ("a", "b", "n", "ratio", "interval")},
                "verdict": one.word,
                "why": one.why,
            }
            for one in found
        ]
        keys = {"a": [row.key for row in comparison.a], "b": [row.key for row in comparison.b]}
        entries.append({"differs": comparison.differs, "rows": keys, "figures": figures})
    return {"status": "ok", "comparisons": entries, "refused": list(refused)}
