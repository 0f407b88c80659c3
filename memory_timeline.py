"""Memory over the time of a run, with its phases, for a picture: `--memory_profile FILE`.

Sampled beside the run, so that a peak shorter than SAMPLE_S may be missing; rows have the exact
peak. On CUDA a snapshot of the allocator is written too, for https://pytorch.org/memory_viz.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import machine
from measure import Recording
from reporting.plot_timeline import Sample

SAMPLE_S = 0.02


class MemoryTimeline:
    """Samples of what a run holds, and the moments at which its phases began.

    Attributes:
        samples: (host clock in s, bytes): reserved by the allocator on CUDA, else resident.
        phases: (host clock in s, name), in order of time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[tuple[float, int]] = []
        self.phases: list[tuple[float, str]] = []

    def begin(self, phase: str) -> None:
        """A phase starts now, and the one before it ends."""
        self.phases.append((time.perf_counter(), phase))

    def add(self, recordings: Iterable[Recording]) -> None:
        """The phases of timed samples, from their stamps: nothing is done while they run."""
        for recording in recordings:
            self.phases += [(recording.start_s, "prefill"), (recording.first_s, "decode")]

    @contextmanager
    def sampling(self, file: Path | None) -> Iterator[None]:
        """Sample while the block runs; without a file nothing is done."""
        if file is None:
            yield
            return
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history()
        stopped = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stopped,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(file.with_suffix(".pickle")))

    def _sample(self, stopped: threading.Event) -> None:
        while not stopped.wait(SAMPLE_S):
            self.samples.append((time.perf_counter(), machine.held_bytes(self.device)))

    def rows(self) -> list[Sample]:
        """The samples from the first phase on, each with the phase it fell into."""
        start_s = self.phases[0][0]
        found, index = [], 0
        for moment_s, num_bytes in self.samples:
            while index + 1 < len(self.phases) and self.phases[index + 1][0] <= moment_s:
                index += 1
            if moment_s >= start_s:
                phase = self.phases[index][1]
                found.append(Sample(moment_s - start_s, num_bytes / 1e9, phase))
        return found
