"""README.md and benchmark_results.txt against the code that they describe."""

from pathlib import Path

import pytest

from config import repro_command
from programs import config_of
from results import COLUMNS, Row, format_row, scan
from scripts import readme
from summary import FLAG_WORDS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmark_results.txt"
README = (ROOT / "README.md").read_text()


def test_the_generated_blocks_of_the_readme_are_up_to_date():
    assert readme.filled(README) == README


@pytest.mark.parametrize("name", [*COLUMNS, *FLAG_WORDS])
def test_the_readme_explains_every_column_and_flag(name):
    assert f"`{name}`" in README


def test_every_committed_row_parses_formats_back_and_has_a_repro_of_its_own_settings():
    rows = list(scan(RESULTS))
    assert len(rows) >= 4
    for row, line in zip(rows, RESULTS.read_text().splitlines(), strict=True):
        assert isinstance(row, Row), row
        assert format_row(row) == line
        config = config_of(row.repro)
        assert repro_command(row.repro.split()[1], config) == row.repro
        if row.kind == "speed":
            assert config.max_new_tokens >= row.new_tokens
