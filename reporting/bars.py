"""Decode speed as bars of text, for a terminal after a sweep."""

from collections.abc import Sequence

from config import printable
from reporting.series import with_labels
from results import Row

WIDTH = 30
EIGHTHS = " ▏▎▍▌▋▊▉█"


def bars(rows: Sequence[Row], encoding: str = "utf-8") -> str:
    """A line per speed row: what ran, its bar, its rate; of a failure its status and reason.

    Args:
        rows: other kinds are passed over.
        encoding: of the stream; where it lacks blocks the bars are of `#`.
    """
    shown = with_labels([row for row in rows if row.kind == "speed"], ("prompt_sha", "model_sha"))
    best = max((row.decode_tok_s or 0 for _, row in shown), default=0)
    width = max((len(name) for name, _ in shown), default=0)
    lines = []
    for name, row in shown:
        if row.status == "ok" and row.decode_tok_s:
            text = f"{_bar(row.decode_tok_s / best, encoding)} {row.decode_tok_s:8.2f} tok/s"
        else:
            text = f"x {row.status}: {printable(row.error or 'no decode rate', 60)}"
        lines.append(f"{name:{width}}  {text}")
    return "\n".join(lines)


def _bar(share: float, encoding: str) -> str:
    """A share of WIDTH, in eighths of a character where the encoding has them."""
    whole, eighth = divmod(round(share * WIDTH * 8), 8)
    text = (EIGHTHS[-1] * whole + EIGHTHS[eighth])[:WIDTH].ljust(WIDTH)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return ("#" * round(share * WIDTH)).ljust(WIDTH)
    return text
