"""The C++ kernels of the CPU: built on first use, kept, and loaded into the process.

One source and one compiler call. Where there is no compiler, plain PyTorch answers and a line says
so. The built file is named by a fingerprint and moved into place whole, so that builds at the same
time, or killed ones, leave nothing to wait for.
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


@functools.cache
def load() -> bool:
    """Whether the C++ kernels are registered; builds them where that was never done."""
    if not sys.platform.startswith("linux"):
        return False
    library = Path(cpp_extension.get_default_build_root()) / f"kv_fast_{_fingerprint()}.so"
    try:
        if not library.exists():
            _build(library)
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError) as error:
        errors = getattr(error, "stderr", None) or str(error)
        log.warning("no CPU kernels, plain PyTorch answers: %s", errors.strip().partition("\n")[0])
        return False
    return True


@torch.compiler.assume_constant_result
def is_loaded() -> bool:
    """`load()` where the caller is being compiled: called then, and its answer kept."""
    return load()


def instruction_sets() -> list[str]:
    """What the loaded kernels can run with here, best first: avx512vnni, avx512, avx2, baseline."""
    return torch.ops.kv_fast.instruction_sets()


def reads_fours() -> bool:
    """Whether what the loaded kernels use now multiplies codes as integers, in fours."""
    return torch.ops.kv_fast.reads_fours()


def _fingerprint() -> str:
    """Of the sources, the flags and torch: another of them is another build."""
    digest = hashlib.sha256(repr((torch.__version__, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _build(library: Path) -> None:
    log.info("building the CPU kernels, once")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        subprocess.run(_command(built), capture_output=True, text=True, check=True)
        built.replace(library)


def _command(output: Path) -> list[str]:
    torch_folders = cpp_extension.library_paths()
    # torch's own OpenMP library, by file: a second one would have a thread pool of its own.
    openmp = [str(file) for folder in torch_folders for file in Path(folder).glob("libgomp*.so*")]
    return [
        os.environ.get("CXX", "c++"),
        *FLAGS,
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        *("-shared", "-fPIC", "-Wl,--as-needed", str(SOURCES / "kv_fast.cpp")),
        *openmp,
        *(f"-L{folder}" for folder in torch_folders),
        *("-ltorch_cpu", "-lc10", "-o", str(output)),
    ]
