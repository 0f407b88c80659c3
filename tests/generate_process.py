"""generate.py as a process of its own, for tests: start it on a tiny checkpoint, see how it ended.

A pytest plugin: `pytest_plugins = ["generate_process"]` in a test module gives its fixtures.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoint_kinds import TOKENIZER

import generate
import machine
from command import run as run_command
from generate_config import GenerateConfig
from results import Row, parse_row
from scripts.tiny_checkpoint import TINY, random_weights, write_hf


@dataclass(frozen=True)
class Run:
    """A process that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def row(self) -> Row:
        [line] = [line for line in self.stderr.splitlines() if line.startswith("schema=")]
        return parse_row(line)

    @property
    def document(self) -> dict:
        return json.loads(self.stdout)

    @property
    def errors(self) -> list[str]:
        """The lines that say so; there is never a traceback."""
        assert "Traceback" not in self.stderr
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    @property
    def error(self) -> str:
        """The one there is."""
        [line] = self.errors
        return line


def no_preparation() -> None:
    pass


def command(folder: Path, words: list[str], prepare: Callable[[], None]) -> None:
    """What the process does: the command, its output in files, without the slow bandwidth probe."""
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    machine.bandwidth_gb_s = lambda device: 10.0
    prepare()
    sys.exit(run_command(generate.main, GenerateConfig, words))


@pytest.fixture(scope="session")
def processes():
    """A fork server that has imported torch once; its children start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["generate", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        first = context.Process(target=no_preparation)  # the server starts with it
        first.start()
        first.join()
    return context


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "a tiny model"
    return write_hf(folder, TINY, random_weights(TINY), files=TOKENIZER.hf_files)


@pytest.fixture(scope="session")
def run_generate(processes, checkpoint, tmp_path_factory):
    """Runs generate.py on the tiny checkpoint, eager on one CPU thread unless told otherwise.

    `prepare` is called in the process before the command.
    """

    def run(*flags, path=checkpoint, prepare=no_preparation, eager=True) -> Run:
        folder = tmp_path_factory.mktemp("run")
        usual = ["--checkpoint_path", path, "--device", "cpu", "--threads", 1]
        words = [*usual, *["--no-compile"] * eager, *flags]
        arguments = (folder, [str(word) for word in words], prepare)
        process = processes.Process(target=command, args=arguments)
        process.start()
        process.join(300)
        process.kill()
        return Run(process.exitcode, *((folder / n).read_text() for n in ("stdout", "stderr")))

    return run
