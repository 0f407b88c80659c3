"""Run sections of measurements, or two commands in turns: a process and a row for each case.

    python scripts/sweep.py run [SECTION ...] [FLAGS] [-- FLAGS OF EVERY CASE]
    python scripts/sweep.py ab [FLAGS] -- FLAGS_A -- FLAGS_B

`sh benchmarks.sh` is the first. Cases run in processes of their own; this one imports no torch,
uses no GPU and does nothing while a case runs.
"""

import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import Command, run_one_of  # noqa: E402
from config import UserError  # noqa: E402
from scripts.sweep_ab import run_pairs  # noqa: E402
from scripts.sweep_config import AbConfig, RunConfig, with_environment  # noqa: E402
from scripts.sweep_run import run_sweep  # noqa: E402


def split(argv: Sequence[str]) -> list[list[str]]:
    """The words before, between and after every "--"."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def joined(words: Sequence[str]) -> list[str]:
    """The words of `run` with the names of sections, which come first, as one."""
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    return [*([",".join(names)] if names else []), *words[len(names) :]]


def run_sections(parts: Sequence[Sequence[str]], config: RunConfig) -> int:
    """`run`, with what stands behind "--"."""
    if len(parts) > 1:
        raise UserError('run: one "--" alone, in front of the flags of every case')
    return run_sweep(with_environment(config, os.environ), *parts)


def run_commands(parts: Sequence[Sequence[str]], config: AbConfig) -> int:
    """`ab`, with what stands behind each "--"."""
    return run_pairs(with_environment(config, os.environ), parts)


def main(argv: Sequence[str]) -> int:
    words, *parts = split(argv)
    commands: dict[str, Command] = {
        "run": (partial(run_sections, parts), RunConfig),
        "ab": (partial(run_commands, parts), AbConfig),
    }
    return run_one_of(commands, [*words[:1], *joined(words[1:])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
