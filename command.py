"""Run one command: its exit code, its last line, what signals do. Imports no torch.

A command ends with `sys.exit(run(main, ItsConfig))`.
"""

import contextlib
import io
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from config import UserError, describe, help_text, parse, printable

STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. Exit 143."""


Command = tuple[Callable[[Any], int | None], type]
"""What runs, and the dataclass of its flags."""

OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "std::bad_alloc")
"""Words of errors, of which torch has no class of its own on the CPU."""

EXIT_CODES = ((UserError, 2), (Terminated, 143), (KeyboardInterrupt, 130), (Exception, 1))


def failure(error: BaseException) -> dict[str, str]:
    """The part of a `--json` document that says how a run ended."""
    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
    return {"status": status, "error": describe(error)}


def says_out_of_memory(words: str) -> bool:
    """Whether an error, described in words, is that memory was refused."""
    return any(word in words for word in OUT_OF_MEMORY)


def exit_code(error: BaseException) -> int:
    """2, 143, 130 or 1, as `EXIT_CODES` says."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def run(
    main: Callable[[Any], int | None],
    cls: type,
    argv: Sequence[str] | None = None,
    name: str = "",
) -> int:
    """Run one command and give its exit code; the last thing a process does.

    `main(config)` returns an exit code or None (0). What it raises becomes one line on stderr, and
    with `--json` the one document on stdout: so it raises before it prints its own. SIGINT, SIGTERM
    and SIGHUP reach it as KeyboardInterrupt. Logging and signal handlers stay as set here.

    Args:
        name: of the command, where a program has several.
    """
    argv = sys.argv[1:] if argv is None else argv
    _open_streams()
    notes = logging.StreamHandler()
    notes.setFormatter(_NoteFormatter("%(message)s"))
    logging.basicConfig(handlers=[notes])
    logging.getLogger("kv_fast").setLevel(logging.INFO)
    _raise_on_signals()
    document = ""
    try:
        wants_help = "-h" in argv or "--help" in argv
        code = (print(help_text(cls, name)) if wants_help else main(parse(cls, argv))) or 0
        print(end="", flush=True)
    except BrokenPipeError:
        code = 1
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if "--debug" in argv:
            traceback.print_exception(error)
        document = _last_words(error, argv)
    _finish_stdout(document)
    return code


def run_one_of(commands: Mapping[str, Command], argv: Sequence[str] | None = None) -> int:
    """As `run`, of a program whose first argument names one of its commands."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in commands:
        main, cls = commands[name]
        return run(main, cls, rest, name)
    _open_streams()
    lines = [f"  {name:10} {cls.__doc__}" for name, (_, cls) in commands.items()]
    listed = "\n".join(["Commands; each has a --help of its own:", *lines])
    if name in ("-h", "--help"):
        _finish_stdout(listed + "\n")
        return 0
    asked = f"{printable(name)}: no such command" if name else "no command given"
    with contextlib.suppress(OSError):
        print(f"error: {asked}; known: {', '.join(commands)}", file=sys.stderr, flush=True)
    return 2


@contextlib.contextmanager
def notes_held() -> Iterator[None]:
    """Keep what is logged until a request was found right: a refusal stands alone on stderr."""
    logger = logging.getLogger("kv_fast")
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield
    except UserError:
        held.clear()
        raise
    finally:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)


class _NoteFormatter(logging.Formatter):
    """Keeps a path in a note on its line, whatever its name holds."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            record.args = tuple(
                printable(str(each), limit=1000) if isinstance(each, Path) else each
                for each in record.args
            )
        return super().format(record)


def _open_streams() -> None:
    """Make stdout and stderr usable: closed ones swallow all, and no character ends a run."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  (for the rest of the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="replace")


def _last_words(error: BaseException, argv: Sequence[str]) -> str:
    """Say on stderr how a run ended; gives what `--json` wants on stdout."""
    words = failure(error)
    with contextlib.suppress(OSError):
        for line in words["error"].splitlines() or [""]:
            print(f"{words['status']}: {line}", file=sys.stderr, flush=True)
    return json.dumps(words) + "\n" if "--json" in argv else ""


def end_on_signals() -> None:
    """Let a signal end the process with its one line until `run` takes over: nothing is begun.

    For a command before it imports torch, which takes a second: out there an exception would be a
    traceback, or an error of whatever is being imported.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        error = _interruption(number)
        _finish_stdout(_last_words(error, sys.argv[1:]))
        os._exit(exit_code(error))

    _open_streams()
    _on_signals(end)


def _raise_on_signals() -> None:
    """Make the first signal an exception; a second one ends the process, native code or not."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        raise _interruption(number)

    _on_signals(stop)


def _on_signals(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, handler)


def _interruption(number: int) -> KeyboardInterrupt:
    name = signal.Signals(number).name
    return KeyboardInterrupt(name) if number == signal.SIGINT else Terminated(name)


def _finish_stdout(document: str) -> None:
    """Write the last words; if nobody reads, send them and what is buffered to the null device.

    Source: https://docs.python.org/3/library/signal.html#note-on-sigpipe.
    """
    try:
        print(document, end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
