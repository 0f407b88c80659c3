"""The programs that write rows, and what the command of a row asks for. Imports no torch."""

import shlex

from config import UserError, parse, printable
from eval_config import EvalConfig
from generate_config import GenerateConfig

PROGRAMS: dict[str, type] = {"generate.py": GenerateConfig, "eval.py": EvalConfig}


def config_of(repro: str) -> GenerateConfig | EvalConfig:
    """The request that the command of a row makes.

    Raises:
        UserError: it is no command of PROGRAMS.
        ValueError: it is not even a command line.
    """
    program, *words = shlex.split(repro)[1:] or [""]
    if program not in PROGRAMS:
        raise UserError(f"{printable(program)!r} writes no rows; known: {', '.join(PROGRAMS)}")
    return parse(PROGRAMS[program], words)
