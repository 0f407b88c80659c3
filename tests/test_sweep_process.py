"""A case as a process: how it ended, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import sweep_process
from scripts.sweep_process import oom_kills, run_case

LEAVES_ONE = 'sleep 60 & echo $! > {pid}; printf \'{{"status": "ok"}}\'; {end}'
STUBBORN = "trap '' TERM; while :; do sleep 0.05; done"


@pytest.fixture
def run(tmp_path):
    """Runs a shell command as a case."""

    def start(code: str, timeout_s: float = 20):
        with (tmp_path / "lock").open("w") as lock:
            return run_case(["sh", "-c", code], tmp_path / "a.log", timeout_s, lock.fileno())

    return start


def is_alive(pid: int) -> bool:
    """Running, and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_the_document_and_the_log_are_kept_beside_each_other(run, tmp_path):
    ended = run('echo a note >&2; printf \'{"status": "ok", "n": 1}\'')
    assert (ended.status, ended.error, ended.document) == ("ok", None, {"status": "ok", "n": 1})
    assert (tmp_path / "a.log").read_text() == "a note\n"
    assert (tmp_path / "a.json").read_text() == '{"status": "ok", "n": 1}'


@pytest.mark.parametrize("end", ["exit 0", "exit 1", "kill -KILL $$", "sleep 60"])
def test_nothing_of_a_case_lives_on_however_it_ends(end, run, tmp_path):
    run(LEAVES_ONE.format(pid=tmp_path / "pid", end=end), timeout_s=1)
    left = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_alive(left))


def test_what_does_not_end_when_asked_is_killed(run, monkeypatch):
    monkeypatch.setattr(sweep_process, "GRACE_S", 0.2)
    ended = run(STUBBORN, timeout_s=0.3)
    assert (ended.status, ended.error) == ("timeout", "run: TimeoutExpired: ended after 0 s")


def test_what_ends_when_asked_has_the_time_to_say_so(run):
    code = 'trap \'printf "{\\"status\\": \\"interrupted\\"}"; exit 143\' TERM; sleep 0.2 & wait'
    ended = run(f"{code}; sleep 60", timeout_s=0.1)
    assert (ended.status, ended.document) == ("timeout", {"status": "interrupted"})


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("kill -KILL $$", "error", "ended by SIGKILL: no word"),
        ("kill -40 $$", "error", "ended by signal 40: no word"),
        ("echo ' the cause ' >&2; echo >&2; exit 3", "error", "exit code 3:  the cause "),
        ("printf '[1]'; exit 1", "error", "exit code 1: no word"),
        ("printf '{\"status\": '; exit 1", "error", "exit code 1: no word"),
        ('printf \'{"status": "error", "error": "MemoryError"}\'; exit 1', "oom", "MemoryError"),
        (
            'printf \'{"status": "interrupted", "error": "SIGTERM"}\'; exit 143',
            "interrupted",
            "SIGTERM",
        ),
        (
            'printf \'{"status": "error", "error": "RuntimeError: DefaultCPUAllocator:'
            " can'\"'\"'t allocate memory\"}'; exit 1",
            "oom",
            "RuntimeError: DefaultCPUAllocator: can't allocate memory",
        ),
    ],
)
def test_how_a_case_failed_is_told(code, status, error, run):
    ended = run(code)
    assert (ended.status, ended.error) == (status, error)


def test_a_kill_for_want_of_memory_is_told_from_another(run, monkeypatch):
    counts = iter([3, 4])
    monkeypatch.setattr(sweep_process, "oom_kills", lambda: next(counts))
    ended = run("kill -KILL $$")
    assert ended.status == "oom"
    assert "killed by the system, which ran out of memory" in ended.error
    assert oom_kills() >= 0


def test_a_case_reads_nothing_and_holds_the_lock(run, tmp_path):
    run(
        "cat > seen; ls -l /proc/$$/fd > fds".replace("seen", str(tmp_path / "seen")).replace(
            "fds", str(tmp_path / "fds")
        )
    )
    assert (tmp_path / "seen").read_text() == ""
    if sys.platform == "linux":
        assert str(tmp_path / "lock") in (tmp_path / "fds").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only there a child dies with its parent")
def test_a_case_dies_with_its_sweep(tmp_path):
    code = f"""
from pathlib import Path
from scripts.sweep_process import run_case
command = ["sh", "-c", "echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 60"]
run_case(command, Path("{tmp_path}/a.log"), 60, 0)
"""
    root = Path(sweep_process.__file__).parent.parent
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root)
    try:
        assert wait_until((tmp_path / "pid").exists)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    case = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_alive(case))
    assert not os.path.exists(f"/proc/{case}/exe")  # noqa: PTH110
