"""A result row for people: a line per subject, then its flags in words. Imports no torch."""

import string
from contextlib import suppress
from typing import Any

from config import printable
from derived import kv_name, total_s, tpot_s
from results import Row, to_json

FLAG_WORDS = {
    "noisy": "decode times vary a lot",
    "first_slow": "the first sample was slower than the others",
    "busy": "something else was running",
    "short": "decode took less than 0.5 s",
    "in_cache": "much of what a step reads fits the CPU's cache, so its bandwidth says little",
    "ragged": "samples stopped at different lengths",
    "streamed": "text was shown while timing",
    "synthetic": "the depth holds random values: speed and memory count, the text means nothing",
    "rss_sampled": "peak memory was sampled and may be too low",
    "mem_unexplained": "peak memory is far from the expected",
    "unchecked": "the quantised cache was not checked",
    "check_failed": "THE CACHE PREDICTS WRONGLY: these figures are worth nothing",
    "dirty": "the code has uncommitted changes",
}
SUMMARY = (
    "prefill    {prompt_len} tokens in {ttft_s:time} (TTFT), {prefill_tok_s:.1f} tok/s",
    "decode     {new_tokens} tokens, {decode_tok_s:.2f} tok/s{interval} at depth {filled},"
    " {tpot_s:time} per token",
    "bandwidth  {bandwidth_gb_s:.1f} GB/s of weights and KV read, {mbu_pct:.1f} % of the"
    " measured peak",
    "memory     peak {peak_mem_gb:size}; weights {model_size_gb:size}, KV cache {kv_cache_gb:size}"
    " ({kv_format}), unexplained {unexplained_gb:size}",
    "check      {check}: KL {check_kl:.1e} nat per token, {check_top1_pct:.1f} % of tokens as"
    " without a cache",
    "compile    {compile_s:.1f} s (before the clock)",
    "total      {total_s:time} from prompt to last token",
)


def size_text(size_gb: float) -> str:
    """A number of GB for people, below 0.1 in MB."""
    return f"{size_gb:.2f} GB" if abs(size_gb) >= 0.1 else f"{1000 * size_gb:.1f} MB"


class _SummaryFormatter(string.Formatter):
    """Adds `:time`, in s or ms, and `:size`, in GB or MB."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "time":
            return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.2f} ms"
        if format_spec == "size":
            return size_text(value)
        return super().format_field(value, format_spec)


def summary(row: Row) -> str:
    """The row for people: a line per subject whose figures all apply, then the flags in words."""
    lines = [] if row.status == "ok" else [f"status     {row.status}: {printable(row.error or '')}"]
    figures = to_json(row) | _derived(row)
    for line in SUMMARY:
        with suppress(KeyError):  # a figure that does not apply
            lines.append(_SummaryFormatter().format(line, **figures))
    if row.flags:
        lines.append("flags      " + "; ".join(FLAG_WORDS.get(name, name) for name in row.flags))
    return "\n".join(lines)


def _derived(row: Row) -> dict[str, Any]:
    """What a summary says beside the columns, as far as they give it."""
    interval = "" if row.decode_ci_pct is None else f" ± {row.decode_ci_pct:.2f} %"
    figures: dict[str, Any] = {"interval": interval}
    if row.depth is not None and row.prompt_len is not None:
        figures["filled"] = row.depth + row.prompt_len
    found = {"kv_format": kv_name(row), "tpot_s": tpot_s(row), "total_s": total_s(row)}
    return figures | {name: value for name, value in found.items() if value is not None}
