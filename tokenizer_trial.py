"""Try a tokenizer in a process of its own first: a library that dies takes its process with it."""

import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from config import UserError
from tokenizer_base import Tokenizer

CPU_S = 10
TEXT_PER_S = 100_000  # characters; a tenth of what slow libraries manage
MEMORY_BYTES = 4 << 30  # beside what the process holds
OUT_OF_MEMORY = 3


def tried_tokenizer(
    path: Path, read: Callable[[], Tokenizer | None], text: str
) -> Tokenizer | None:
    """What `read` gives, once a copy of this process has read it and encoded `text` and lives.

    On Linux alone: elsewhere a copy of a process with libraries in it may die of being one.

    Args:
        path: of the checkpoint, for the message.
        read: opens the tokenizer.
        text: to be encoded.

    Raises:
        UserError: the library died, or took too much time or memory; or what `read` refuses.
    """
    if sys.platform == "linux" and (code := _exit_code_of_trial(read, text)):
        cause = "out of memory" if code > 0 else signal.Signals(-code).name
        raise UserError(
            f"{path}: its tokenizer ends the process that reads it or encodes the prompt ({cause});"
            " download the tokenizer again"
        )
    return read()


def _exit_code_of_trial(read: Callable[[], Tokenizer | None], text: str) -> int:
    """0: it lives; else as of subprocess, with OUT_OF_MEMORY."""
    child = os.fork()
    if child == 0:
        _try_and_exit(read, text)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:  # a signal: nobody waits for the answer
        os.kill(child, signal.SIGKILL)
        raise


def _try_and_exit(read: Callable[[], Tokenizer | None], text: str) -> None:
    """What the child does; it never returns, and says nothing."""
    code = 0  # of what it refuses the caller hears in its own process
    try:
        faulthandler.disable()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silence, stream)
        _limit(CPU_S + len(text) // TEXT_PER_S)
        if tokenizer := read():
            tokenizer.encode(text)
    except BaseException as error:
        if MemoryError in (type(error), type(error.__context__)):
            code = OUT_OF_MEMORY
    finally:
        os._exit(code)


def _limit(cpu_s: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: pages * resource.getpagesize() + MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit + 1))
