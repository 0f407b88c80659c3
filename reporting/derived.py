"""What follows from the columns of a row: its texts, and figures that plots and tables share."""

from results import COLUMNS, Row, format_row


def cells(row: Row) -> dict[str, str]:
    """The text of each column that applies, as it stands in the row's line, without its unit."""
    head, _, repro = format_row(row).partition(", repro: ")
    texts = dict(cell.split("=", 1) for cell in head.split(", "))
    for name, text in texts.items():
        unit = COLUMNS[name].metadata["column"].unit
        texts[name] = text.removesuffix(f" {unit}") if unit else text
    return texts | {"repro": repro}


def kv_name(row: Row) -> str | None:
    """`int8`, or `int8, bf16` where K and V differ."""
    formats = [name for name in (row.k_format, row.v_format) if name]
    return ", ".join(dict.fromkeys(formats)) or None


def mean_filled(row: Row) -> float | None:
    """Stored tokens that a decode step reads, the mean over its steps."""
    if row.depth is None or row.prompt_len is None or not row.new_tokens or row.new_tokens < 2:
        return None
    return row.depth + row.prompt_len + (row.new_tokens - 2) / 2


def tpot_ms(row: Row) -> float | None:
    """Time per output token of one sequence, in ms."""
    if not row.decode_tok_s or not row.batch_size:
        return None
    return 1000 * row.batch_size / row.decode_tok_s


def roofline_tok_s(row: Row) -> float | None:
    """Decode rate if each step read its bytes at the memory bandwidth that the run measured."""
    if not row.decode_tok_s or not row.mbu_pct:
        return None
    return 100 * row.decode_tok_s / row.mbu_pct


def decode_range_tok_s(row: Row) -> tuple[float, float] | None:
    """Decode rate of the slowest and of the fastest sample, of all sequences together."""
    if not row.decode_samples_s or not row.batch_size or not row.new_tokens:
        return None
    tokens = row.batch_size * (row.new_tokens - 1)
    return tokens / max(row.decode_samples_s), tokens / min(row.decode_samples_s)
