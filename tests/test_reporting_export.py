"""What is exported is all of every row, and can be read back."""

import csv
import dataclasses
import io
import json
import random
from pathlib import Path

import pytest
from sweep_rows import failed_row, quality_row, sweep
from test_results import random_row

import results
from command import run_one_of
from reporting.commands import COMMANDS
from reporting.export import to_csv
from results import COLUMNS, Row, append, parse_row, read_rows

RESULTS = Path(results.__file__).parent / "benchmark_results.txt"


def read_csv(text: str) -> list[Row]:
    """The rows, by way of the lines that they were."""
    rows = []
    for values in csv.DictReader(io.StringIO(text, newline="")):
        repro = values.pop("repro")
        units = {name: COLUMNS[name].metadata["column"].unit for name in values if name != "key"}
        texts = (
            f"{name}={text} {units.get(name)}" if units.get(name) else f"{name}={text}"
            for name, text in values.items()
            if text or COLUMNS[name].default is dataclasses.MISSING and COLUMNS[name].init
        )
        rows.append(parse_row(", ".join([*texts, f"repro: {repro}"])))
    return rows


def has_empty_text(row: Row) -> bool:
    """An optional text that is there but empty, which CSV cannot tell from an absent one."""
    return any(
        getattr(row, name) in ("", ("",)) and item.default is not dataclasses.MISSING
        for name, item in COLUMNS.items()
    )


def test_csv_read_back_gives_the_rows():
    rng = random.Random(13)
    rows = [row for row in (random_row(rng) for _ in range(3000)) if not has_empty_text(row)]
    assert len(rows) > 200
    rows += read_rows(RESULTS)
    text = to_csv(rows)
    assert read_csv(text) == rows
    assert text.split("\r\n")[0] == ",".join(COLUMNS)
    assert text.count("\r\n") == text.count("\n") == len(rows) + 1


@pytest.fixture
def path(tmp_path) -> Path:
    for row in ROWS:
        append(tmp_path / "rows.txt", row)
    return tmp_path / "rows.txt"


ROWS = [*sweep(), failed_row(), quality_row(kl_mean=5.1e-4, text="a;b")]


def test_each_format_holds_the_rows_that_are_meant(path, capsys):
    printed = {}
    for name in ("csv", "json", "md"):
        command = ["export", str(path), "--format", name, "--where", "kind=speed"]
        assert run_one_of(COMMANDS, command) == 0
        printed[name] = capsys.readouterr().out
    assert read_csv(printed["csv"]) == ROWS[:-1]
    for document in (documents := json.loads(printed["json"])):
        document.pop("key")
    assert [Row(**document) for document in documents] == ROWS[:-1]
    head, _, *lines = printed["md"].rstrip("\n").split("\n")
    assert len(lines) == len(ROWS) - 1
    assert head.startswith("| schema | time | kind | status | error | model | k_format |")


def test_values_stand_as_in_the_row(path, capsys):
    assert run_one_of(COMMANDS, ["export", f"{path}:kind=quality"]) == 0
    (values,) = csv.DictReader(io.StringIO(capsys.readouterr().out, newline=""))
    assert (values["kl_mean"], values["text"], values["decode_tok_s"]) == ("5.100e-04", "a%3Bb", "")


def test_an_unknown_format_is_refused(path, capsys):
    assert run_one_of(COMMANDS, ["export", str(path), "--format", "xml"]) == 2
    assert "--format xml: must be one of csv, json, md" in capsys.readouterr().err
