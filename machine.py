"""What this machine is, and the memory and memory bandwidth that it has."""

import gc
import logging
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from config import UserError
from kernels.huge_pages import empty_in_huge_pages

log = logging.getLogger("kv_fast")

MIB = 1 << 20
PROBE_S = 1.0
CLEAR_REFS = Path("/proc/self/clear_refs")


def pick_device(name: str | None) -> torch.device:
    """The device asked for, else CUDA where there is one, else the CPU."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def prepare_device(name: str | None, threads: int | None) -> torch.device:
    """The device of a run, from --device and --threads, with its thread count set.

    Raises:
        UserError: there is no such device, or there are not so many cores.
    """
    device = pick_device(name)
    has_device = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not has_device.get(device.type, True):
        raise UserError(f"--device {device.type}: there is none here; leave the flag out")
    cores = os.cpu_count() or 1
    if threads and threads > cores:
        raise UserError(f"--threads {threads}: there are {cores} here; leave the flag out")
    torch.set_num_threads(threads or physical_cores())
    return device


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def system_columns(device: torch.device) -> dict[str, str | int | None]:
    """Columns of a row that say where, and by what code, it was measured."""
    return {
        "device_name": device_name(device),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "commit": source_commit(),
    }


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads not counted."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(psutil.cpu_count(logical=False) or 1, usable or 1)


def source_commit() -> str | None:
    """Short hash of the checked-out commit, "-dirty" with changed code; None outside git.

    Rows do not count as a change: a sweep appends them while it runs.
    """
    head = _git("rev-parse", "--short=7", "HEAD")
    if head is None or head.returncode:
        return None
    changed = _git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmark_results.txt")
    return head.stdout.strip() + ("-dirty" if changed and changed.returncode else "")


def _git(*words: str) -> subprocess.CompletedProcess[str] | None:
    """Git in this file's folder; None where there is no git."""
    folder = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return None


def busy_cores() -> float:
    """Cores that others keep busy, over half a second in which this process sleeps.

    The load average would not do: for a minute it still holds what this process itself did, and
    in a sweep the case before.
    """
    return psutil.cpu_percent(interval=0.5) / 100 * (psutil.cpu_count() or 1)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def resident_bytes() -> int:
    """Host memory of this process."""
    return psutil.Process().memory_info().rss


def held_bytes(device: torch.device) -> int:
    """What this process holds now: reserved by the allocator on CUDA, else resident."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


class PeakMemory:
    """Peak memory of windows of a run: `reset()` opens one, `peak_bytes()` reads it.

    On CUDA what the allocator reserved. Elsewhere resident host memory: the kernel's own high-water
    mark, which can be reset per window (unlike ru_maxrss), or where that is refused samples.

    Attributes:
        base_bytes: resident when this was made; 0 on CUDA.
        is_sampled: short peaks may be missed.
    """

    SAMPLE_S = 0.05

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base_bytes = 0 if device.type == "cuda" else resident_bytes()
        self.is_sampled = device.type != "cuda" and not _reset_high_water_mark()
        self._sampled = 0
        if self.is_sampled:
            threading.Thread(target=self._sample, daemon=True).start()

    def reset(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        elif not self.is_sampled:
            _reset_high_water_mark()
        self._sampled = resident_bytes()

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return self._sampled if self.is_sampled else _high_water_mark_bytes()

    def _sample(self) -> None:
        while True:
            self._sampled = max(resident_bytes(), self._sampled)
            time.sleep(self.SAMPLE_S)


def _reset_high_water_mark() -> bool:
    """Set VmHWM to the present VmRSS; see proc_pid_clear_refs(5). False where that is refused."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def last_level_cache_bytes() -> int:
    """Size of the processor's largest cache; 0 where it is not told."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip().rstrip("K")) * 1024 for size in sizes), default=0)


def bandwidth_gb_s(device: torch.device) -> float:
    """Best memory bandwidth of sums, dot products and copies of large fp32 buffers."""
    size = 1 << 30
    if device.type != "cuda":
        size = max(256 * MIB, 8 * last_level_cache_bytes())
    count = min(size, free_bytes(device) // 8) // 4
    empty = empty_in_huge_pages(2 * 4 * count, 2, device)
    a, b = (empty((count,), dtype=torch.float32, device=device).fill_(1) for _ in range(2))
    probes: list[tuple[Callable[[], object], int]] = [
        (lambda: torch.sum(a), 4 * count),
        (lambda: torch.dot(a, b), 8 * count),
        (lambda: a.copy_(b), 8 * count),
    ]
    return max(size / best_time_s(probe, device) for probe, size in probes) / 1e9


def best_time_s(call: Callable[[], object], device: torch.device) -> float:
    """Of ten calls, or of as many as PROBE_S has room for."""
    times: list[float] = []
    while len(times) < 10 and sum(times) < PROBE_S:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
