"""The picture of memory over time names its phases, axes, units, machine and expected levels."""

import csv

import pytest
from result_rows import speed_row

from config import UserError
from reporting.plot_timeline import Sample, check_picture, save_timeline

SAMPLES = [
    *(Sample(i / 8, 0.5 + 0.02 * i, "load") for i in range(8)),
    *(Sample(1 + i / 8, 0.8, "cache") for i in range(8)),
    *(Sample(2 + i / 8, 0.9, "decode") for i in range(9)),
    Sample(3.01, 0.9, "prefill"),
]
PARTS = {"Python and torch": 470_000_000, "weights": 270_000_000, "workspace": 300_000}


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_and_its_numbers_are_written(suffix, tmp_path):
    path = tmp_path / f"memory{suffix}"
    save_timeline(path, SAMPLES, PARTS, speed_row())
    with path.with_suffix(".csv").open(newline="") as opened:
        found = [Sample(float(r["time_s"]), float(r["memory_gb"]), r["phase"])
                 for r in csv.DictReader(opened)]  # fmt: skip
    assert found == SAMPLES
    data = path.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
        return
    text = data.decode()
    for words in ("load", "cache", "decode", "time [s]", "memory held [GB = 1e9 bytes]",
                  "+ weights 0.270 GB", "AMD EPYC", "int8 cache"):  # fmt: skip
        assert words in text
    assert "prefill" not in text  # too short for a name
    assert "workspace" not in text  # its name would cover that of the weights


@pytest.mark.parametrize("name", ["memory", "memory.pdf", "memory.png.csv", "no/folder/m.png"])
def test_a_name_that_cannot_be_written_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="must end in .png or .svg|cannot be written"):
        check_picture(tmp_path / name)
