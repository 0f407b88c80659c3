"""A line is on the disk, whole, whatever dies, waits or fills up meanwhile."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import durable
from command import STOP_SIGNALS, run
from config import UserError
from durable import append_line, check_writable
from generate_config import GenerateConfig

ROOT = Path(durable.__file__).parent
ORIGIN_ROW = b"20240831225155, tok/s=107.38, mem/s=1418.93 GB/s repro: python generate.py"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "lines.txt"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"whole\n", b"whole\n"),
        (b"tor", b"tor <torn>\n"),
        (b"whole\ntor", b"whole\ntor <torn>\n"),
        (b"whole\n" + ORIGIN_ROW, b"whole\n" + ORIGIN_ROW + b"\n"),
        (b"whole\n" + ORIGIN_ROW[:16], b"whole\n" + ORIGIN_ROW[:16] + b" <torn>\n"),
        (b"\xff\xc3", b"\xff\xc3 <torn>\n"),
    ],
)
def test_append_closes_what_a_dead_writer_left(before, after, path):
    path.write_bytes(before)
    append_line(path, "né")
    assert path.read_bytes() == after + "né\n".encode()


def test_append_syncs_the_file_and_the_folder_of_a_new_one(path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    append_line(path, "first")
    append_line(path, "second")
    assert synced == [place.stat().st_ino for place in (path, path.parent, path)]


def test_a_full_disk_leaves_the_old_file_and_ends_with_1(path, monkeypatch, capsys):
    path.write_text("whole\ntor")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
    assert run(lambda _: append_line(path, "new"), GenerateConfig, []) == 1
    assert capsys.readouterr().err == f"error: OSError: {path}: disk full, nothing was written\n"
    assert path.read_text() == "whole\ntor"


def test_a_failing_write_names_the_file(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match=r"lines.txt: Input/output error"):
        append_line(path, "new")


def test_a_lock_is_awaited_and_then_named(path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(durable, "LOCK_TIMEOUT_S", 0.1)
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"lines.txt: locked by others for 0.1 s"):
            append_line(path, "new")
    assert path.read_text() == ""
    append_line(path, "new")
    assert path.read_text() == "new\n"


@pytest.fixture
def restored_signals():
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_until_the_line_is_written(number, code, path, monkeypatch):
    write = os.write

    def interrupted_write(descriptor: int, data: bytes) -> int:
        signal.raise_signal(number)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", interrupted_write)
    assert run(lambda _: append_line(path, "new"), GenerateConfig, []) == code
    assert path.read_text() == "new\n"


WRITER = """
import sys, time
from pathlib import Path
from durable import append_line
path, name = Path(sys.argv[1]), sys.argv[2]
for number in range(10**9):
    append_line(path, f"{name} {number} " + "x" * 1000 + " end")
    print(number, flush=True)
    time.sleep(0.005)  # so that the others get the lock, too
"""


def test_writers_killed_at_any_moment_lose_no_line_they_reported(path):
    rng = random.Random(3)

    def start(name: str) -> subprocess.Popen:
        command = [sys.executable, "-c", WRITER, str(path), name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)

    reported = set()
    for round_ in range(4):
        writers = {f"{round_}-{i}": start(f"{round_}-{i}") for i in range(4)}
        for writer in writers.values():
            writer.stdout.readline()
        for name, writer in writers.items():
            time.sleep(rng.uniform(0, 0.05))
            writer.kill()
            numbers = writer.stdout.read().split(b"\n")[:-1]
            reported |= {(name, number) for number in range(len(numbers) + 1)}
            writer.wait()
    append_line(path, "last line of the test end")
    lines = [line for line in path.read_text().splitlines() if not line.endswith(" <torn>")]
    assert [line for line in lines if not line.endswith(" end")] == []
    assert len(reported) > 16
    assert reported <= {(name, int(n)) for name, n, *_ in map(str.split, lines[:-1])}


@pytest.mark.parametrize("name", ["", "missing/lines.txt", "file/lines.txt"])
def test_a_place_that_cannot_be_written_is_refused_early(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: .*; name a file in a folder"):
        check_writable(tmp_path / name)


def test_a_place_that_can_be_written_keeps_its_content(path, tmp_path):
    append_line(path, "old")
    check_writable(path)
    check_writable(tmp_path / "new.txt")
    assert path.read_text() == "old\n"
    assert (tmp_path / "new.txt").read_bytes() == b""
