import logging
import subprocess

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


def test_a_built_library_is_not_built_again(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(native.torch.ops, "load_library", lambda path: calls.append(("load", path)))

    def compiler(command, **_):
        calls.append(("build", command[-1]))
        with open(command[-1], "wb"):  # noqa: PTH123
            return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(native.subprocess, "run", compiler)
    assert native.load()
    native.load.cache_clear()
    assert native.load()
    library = tmp_path / f"kv_fast_{native._fingerprint()}.so"
    assert [kind for kind, _ in calls] == ["build", "load", "load"]
    assert calls[1] == calls[2] == ("load", library)
    assert list(tmp_path.iterdir()) == [library]


def test_other_systems_use_plain_pytorch(monkeypatch):
    monkeypatch.setattr(native.sys, "platform", "darwin")
    assert ops.implementation(CPU) == "reference"
