"""Comparisons as people read them: one Markdown table, and above it what all have in common."""

import math
from collections.abc import Iterable, Sequence

from reporting.matching import Comparison
from reporting.metrics import Kind
from reporting.select import text_of
from reporting.table import markdown_line
from reporting.verdict import CONFIDENCE, MIN_PAIRS, MIN_PROCESSES, Verdict
from results import SPECS, SYSTEM
from stats import mean_interval

Judged = tuple[Comparison, list[Verdict]]

SHOWN = (
    *("model", "weight_format", "dtype", "k_format", "v_format", "depth", "depth_fill"),
    *("prompt_len", "new_tokens", "cache_len", "batch_size", "prefill_chunk", "compile"),
    *("reference", "text", "context", "windows", "attention", *SYSTEM, "commit"),
)
"""What tells one comparison from another; of the other settings only a difference is shown."""

EXPLANATION = f"""
A row's figure is the median of its samples; they share a process and are no independent runs.

- {MIN_PAIRS} rounds or more in which A and B ran in turns: mean of ln(B / A), Student's interval.
- {MIN_PROCESSES} rows or more a side, not in turns: Welch's interval; least effect counts twice.
- Fewer: no verdict; a word with a question mark where all samples of a side are far away.

FASTER, SLOWER: the {100 * CONFIDENCE:g} % interval leaves out 1, and the least effect is reached.
SAME: the interval lies within the least effect. UNCLEAR: neither, or rows that were disturbed.
Bytes are judged by size; quality by twice the rows' standard errors, and by their noise floor."""


def text(judged: Sequence[Judged], refused: Sequence[str]) -> str:
    """The table, what was refused, and the mean of all decode rates."""
    comparisons = [comparison for comparison, _ in judged]
    names = telling(comparisons)
    blocks = [common(comparisons, names), table(judged, names)]
    blocks += ["\n".join(f"REFUSED: {cause}" for cause in refused), geometric_mean(judged)]
    return "\n\n".join(filter(None, blocks))


def telling(comparisons: Sequence[Comparison]) -> list[str]:
    """The columns that tell the comparisons apart."""
    found = []
    for name in SHOWN:
        values = {text_of(each.a[-1], name) for each in comparisons if name not in each.differs}
        if len(values) > 1:
            found.append(name)
    return found


def common(comparisons: Sequence[Comparison], names: Iterable[str]) -> str:
    """What all comparisons have in common, and how A and B differ where that is always the same."""
    first = comparisons[0]
    equal = [
        f"{name}={text_of(first.a[-1], name)}"
        for name in SHOWN
        if name not in names and text_of(first.a[-1], name)
        if not any(name in each.differs for each in comparisons)
    ]
    lines = [", ".join(equal)]
    if all(each.differs == first.differs for each in comparisons):
        lines += [f"{side}: {ends(first, index)}" for index, side in enumerate("AB")]
    return "\n\n".join(lines)


def ends(comparison: Comparison, side: int) -> str:
    """What one side, 0 or 1, has otherwise than the other."""
    cells = [f"{name}={both[side]}" for name, both in comparison.differs.items()]
    return ", ".join(cells) or "the same settings"


def table(judged: Sequence[Judged], names: Sequence[str]) -> str:
    """A line per comparison and figure."""
    alike = all(each.differs == judged[0][0].differs for each, _ in judged)
    head = [*names, *([] if alike else ["A -> B"]), "figure", "A", "B", "B / A", "n", "verdict"]
    rows = [head, ["---"] * len(head)]
    for comparison, found in judged:
        start = [text_of(comparison.a[-1], name) for name in names]
        if not alike:
            start.append(f"{ends(comparison, 0)} -> {ends(comparison, 1)}")
        rows += [[*start, *cells(verdict)] for verdict in found]
    return "\n".join(map(markdown_line, rows))


def cells(verdict: Verdict) -> list[str]:
    """A figure, both sides, the change with its interval, n and the word."""
    column = SPECS[verdict.metric.name]
    is_quality = verdict.metric.kind is Kind.QUALITY
    spec, unit = ("+.1e", "") if is_quality else (".3f", "x")
    change = f"{verdict.ratio:{spec}}{unit}"
    if verdict.interval:
        low, high = verdict.interval
        change += f" [{low:{spec}}, {high:{spec}}]"
    words = " ".join(filter(None, [verdict.word, f"({verdict.why})" if verdict.why else ""]))
    return [
        f"{verdict.metric.name}, {column.unit}" if column.unit else verdict.metric.name,
        *(format(value, column.format) for value in (verdict.a, verdict.b)),
        *(change, str(verdict.n), words or "-"),
    ]


def geometric_mean(judged: Sequence[Judged]) -> str:
    """Of the decode rates of two comparisons or more; their spread says how alike they are."""
    verdicts = [verdict for _, found in judged for verdict in found]
    logs = [math.log(each.ratio) for each in verdicts if each.metric.name == "decode_tok_s"]
    if len(logs) < 2:
        return ""
    mean, low, high = map(math.exp, mean_interval(logs, 0.95))
    interval = f" [{low:.3f}, {high:.3f}]" if len(logs) > 2 else ""
    return f"decode_tok_s, geometric mean of {len(logs)}: {mean:.3f}x{interval}"
