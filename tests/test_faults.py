"""Each fault ends a run with its code and its one line, and leaves everything else as it was."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kinds import tiny
from fault_makers import Fault, nothing
from fault_rows import FAULTS
from test_generate_text import chain, with_files

import generate
from chat_template import RENDERER
from results import read_rows

pytest_plugins = ["generate_process"]

HEADING = "A heading\n"
FORBIDDEN = ("os.exec", "os.posix_spawn", "os.system", "socket.connect")
CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree")
WRITING = os.O_WRONLY | os.O_RDWR
FAULT_IDS = {fault.id: fault for fault in FAULTS}


def is_forbidden(folder: str, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a run does what no file may lead it to."""
    if event == "subprocess.Popen":
        return str(RENDERER) not in arguments[1] and arguments[1][0] != "git"
    is_change = event in CHANGING or (event == "open" and arguments[2] & WRITING)
    if is_change and isinstance(arguments[0], str | bytes | Path):
        places = (folder, "/dev/null", "/proc/self/clear_refs")
        return not os.fsdecode(arguments[0]).startswith(places)
    return event in FORBIDDEN


def watched(folder: Path, during: Callable[[Path], None], path: Path) -> None:
    """End the process where it does what it must not; its children are known by their session."""
    os.chdir(folder)
    os.setsid()
    (folder / "session").write_text(str(os.getpid()))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_forbidden(str(folder), event, arguments):
            os.write(2, f"FORBIDDEN {event} {arguments}\n".encode())
            os._exit(99)

    during(path)
    sys.addaudithook(watch)


def left_of_session(number: int) -> list[str]:
    """Processes that outlived the one that began the session."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == number:
            found.append(file.parent.name)
    return found


def broken(fault: Fault, folder: Path) -> Path:
    path = tiny(fault.kind, folder / "model")
    fault.make(path)
    return path


def check_line(fault: Fault, path: Path, code: int, stderr: str) -> None:
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert (code, len(errors)) == (fault.code, 1), stderr
    assert lines[-1] == errors[0]
    assert "Traceback" not in stderr
    assert "FORBIDDEN" not in stderr
    if fault.code == 2:
        assert lines == errors
    for words in [fault.words] if isinstance(fault.words, str) else fault.words:
        assert words.replace("{}", str(path)) in errors[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # to make them
@pytest.mark.parametrize("name", FAULT_IDS)
def test_a_fault_is_one_line_with_its_code_and_nothing_else_changes(
    name: str, run_generate, tmp_path: Path
) -> None:
    fault = FAULT_IDS[name]
    path = broken(fault, tmp_path)
    rows = tmp_path / "rows.txt"
    rows.write_text(HEADING)
    words = [word.replace("{}", str(path)) for word in fault.flags]
    if "--write_result" not in words and "surrogate" not in name:
        words += ["--write_result", rows]
    before = sorted(tmp_path.rglob("*"))
    run = run_generate(*words, path=path, prepare=partial(watched, tmp_path, fault.during, path))
    check_line(fault, path, run.code, run.stderr)
    assert run.stdout == ""
    assert rows.read_text() == HEADING
    assert set(tmp_path.rglob("*")) - set(before) == {tmp_path / "session"}
    assert left_of_session(int((tmp_path / "session").read_text())) == []


@pytest.mark.parametrize("name", ["st-truncated", "pth-code"])
def test_the_script_ends_as_the_rows_say(name: str, tmp_path: Path) -> None:
    fault = FAULT_IDS[name]
    path = broken(fault, tmp_path)
    command = [sys.executable, generate.__file__, "--checkpoint_path", path, *fault.flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    check_line(fault, path, done.returncode, done.stderr)
    assert not (tmp_path / "canary").exists()


EXACT = ("--dtype", "float32", "--temperature", "0", "--max_new_tokens", "4")


@pytest.mark.parametrize("prompt", ["nul \0", "\ufeffbom", "a\r\nb", "\ufffd"], ids=ascii)
def test_text_bytes_of_any_kind_but_surrogates_are_kept(prompt, run_generate, tmp_path) -> None:
    (tmp_path / "p.txt").write_bytes(prompt.encode())
    run = run_generate(*EXACT, "--prompt_file", tmp_path / "p.txt", "--json")
    assert run.code == 0
    assert run.document["texts"][0].startswith(prompt)
    assert run.row.prompt_len == 1 + len(prompt.encode())


def test_text_utf8_a_character_of_several_tokens_is_streamed_whole(run_generate, tmp_path) -> None:
    path = with_files(tmp_path / "model", weights=chain(ord("x"), *"🦙뷁".encode(), ord("!")))
    run = run_generate(*EXACT[:-1], "8", "--prompt", "x", path=path)
    assert (run.code, run.stdout) == (0, "x🦙뷁!\n")
    cut = run_generate(*EXACT[:-1], "6", "--prompt", "x", path=path)
    assert (cut.code, cut.stdout) == (0, "x🦙\ufffd\n")


def test_run_empty_an_end_token_at_once_gives_a_row_without_rates(run_generate, tmp_path) -> None:
    path = with_files(tmp_path / "model", weights=chain(ord("x"), 5))
    (path / "generation_config.json").write_text('{"eos_token_id": 5}')
    words = [*EXACT, "--prompt", "x", "--write_result", tmp_path / "rows.txt"]
    run = run_generate(*words, path=path)
    assert run.code == 0
    [row] = read_rows(tmp_path / "rows.txt")
    assert (row.new_tokens, row.decode_tok_s) == (1, None)


def test_run_nan_ends_with_1_and_keeps_the_rows_there_were(run_generate, tmp_path) -> None:
    weights = chain(ord("x"), 65)
    weights["model.norm.weight"][0] = torch.inf
    path = with_files(tmp_path / "model", weights=weights)
    rows = tmp_path / "rows.txt"
    rows.write_text(HEADING)
    run = run_generate(*EXACT, "--prompt", "x", "--write_result", rows, path=path)
    assert run.code == 1
    assert "non-finite logits" in run.error
    assert rows.read_text() == HEADING


def test_every_row_of_the_watch_is_seen(run_generate, tmp_path) -> None:
    for act in (run_a_program, write_elsewhere, connect):
        prepare = partial(acting, partial(watched, tmp_path), act)
        run = run_generate("--max_new_tokens", "1", prepare=prepare)
        assert run.code == 99, act
        assert run.stderr.startswith("FORBIDDEN "), shlex.quote(run.stderr)


def acting(watch: Callable[..., None], act: Callable[[], object]) -> None:
    watch(nothing, Path())
    act()


def run_a_program() -> None:
    os.system("true")


def write_elsewhere() -> None:
    Path("/tmp/kv-fast-canary").write_text("x")


def connect() -> None:
    import socket  # noqa: PLC0415

    socket.create_connection(("127.0.0.1", 9), timeout=1)
