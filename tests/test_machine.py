"""Memory windows against tensors of known size, bandwidth against a known time."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import machine
from machine import MIB, PeakMemory

CPU = torch.device("cpu")
ROOT = Path(machine.__file__).parent
needs_high_water_mark = pytest.mark.skipif(
    not machine.CLEAR_REFS.exists(), reason="this system has no resettable high-water mark"
)


def held_tensor(size):
    """Resident memory of its own, which goes back to the system with the tensor."""
    return torch.ones(size, dtype=torch.uint8)


@needs_high_water_mark
def test_a_tensor_freed_in_one_window_is_not_in_the_next():
    memory = PeakMemory(CPU)
    memory.reset()
    held_tensor(300 * MIB)
    first = memory.peak_bytes()
    memory.reset()
    second = memory.peak_bytes()
    assert not memory.is_sampled
    assert first - second == pytest.approx(300 * MIB, abs=10 * MIB)


@needs_high_water_mark
def test_a_peak_is_seen_after_it_was_freed_and_above_the_base():
    memory = PeakMemory(CPU)
    held_tensor(300 * MIB)
    assert memory.peak_bytes() - memory.base_bytes > 290 * MIB
    assert memory.base_bytes == pytest.approx(machine.resident_bytes(), abs=10 * MIB)


def test_where_the_high_water_mark_cannot_be_reset_memory_is_sampled(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    memory = PeakMemory(CPU)
    assert memory.is_sampled
    memory.reset()
    tensor = held_tensor(300 * MIB)
    time.sleep(0.3)
    del tensor
    first = memory.peak_bytes()
    memory.reset()
    time.sleep(0.1)
    assert first - memory.peak_bytes() == pytest.approx(300 * MIB, abs=10 * MIB)


@needs_high_water_mark
def test_a_child_does_not_inherit_the_peak_of_a_large_parent():
    code = "import machine, torch; print(machine.PeakMemory(torch.device('cpu')).peak_bytes())"
    ballast = bytearray(b"x") * (800 * MIB)
    assert machine.resident_bytes() > len(ballast)
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 50 * MIB < int(child.stdout) < len(ballast)


@pytest.mark.parametrize(("best", "buffers"), [("sum", 1), ("dot", 2), ("copy", 2)])
def test_bandwidth_is_that_of_the_best_probe_over_an_eighth_of_free_memory(
    best, buffers, monkeypatch
):
    times_s = iter([0.5 if probe == best else 100.0 for probe in ("sum", "dot", "copy")])
    monkeypatch.setattr(machine, "free_bytes", lambda device: 8 * 4_000_000)
    monkeypatch.setattr(machine, "best_time_s", lambda probe, device: next(times_s))
    assert machine.bandwidth_gb_s(CPU) == pytest.approx(buffers * 4e6 / 0.5 / 1e9)


def test_bandwidth_buffers_are_far_larger_than_the_last_level_cache(monkeypatch):
    sizes = []

    def empty_in_huge_pages(num_bytes, num_tensors, device):
        sizes.append((num_bytes, num_tensors))
        return lambda sizes, dtype, device: torch.empty(0)

    monkeypatch.setattr(machine, "empty_in_huge_pages", empty_in_huge_pages)
    monkeypatch.setattr(machine, "free_bytes", lambda device: 1 << 50)
    monkeypatch.setattr(machine, "best_time_s", lambda probe, device: 1.0)
    for cache_bytes in (0, 64 * MIB):
        monkeypatch.setattr(machine, "last_level_cache_bytes", lambda size=cache_bytes: size)
        machine.bandwidth_gb_s(CPU)
    assert sizes == [(2 * 256 * MIB, 2), (2 * 512 * MIB, 2)]


def test_measured_bandwidth_is_plausible(monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda device: 128 * MIB)
    assert 0.1 < machine.bandwidth_gb_s(CPU) < 20_000


@pytest.mark.parametrize(
    ("times_s", "calls"),
    [([0.05, 0.02] + [0.04] * 9, 10), ([0.5, 0.3, 0.3, 0.1, 0.1], 3)],
    ids=["ten", "as many as a second has room for"],
)
def test_the_best_time_counts(monkeypatch, times_s, calls):
    remaining_s, now_s = iter(times_s), 0.0

    def call():
        nonlocal now_s
        now_s += next(remaining_s)

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now_s)
    assert machine.best_time_s(call, CPU) == pytest.approx(min(times_s[:calls]))
    assert len(list(remaining_s)) == len(times_s) - calls


@pytest.mark.parametrize(
    ("physical", "usable", "expected"), [(8, {0}, 1), (2, range(4), 2), (None, range(4), 1)]
)
def test_threads_are_physical_cores_that_this_process_may_use(
    physical, usable, expected, monkeypatch
):
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: usable, raising=False)
    assert machine.physical_cores() == expected


def test_there_is_free_memory_and_not_more_than_there_is():
    assert 0 < machine.free_bytes(CPU) < psutil.virtual_memory().total


def test_the_device_has_a_name_for_people():
    assert re.fullmatch(r"\S.*\S", machine.device_name(CPU))


def test_the_device_asked_for_is_taken():
    assert machine.pick_device("mps") == torch.device("mps")
    assert machine.pick_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


def git(folder, *words):
    subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@b", *words], cwd=folder, check=True
    )


def test_the_commit_is_a_short_hash_and_says_what_is_uncommitted(monkeypatch, tmp_path):
    file = tmp_path / "machine.py"
    monkeypatch.setattr(machine, "__file__", str(file))
    assert machine.source_commit() is None
    git(tmp_path, "init", "--quiet")
    assert machine.source_commit() is None
    file.write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v1")
    commit = machine.source_commit()
    assert re.fullmatch("[0-9a-f]{7}", commit)
    rows = tmp_path / "benchmark_results.txt"
    for text in ("one row", "two rows"):
        rows.write_text(text)
        assert machine.source_commit() == commit
        git(tmp_path, "add", ".")
    file.write_text("two")
    assert machine.source_commit() == f"{commit}-dirty"


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.source_commit() is None
