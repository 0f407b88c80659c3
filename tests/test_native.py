import logging
import re
import subprocess
import sys
import time

import pytest
import torch

from kernels import native, ops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_load(monkeypatch, tmp_path):
    """An empty build folder, and nothing remembered before or after."""
    monkeypatch.setattr(native.cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_without_a_compiler_the_reference_answers_and_a_line_says_so(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="kv_fast"):
        assert ops.implementation(CPU) == "reference"
    [warning] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("no CPU kernels, plain PyTorch answers: ")
    assert "no-such-compiler" in warning
    assert not list(tmp_path.iterdir())


def test_a_failed_build_names_the_first_error_and_leaves_nothing(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "FLAGS", ["--no-such-flag"])
    with caplog.at_level(logging.INFO, logger="kv_fast"):
        assert not native.load()
    assert "no-such-flag" in caplog.text
    assert not list(tmp_path.iterdir())


def test_another_source_or_torch_is_another_build(monkeypatch):
    before = native._fingerprint()
    assert native._fingerprint() == before
    monkeypatch.setattr(native.torch, "__version__", "9.9.9")
    assert native._fingerprint() != before


@pytest.fixture
def compiler(monkeypatch, tmp_path_factory):
    """A stand-in that makes empty files; its calls, a line of arguments each."""
    folder = tmp_path_factory.mktemp("compiler")
    calls = folder / "calls"
    calls.touch()
    program = folder / "c++"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\n: > "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return calls


@pytest.fixture
def loaded(monkeypatch):
    """The libraries that were loaded, which are not."""
    paths = []
    monkeypatch.setattr(native.torch.ops, "load_library", paths.append)
    return paths


def test_a_built_library_is_not_built_again(compiler, loaded, tmp_path):
    assert native.load()
    calls = compiler.read_text()
    native.load.cache_clear()
    assert native.load()
    assert compiler.read_text() == calls
    [library] = tmp_path.iterdir()
    assert loaded == [library, library]


ALL_FLAGS = "fpu avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni"


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (ALL_FLAGS, "avx512vnni"),
        (ALL_FLAGS.replace("avx512_vnni", "avx_vnni"), "avx512"),
        (ALL_FLAGS.replace("avx512dq ", ""), "avx2"),
        ("fpu avx avx2 fma f16c", "avx2"),
        ("fpu avx avx2 f16c", "baseline"),
        (None, "baseline"),  # of another kind of processor, whose line has another name
    ],
)
def test_only_what_this_processor_runs_best_is_compiled(
    compiler, loaded, monkeypatch, tmp_path, flags, best
):
    """Beside the host code; and a home that machines share has a library for each kind."""
    info = tmp_path.parent / f"{tmp_path.name}.cpuinfo"
    info.write_text("processor : 0\n" + (f"flags\t\t: {flags}\n" if flags else "Features : fp\n"))
    monkeypatch.setattr(native, "CPU_INFO", info)
    assert native.load()
    sources = re.findall(r"csrc/(\w+)\.cpp", compiler.read_text())
    assert sorted(sources) == sorted(["kv_fast", best])
    [library] = tmp_path.iterdir()
    assert library.stem == f"kv_fast_{native._fingerprint()}_{best}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/cpuinfo is of Linux")
def test_the_instruction_sets_of_this_processor_are_those_that_torch_sees():
    names = {"AVX512": "avx512", "AVX2": "avx2", "DEFAULT": "baseline"}
    best = names.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    assert best in native._runnable()
    better = native._runnable()[: native._runnable().index(best)]
    assert better in ([], ["avx512vnni"])


def test_when_one_of_two_compilations_fails_the_other_is_ended():
    start_s = time.monotonic()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        native._run_at_once([["sh", "-c", "echo broken >&2; exit 1"], ["sleep", "60"]])
    assert caught.value.stderr == "broken\n"
    assert time.monotonic() - start_s < 30


def test_other_systems_use_plain_pytorch(monkeypatch):
    monkeypatch.setattr(native.sys, "platform", "darwin")
    assert ops.implementation(CPU) == "reference"
