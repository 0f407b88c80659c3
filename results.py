"""Rows of `benchmark_results.txt`: what was measured, on what, and the command that repeats it.

    python results.py --help      compare rows, make tables and plots of them, check them

A row is one line, `name=value unit, ..., repro: command`. `Row` is the only list of its columns:
writer, reader, JSON and all of `reporting` loop over its fields. Imports no torch.
"""

import hashlib
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from command import run_one_of
from config import CONTROLS, UserError, plain_type, printable
from durable import ORIGIN, TORN, append_line
from programs import config_of

SCHEMA = 1  # raised when a column changes its meaning, not when one is added
NATS: dict[str, Any] = {"unit": "nat", "format": ".3e", "better": "lower"}
ESCAPED = re.compile(rf"[%,;{CONTROLS}]|^ | \Z")  # in texts; written as %HH of UTF-8

log = logging.getLogger("kv_fast")


class RowError(UserError):
    """A line that is no row: `FILE:LINE: cause`."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """What a field's annotation cannot say about its column."""

    unit: str = ""
    format: str = ""  # of Python; floats are rounded to it
    better: str = ""  # "higher" or "lower": which is the better result
    key: bool = False  # a setting: rows with different ones are not compared
    system: bool = False  # of the machine: must match when rows are compared


def column(default: Any = MISSING, *, init: bool = True, **spec: Any) -> Any:
    """A field of `Row`; `spec` as in `Column`."""
    return field(default=default, init=init, metadata={"column": Column(**spec)})


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. None: does not apply, and is written nowhere; an empty list too.

    Floats are rounded to their format, so that a row read back equals the row that was written.

    Raises:
        ValueError: a value is not finite, or cannot stand in a line of UTF-8.
    """

    schema: int = column(SCHEMA, key=True)
    time: str = column()  # UTC of the first sample, 2026-11-30T09:14:02Z
    kind: str = column("speed", key=True)
    status: str = column()  # ok, oom, error, timeout, interrupted, skipped
    error: str | None = column(None)  # phase: Type: first line
    model: str = column()
    k_format: str | None = column(None, key=True)  # as found in the cache, not as asked for
    v_format: str | None = column(None, key=True)
    reference: str | None = column(None, key=True)  # of quality rows: cache or weights
    text: str | None = column(None)
    context: int | None = column(None, unit="tok", key=True)  # before the first scored one
    kl_mean: float | None = column(None, **NATS)  # per token; this and the rest: see quality.py
    kl_se: float | None = column(None, **NATS)
    kl_floor: float | None = column(None, **NATS)  # of the reference, cut into other chunks
    ln_ppl_ratio: float | None = column(None, **NATS)
    ln_ppl_ratio_se: float | None = column(None, **NATS)
    ln_ppl_ratio_floor: float | None = column(None, **NATS)
    top1_pct: float | None = column(None, unit="%", format=".2f", better="higher")
    top1_floor_pct: float | None = column(None, unit="%", format=".2f")
    rms_dp_pct: float | None = column(None, unit="%", format=".3f", better="lower")
    rms_dp_floor_pct: float | None = column(None, unit="%", format=".3f")
    first_diff: float | None = column(None, unit="tok", format=".1f", better="higher")
    first_diff_floor: float | None = column(None, unit="tok", format=".1f")
    ppl: float | None = column(None, format=".4f", better="lower")
    ppl_ref: float | None = column(None, format=".4f")
    kl_p99: float | None = column(None, **NATS)
    kl_max: float | None = column(None, **NATS)
    needle_change: float | None = column(None, **NATS)  # of the key's NLL; see needle.py
    needle_change_se: float | None = column(None, **NATS)
    needle_change_floor: float | None = column(None, **NATS)
    needle_lost: int | None = column(None, better="lower")  # found with the reference only
    needle_nll: tuple[float, ...] = column((), unit="nat", format=".3f", better="lower")
    needle_nll_ref: tuple[float, ...] = column((), unit="nat", format=".3f")
    needle_nll_none: float | None = column(None, unit="nat", format=".3f")  # not in the text
    needle_nll_none_ref: float | None = column(None, unit="nat", format=".3f")
    needle_place_pct: tuple[int, ...] = column((), unit="%", key=True)
    needle_trials: int | None = column(None, key=True)
    windows: int | None = column(None, key=True)
    floor_windows: int | None = column(None)
    scored: int | None = column(None, unit="tok", key=True)  # per window
    score_width: int | None = column(None, unit="tok", key=True)
    kv_bytes_per_token: int | None = column(None, unit="B", better="lower")
    depth: int | None = column(None, key=True)  # tokens stored before the timed prefill
    decode_tok_s: float | None = column(None, unit="tok/s", format=".2f", better="higher")
    decode_ci_pct: float | None = column(None, unit="%", format=".2f", better="lower")
    ttft_s: float | None = column(None, unit="s", format=".6f", better="lower")
    prefill_tok_s: float | None = column(None, unit="tok/s", format=".2f", better="higher")
    overall_tok_s: float | None = column(None, unit="tok/s", format=".2f", better="higher")
    peak_mem_gb: float | None = column(None, unit="GB", format=".4f", better="lower")
    kv_cache_gb: float | None = column(None, unit="GB", format=".4f", better="lower")
    device_name: str | None = column(None, system=True)
    bandwidth_gb_s: float | None = column(None, unit="GB/s", format=".1f", better="higher")
    mbu_pct: float | None = column(None, unit="%", format=".1f", better="higher")
    model_size_gb: float | None = column(None, unit="GB", format=".4f", better="lower")
    weight_format: str | None = column(None, key=True)
    dtype: str | None = column(None, key=True)
    batch_size: int | None = column(None, key=True)
    prompt_len: int | None = column(None, key=True)  # per sequence, BOS included
    new_tokens: int | None = column(None, key=True)  # produced, of the longest sequence
    cache_len: int | None = column(None, key=True)  # slots allocated per sequence
    prefill_chunk: int | None = column(None, key=True)
    depth_fill: str | None = column(None, key=True)  # none, prefill, synthetic
    ignore_eos: bool | None = column(None, key=True)
    compile: bool | None = column(None, key=True)
    attention: str | None = column(None)  # the implementation that answered
    expected_gb: float | None = column(None, unit="GB", format=".4f", better="lower")
    unexplained_gb: float | None = column(None, unit="GB", format=".4f", better="lower")
    check: str | None = column(None)  # ok, warn, fail, skipped; this and the next: self_check.py
    check_kl: float | None = column(None, **NATS)
    check_top1_pct: float | None = column(None, unit="%", format=".2f", better="higher")
    compile_s: float | None = column(None, unit="s", format=".3f", better="lower")
    torch: str | None = column(None, system=True)
    threads: int | None = column(None, system=True)
    commit: str | None = column(None)
    model_sha: str | None = column(None, key=True)
    prompt_sha: str | None = column(None, key=True)
    num_samples: int | None = column(None)
    section: str | None = column(None)  # of benchmarks.sh; this and the next three: by the sweep
    run: str | None = column(None)  # of the sweep, or of a pairing of two commands
    round: int | None = column(None)  # how often all cases, or both arms, ran; from 1
    arm: str | None = column(None)  # A or B of a pairing
    flags: tuple[str, ...] = column(())  # names in FLAG_WORDS
    ttft_samples_s: tuple[float, ...] = column((), unit="s", format=".6f")
    decode_samples_s: tuple[float, ...] = column((), unit="s", format=".6f")
    key: str = column(init=False)  # of the columns marked so: 12 hex digits of SHA-256
    repro: str = column()

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.init:
                object.__setattr__(self, item.name, _checked(item, getattr(self, item.name)))
        if re.search(f"[{CONTROLS}]", self.repro):
            raise ValueError(f"repro: {self.repro!r} holds a control character")
        object.__setattr__(self, "key", _key(self))


COLUMNS: dict[str, Field] = {item.name: item for item in fields(Row)}
SPECS: dict[str, Column] = {
    name: item.metadata.get("column", Column()) for name, item in COLUMNS.items()
}
KEY: tuple[str, ...] = tuple(name for name, spec in SPECS.items() if spec.key)
SYSTEM: tuple[str, ...] = tuple(name for name, spec in SPECS.items() if spec.system)
KINDS = {name: plain_type(item.type) for name, item in COLUMNS.items()}


def _checked(item: Field, value: Any) -> Any:
    """The value as a line holds it: floats rounded to their format, lists as tuples."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return tuple(_checked(item, one) for one in value)
    kind = KINDS[item.name]
    if kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{item.name}: {value} is not finite")
        return float(format(value, SPECS[item.name].format)) + 0.0  # never -0.0
    if kind is str:
        return str(value).encode().decode()  # a plain string; a lone surrogate is a ValueError
    return value


def _present(row: Row) -> Iterator[tuple[Field, Any]]:
    """Each column that applies, with its value."""
    for name, item in COLUMNS.items():
        value = getattr(row, name, None)  # the key is made from the others
        if value is not None and value != ():
            yield item, value


def _cell(item: Field, value: Any) -> str:
    """`name=value unit`."""
    spec = SPECS[item.name]
    values = value if isinstance(value, tuple) else (value,)
    texts = (ESCAPED.sub(_percent_encode, format(one, spec.format)) for one in values)
    return f"{item.name}={';'.join(texts)}" + (f" {spec.unit}" if spec.unit else "")


def _percent_encode(match: re.Match[str]) -> str:
    return quote(match[0], safe="")


def _key(row: Row) -> str:
    settings = [pair for pair in _present(row) if pair[0].name in KEY]
    lines = "\n".join(_cell(item, value) for item, value in settings)
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def format_row(row: Row) -> str:
    """The row as a line, without its newline."""
    cells = [_cell(item, value) for item, value in _present(row) if item.name != "repro"]
    return ", ".join([*cells, f"repro: {row.repro}"])


def to_json(row: Row) -> dict[str, Any]:
    """The columns that apply by name, for one JSON object."""
    return {item.name: value for item, value in _present(row)}


def append(path: Path, row: Row) -> None:
    """Add a row to a file, as `durable.append_line` does."""
    append_line(path, format_row(row))


def parse_row(line: str) -> Row:
    """The row that `format_row` wrote.

    Raises:
        RowError: naming the column; also if the repro is no command.
    """
    head, found, repro = line.partition(", repro: ")
    if not found:
        raise RowError("repro: missing")
    texts = {"repro": repro.replace("%", "%25")}  # unlike the others it is not escaped
    for cell in head.split(", "):
        name, _, text = cell.partition("=")
        if name not in COLUMNS or name in texts:
            raise RowError(f"{printable(name)}: {'twice' if name in texts else 'unknown column'}")
        texts[name] = text
    key = texts.pop("key", "absent")
    for name, item in COLUMNS.items():
        if item.init and item.default is MISSING and name not in texts:
            raise RowError(f"{name}: missing")
    values = {name: _value(COLUMNS[name], text) for name, text in texts.items()}
    try:
        row = Row(**values)
        config_of(repro)
    except ValueError as error:
        raise RowError(printable(str(error))) from None
    except UserError as error:
        raise RowError(f"repro: {error}") from None
    if row.schema != SCHEMA:
        raise RowError(f"schema={row.schema}: this program reads schema {SCHEMA}")
    if key != row.key:
        raise RowError(f"key={printable(key)}: the settings give {row.key}")
    return row


PARSERS: dict[type, Callable[[str], Any]] = {
    str: lambda text: unquote(text, errors="strict"),
    int: int,
    float: float,
    bool: lambda text: ("False", "True").index(text) == 1,
}


def _value(item: Field, text: str) -> Any:
    unit, parser = SPECS[item.name].unit, PARSERS[KINDS[item.name]]
    bare = text.removesuffix(f" {unit}") if unit else text
    try:
        return tuple(map(parser, bare.split(";"))) if item.default == () else parser(bare)
    except ValueError:
        kind = KINDS[item.name].__name__
        raise RowError(f"{item.name}={printable(text)}: not {kind} {unit}".rstrip()) from None


def scan(path: Path) -> Iterator[Row | RowError]:
    """Each row of a file, or the error of a line that should be one.

    Passed over: headings, origin rows, and lines that `append` marked as torn.
    """
    name = printable(str(path))
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.startswith(b"schema=") and not line.endswith(TORN):
            try:
                yield parse_row(line.decode())
            except (RowError, UnicodeDecodeError) as error:
                yield RowError(f"{name}:{number}: {error}")
    if rest and not ORIGIN.match(rest):
        yield RowError(f"{name}:{len(lines) + 1}: torn, the newline is missing")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a bad one is left out with a warning."""
    rows = []
    for entry in scan(path):
        if isinstance(entry, Row):
            rows.append(entry)
        else:
            log.warning("%s", entry)
    return rows


if __name__ == "__main__":
    from reporting.commands import COMMANDS

    sys.exit(run_one_of(COMMANDS))
