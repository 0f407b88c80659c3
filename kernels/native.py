"""The C++ kernels of the CPU: built on first use, kept, and loaded into the process.

A library holds the host code and the inner loops for one instruction set, the best that this
processor has: two compiler calls, at the same time. Where there is no compiler, plain PyTorch
answers and a line says so. The built file is named by its instruction set and a fingerprint and
moved into place whole, so that builds at the same time, killed ones, or other machines with the
same home leave nothing to wait for.
"""

import functools
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

log = logging.getLogger("kv_fast")

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wno-psabi"]
FLAGS += ["-fPIC"]

CPU_INFO = Path("/proc/cpuinfo")
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDS = {"avx512vnni": AVX512 | {"avx512_vnni"}, "avx512": AVX512, "avx2": AVX2, "baseline": set()}
"""What the inner loops in csrc/NAME.cpp need of a processor, as Linux names it; the best first."""


@functools.cache
def load() -> bool:
    """Whether the C++ kernels are registered; builds them where that was never done."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        best = _runnable()[0]
        library = _library(best)
        if not library.exists():
            log.info("building the CPU kernels, once")
            _build(library, ["kv_fast", best])
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError) as error:
        errors = getattr(error, "stderr", None) or str(error)
        log.warning("no CPU kernels, plain PyTorch answers: %s", errors.strip().partition("\n")[0])
        return False
    return True


@functools.cache
def load_all() -> list[str]:
    """Load the inner loops for all instruction sets of this processor, to compare them.

    Returns:
        Their names, best first; none where there are no kernels. The best answers, until
        torch.ops.kv_fast.use_instruction_set(name) says otherwise, for the whole process.
    """
    if not load():
        return []
    for name in _runnable()[1:]:
        library = _library(f"{name}_alone")
        if not library.exists():
            _build(library, [name])
        torch.ops.kv_fast.add_instruction_set(str(library))
    return instruction_sets()


@torch.compiler.assume_constant_result
def is_loaded() -> bool:
    """`load()` where the caller is being compiled: called then, and its answer kept."""
    return load()


def instruction_sets() -> list[str]:
    """What is loaded, best first, by the names in NEEDS."""
    return list(dict.fromkeys(torch.ops.kv_fast.instruction_sets()))


def reads_fours() -> bool:
    """Whether what the loaded kernels use now multiplies codes as integers, in fours."""
    return torch.ops.kv_fast.reads_fours()


def _fingerprint() -> str:
    """Of the sources, the flags and torch: another of them is another build."""
    digest = hashlib.sha256(repr((torch.__version__, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _runnable() -> list[str]:
    """The instruction sets that this processor has, best first."""
    lines = CPU_INFO.read_text().splitlines()
    found = next((line.split() for line in lines if line.startswith("flags")), [])
    return [name for name, needed in NEEDS.items() if needed.issubset(found)]


def _library(name: str) -> Path:
    return Path(cpp_extension.get_default_build_root()) / f"kv_fast_{_fingerprint()}_{name}.so"


def _build(library: Path, names: list[str]) -> None:
    """One library of the sources of these names."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{name}.o" for name in names]
        _run_at_once(list(map(_compile_command, objects)))
        built = Path(folder) / library.name
        _run_at_once([_link_command(objects, built)])
        built.replace(library)


def _run_at_once(commands: list[list[str]]) -> None:
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for process, command in zip(running, commands, strict=True):
            _, errors = process.communicate()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)
    finally:
        for process in running:  # one failed, or a signal came: nobody waits for the others
            process.kill()
            process.wait()


def _compile_command(output: Path) -> list[str]:
    includes = [f"-isystem{folder}" for folder in cpp_extension.include_paths()]
    source = SOURCES / f"{output.stem}.cpp"
    return [_compiler(), *FLAGS, *includes, "-c", str(source), "-o", str(output)]


def _link_command(objects: list[Path], output: Path) -> list[str]:
    torch_folders = cpp_extension.library_paths()
    # torch's own OpenMP library, by file: a second one would have a thread pool of its own.
    openmp = [str(file) for folder in torch_folders for file in Path(folder).glob("libgomp*.so*")]
    return [
        _compiler(),
        *FLAGS,
        *("-shared", "-Wl,--as-needed"),
        *map(str, objects),
        *openmp,
        *(f"-L{folder}" for folder in torch_folders),
        *("-ltorch_cpu", "-lc10", "-ldl", "-o", str(output)),
    ]


def _compiler() -> str:
    return os.environ.get("CXX", "c++")
