"""Kernels compiled for GPUs that need not be present: their resources and their machine code."""

import re
import subprocess
from typing import NamedTuple

import pytest

triton = pytest.importorskip("triton", reason="no Triton here", exc_type=ImportError)

from triton.backends.compiler import GPUTarget  # noqa: E402


class GPU(NamedTuple):
    """bytes_per_clock: what memory delivers to each SM: bandwidth / SMs / clock."""

    shared_bytes_per_sm: int
    bytes_per_clock: float


GPUS = {
    80: GPU(164 * 1024, 2.04e12 / 108 / 1.41e9),  # A100, 80 GB
    90: GPU(228 * 1024, 4.8e12 / 132 / 1.755e9),  # H200
}
"""By architecture. The driver takes 1024 bytes of the shared memory for each program."""

REGISTERS_PER_SM = 65536

ISSUED_PER_CLOCK = 4
"""Warp instructions that an SM issues at most: one for each of its schedulers."""

COPY = "LDGSTS.E.BYPASS.128"
"""The instruction with which a thread copies 16 bytes from global to shared memory."""


class AbsentGPU:
    """Lets Triton compile for a GPU of this architecture, which need not exist."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return f"absent sm_{self.arch}"

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


class CompileOnly:
    """Stands in for a kernel: compiles what it is asked to launch, and launches nothing."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = None

    def __getitem__(self, grid):
        def compile_kernel(*arguments, **options):
            self.compiled = self.kernel.warmup(*arguments, grid=grid, **options)

        return compile_kernel


def absent_launches(monkeypatch, module, arch, *names):
    """Stand-ins for kernels of a module, which compile for a GPU of this architecture."""
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU(arch))
    stand_ins = [CompileOnly(getattr(module, name)) for name in names]
    for name, stand_in in zip(names, stand_ins, strict=True):
        monkeypatch.setattr(module, name, stand_in)
    return stand_ins


def cuda_tool(name, kernel, folder, *options):
    """Output of one of the tools in Triton's wheel for this kernel."""
    try:
        tool = getattr(triton.knobs.nvidia, name).path
    except RuntimeError as error:
        pytest.skip(f"Triton's CUDA tools are missing: {error}")
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    return subprocess.run([tool, *options, path], capture_output=True, text=True, check=True).stdout


def resource_usage(kernel, folder):
    """Registers (REG) and spilled bytes (STACK, LOCAL) per thread."""
    text = cuda_tool("cuobjdump", kernel, folder, "--dump-resource-usage")
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}


def loops(listing):
    """Names of the instructions of every loop in nvdisasm's listing that has no loop inside."""
    names, labels, spans = [], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)[^;]*;", line):
            names.append(instruction[1])
            target = re.search(r"\.L_x_\d+", line)
            # A label that was seen before its branch is a jump back.
            if instruction[1].startswith("BRA") and target and target[0] in labels:
                spans.append((labels[target[0]], len(names)))
    inner = [
        (lo, hi)
        for lo, hi in spans
        if not any(lo <= a < b < hi or lo < a < b <= hi for a, b in spans)
    ]
    return [names[lo:hi] for lo, hi in inner]
