"""A run ends with one line and the right code, whatever ends it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_config import Command

import command
from command import Terminated, run, run_one_of
from config import UserError

ROOT = Path(command.__file__).parent


ENDINGS = [
    (UserError("m.gguf: version 1"), 2, "error", "m.gguf: version 1"),
    (RuntimeError("first\nsecond"), 1, "error", "RuntimeError: first"),
    (ValueError("x\x1b" + "y" * 500), 1, "error", "ValueError: x\\x1b" + "y" * 195 + "..."),
    (MemoryError(), 1, "error", "MemoryError"),
    (KeyboardInterrupt("SIGINT"), 130, "interrupted", "SIGINT"),
    (Terminated("SIGTERM"), 143, "interrupted", "SIGTERM"),
]


@pytest.mark.parametrize(("error", "code", "status", "message"), ENDINGS)
def test_an_error_is_one_line_and_one_document(error, code, status, message, capsys):
    def main(_: Command) -> None:
        raise error

    assert run(main, Command, ["f"]) == code
    assert capsys.readouterr() == ("", f"{status}: {message}\n")
    assert run(main, Command, ["f", "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"status": status, "error": message}
    assert captured.err == f"{status}: {message}\n"


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["b", "abc"], 3, "", ""),
        ([], 2, "", "error: no command given; known: a, b\n"),
        (["c\x1b"], 2, "", "error: c\\x1b: no such command; known: a, b\n"),
        (["--help"], 0, "Commands; each has a --help of its own:\n  a ", ""),
        (["b", "--help"], 0, "usage: python ", ""),
    ],
)
def test_the_first_argument_names_one_of_several_commands(argv, code, out, err, capsys):
    commands = {"a": (lambda _: 1, Command), "b": (lambda config: len(str(config.file)), Command)}
    assert run_one_of(commands, argv) == code
    captured = capsys.readouterr()
    assert captured.out.startswith(out)
    assert captured.err == err
    assert ("usage" not in out) or " b FILE [flags]" in captured.out


def test_a_wrong_flag_gives_a_document_too(capsys):
    assert run(lambda _: 0, Command, ["f", "--json", "--nope"]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == "error"


def test_a_traceback_is_shown_with_debug_and_the_line_is_last(capsys):
    def main(_: Command) -> None:
        raise RuntimeError("broke")

    assert run(main, Command, ["f", "--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "error: RuntimeError: broke"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_the_code_of_main_is_the_exit_code(returned, code):
    assert run(lambda _: returned, Command, ["f"]) == code


def start(body: str, *argv: str, **options) -> subprocess.Popen:
    """A process whose main has `body`, and stdin, stdout, stderr as pipes unless told otherwise."""
    program = (
        "import sys, time, logging, signal\n"
        "from command import run\nfrom generate_config import GenerateConfig\n"
        "def main(settings):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"
        "sys.exit(run(main, GenerateConfig))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([sys.executable, "-c", program, *argv], **(pipes | options))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_lets_main_clean_up(number, code):
    body = """
        try:
            print("ready", flush=True); time.sleep(60)
        finally:
            print("cleaned up")
    """
    process = start(body)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (code, "cleaned up\n")
    assert err == f"interrupted: {number.name}\n"


def test_a_second_ctrl_c_ends_at_once():
    body = """
        try:
            print("ready", flush=True); time.sleep(60)
        except KeyboardInterrupt:
            print("cleaning", flush=True); time.sleep(60)
    """
    process = start(body)
    for expected in ("ready\n", "cleaning\n"):
        assert process.stdout.readline() == expected
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT  # 130 in a shell


def test_a_signal_the_parent_ignores_stays_ignored():
    process = start("print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)")
    assert process.communicate(timeout=10)[0] == "False\n"
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = start("print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)", **ignore)
    assert process.communicate(timeout=10)[0] == "True\n"


@pytest.mark.parametrize("body", ["for _ in range(10**5): print('x' * 80)", "print('short')"])
@pytest.mark.parametrize("argv", [[], ["--json"], ["--help"]])
def test_a_reader_that_leaves_early_is_no_error(body, argv):
    process = start("time.sleep(0.2)\n" + body, *argv)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=10) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        process = start("print('text')", stdout=full)
        err = process.communicate(timeout=10)[1]
    assert (process.returncode, err) == (1, "error: OSError: [Errno 28] No space left on device\n")


def test_progress_is_bare_lines_on_stderr_and_libraries_stay_quiet():
    body = """
        logging.getLogger("kv_fast").info("loading")
        logging.getLogger("httpx").info("GET")
        print("text")
    """
    process = start(body)
    assert process.communicate(timeout=10) == ("text\n", "loading\n")
    assert process.returncode == 0


def test_several_faults_of_a_request_are_a_line_each(capsys):
    def main(_: Command) -> None:
        raise UserError("--depth 9: too deep", "a.json: no\nobject")

    lines = ["--depth 9: too deep", r"a.json: no\nobject"]
    assert run(main, Command, ["f", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"error: {line}" for line in lines]
    assert json.loads(captured.out)["error"].splitlines() == lines


SLOW_IMPORT = """
import time
from command import end_on_signals
end_on_signals()
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:
    raise ImportError
"""


@pytest.mark.parametrize("argv", [[], ["--json"]])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_imports_is_one_line_and_the_right_code(number, code, argv):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (code, f"interrupted: {number.name}\n")
    assert (json.loads(out) if argv else out) == (
        {"status": "interrupted", "error": number.name} if argv else ""
    )


def test_the_name_of_a_path_keeps_a_note_on_its_line(tmp_path):
    program = """
        import logging, sys
        from pathlib import Path
        from command import run
        from test_config import Command
        log = logging.getLogger("kv_fast")
        path = Path("a\\n\\x1b\\u202eb")
        sys.exit(run(lambda _: log.info("%s: read\\n%d", path, 7), Command, ["f"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "a\\n\\x1b\\u202eb: read\n7\n"
