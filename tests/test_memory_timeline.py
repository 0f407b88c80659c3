"""What a run holds is sampled with its phases; a cache that is allocated shows as its own bytes."""

import time

import pytest
import torch

import machine
import memory_timeline
from measure import Recording
from memory_timeline import SAMPLE_S, MemoryTimeline

CPU = torch.device("cpu")
MIB = 1 << 20


def held_for(seconds: float, num_bytes: int) -> None:
    block = torch.ones(num_bytes, dtype=torch.uint8)
    time.sleep(seconds)
    del block


def test_each_phase_shows_what_it_held(tmp_path):
    timeline = MemoryTimeline(CPU)
    with timeline.sampling(tmp_path / "m.svg"):
        for phase, size in (("load", 64 * MIB), ("cache", 256 * MIB), ("depth fill", 1)):
            timeline.begin(phase)
            held_for(20 * SAMPLE_S, size)
    peaks = {phase: 0.0 for _, phase in timeline.phases}
    for sample in timeline.rows():
        peaks[sample.phase] = max(peaks[sample.phase], sample.memory_gb)
    more_gb = peaks["cache"] - peaks["load"]
    assert more_gb == pytest.approx(192 * MIB / 1e9, rel=0.1)
    times = [sample.time_s for sample in timeline.rows()]
    assert times == sorted(times)
    assert times[0] >= 0


def test_the_phases_of_timed_samples_are_their_stamps(monkeypatch):
    monkeypatch.setattr(memory_timeline.time, "perf_counter", lambda: 10.0)
    timeline = MemoryTimeline(CPU)
    timeline.begin("warm-up")
    recording = Recording()
    recording.start_s, recording.first_s, recording.last_s = 11.0, 12.0, 13.0
    timeline.add([recording])
    timeline.samples = [(9.0, 1), (10.5, 2 * 10**9), (11.0, 3), (11.5, 4), (12.0, 5), (20.0, 6)]
    assert [(s.time_s, s.phase) for s in timeline.rows()] == [
        (0.5, "warm-up"), (1.0, "prefill"), (1.5, "prefill"), (2.0, "decode"), (10.0, "decode")
    ]  # fmt: skip
    assert timeline.rows()[0].memory_gb == 2.0


def test_without_a_file_nothing_is_sampled(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError("sampled")

    monkeypatch.setattr(machine, "held_bytes", fail)
    timeline = MemoryTimeline(CPU)
    with timeline.sampling(None):
        timeline.begin("load")
        time.sleep(3 * SAMPLE_S)
    assert timeline.samples == []


def test_sampling_ends_with_an_error(tmp_path):
    timeline = MemoryTimeline(CPU)
    with pytest.raises(RuntimeError, match="out of memory"), timeline.sampling(tmp_path / "m.svg"):
        raise RuntimeError("out of memory")
    count = len(timeline.samples)
    time.sleep(3 * SAMPLE_S)
    assert len(timeline.samples) == count
