"""What follows from the columns of a row: figures that its summary, plots and tables share."""

import operator

from results import Row
from stats import median


def kv_name(row: Row) -> str | None:
    """`int8`, or `int8,bf16` where K and V differ, as the command line has it."""
    formats = [name for name in (row.k_format, row.v_format) if name]
    return ",".join(dict.fromkeys(formats)) or None


def mean_filled(row: Row) -> float | None:
    """Stored tokens that a decode step reads, the mean over its steps."""
    if row.depth is None or row.prompt_len is None or not row.new_tokens or row.new_tokens < 2:
        return None
    return row.depth + row.prompt_len + (row.new_tokens - 2) / 2


def tpot_s(row: Row) -> float | None:
    """Time per output token of one sequence."""
    if not row.decode_tok_s or not row.batch_size:
        return None
    return row.batch_size / row.decode_tok_s


def total_s(row: Row) -> float | None:
    """From the prompt to the last token, the median sample; of one token, prefill alone."""
    decode_s = row.decode_samples_s or (0.0,) * len(row.ttft_samples_s)
    if not decode_s or len(decode_s) != len(row.ttft_samples_s):
        return None
    return median(map(operator.add, row.ttft_samples_s, decode_s))


def overall_tok_s(row: Row) -> float | None:
    """New tokens over the time from the prompt to the last of them."""
    whole_s = total_s(row)
    return row.new_tokens / whole_s if row.new_tokens and whole_s else None


def decode_rates(row: Row) -> list[float]:
    """tok/s of each sample: N - 1 steps of all sequences in its decode time."""
    steps = (row.new_tokens or 1) - 1
    return [(row.batch_size or 1) * steps / seconds for seconds in row.decode_samples_s]


def prefill_rates(row: Row) -> list[float]:
    """Prompt tok/s of each sample."""
    tokens = (row.batch_size or 1) * (row.prompt_len or 0)
    return [tokens / seconds for seconds in row.ttft_samples_s]


def roofline_tok_s(row: Row) -> float | None:
    """Decode rate if each step read its bytes at the memory bandwidth that the run measured."""
    if not row.decode_tok_s or not row.mbu_pct:
        return None
    return 100 * row.decode_tok_s / row.mbu_pct
