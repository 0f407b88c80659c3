"""A bar goes to a terminal alone; a pipe gets whole lines without escape codes."""

import logging
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import progress as progress_module
from progress import LINE_EVERY_S, progress

ROOT = Path(progress_module.__file__).parent
PROGRAM = (
    "import logging, time; from progress import progress;"
    "logging.basicConfig(format='%(message)s', level='INFO');\n"
    "with progress('filling the cache', 3000, 'tok') as advance:\n"
    "    for _ in range(3): time.sleep(0.3); advance(1000)"
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def test_a_file_or_pipe_gets_a_line_at_the_start_and_one_every_half_minute(clock, caplog):
    caplog.set_level(logging.INFO, "kv_fast")
    with progress("filling the cache", 5000, "tok") as advance:
        assert caplog.messages == ["filling the cache: 5000 tok"]
        for _ in range(5):
            clock.now_s += LINE_EVERY_S / 2
            advance(1000)
    assert caplog.messages[1:] == [
        "filling the cache: 2000 tok of 5000 tok",
        "filling the cache: 4000 tok of 5000 tok",
    ]


def test_bytes_are_told_in_larger_units(clock, caplog):
    caplog.set_level(logging.INFO, "kv_fast")
    with progress("loading weights", 98_362_432, "B") as advance:
        clock.now_s += LINE_EVERY_S
        advance(49_000_000)
    assert caplog.messages == ["loading weights: 98.4MB", "loading weights: 49.0MB of 98.4MB"]


def test_a_pipe_sees_no_escape_codes():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "filling the cache: 3000 tok\n")


def test_a_terminal_sees_a_bar_that_goes_away():
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, stderr=writer, check=True)
    seen = os.read(reader, 1 << 16).decode()
    os.close(writer)
    os.close(reader)
    assert "filling the cache:  33%" in seen
    assert "tok/s" in seen
    assert seen.endswith("\r")  # the line is blanked for what comes next
