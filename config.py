"""Flags as frozen dataclasses, and the errors a user can cause. Imports no torch.

A command is one dataclass, one `flag` per field, and `sys.exit(run(main, ItsConfig))`; `run` is in
command.py.
"""

import argparse
import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args

CONTROLS = "\x00-\x1f\x7f-\x9f\u2028\u2029"  # for character classes: what may not stand in a row
NOT_IN_A_ROW = re.compile(f"[{CONTROLS}\ud800-\udfff]")
RANDOM_PREFIX = "random:"  # of a --checkpoint_path that names a shape instead of files
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}

C = TypeVar("C")
R = TypeVar("R")
MISSING = dataclasses.MISSING


class UserError(Exception):
    """A wrong request or file: one line naming the flag or file, the value and the cure. Exit 2.

    Several arguments are several faults, a line each.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)


class Faults:
    """Lets every check of a request run, so that all that is wrong is told at once."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def check(self, function: Callable[..., R], *args: Any) -> R | None:
        """What the function gives; None where it refuses, which is noted."""
        try:
            return function(*args)
        except UserError as error:
            self.causes += [cause for cause in error.args if cause not in self.causes]
            return None

    def refuse(self) -> None:
        """Raise one UserError with all that was noted; nothing happens where all was right."""
        if self.causes:
            raise UserError(*self.causes)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What a field's annotation and default cannot say about its flag."""

    help: str
    bare: str | None = None  # the value of the flag written alone; None: it needs a value
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    aliases: tuple[str, ...] = ()
    repro: bool = True  # part of the command that repeats a result
    positional: bool = False  # an argument without a name; always where there is no default


def flag(default: Any, **spec: Any) -> Any:
    """A dataclass field that is a flag; `spec` as in `Flag`.

    Without a default (`MISSING`) it is a positional argument.
    """
    return dataclasses.field(default=default, metadata={"flag": Flag(**spec)})


def plain_type(annotation: Any) -> Any:
    """`int` of `int`, of `int | None` and of `tuple[int, ...]`."""
    return next((kind for kind in get_args(annotation) if kind is not NoneType), annotation)


def printable(text: str, limit: int = 200) -> str:
    """Text from outside for a message: one line, no terminal escapes, cut at `limit` characters."""
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return escaped if len(escaped) <= limit else escaped[:limit] + "..."


def parse(cls: type[C], argv: Sequence[str]) -> C:
    """The config that `argv` asks for.

    Raises:
        UserError: naming the flag, its value and what is allowed.
    """
    for word in argv:
        if re.fullmatch(r"(--\w+=)?--", word):  # argparse of Python 3.11 would lose it
            raise UserError(f'{word}: "--" is not a value')
    known, unknown = _parser(cls).parse_known_args(argv)  # type: ignore[arg-type]
    if unknown:
        raise UserError(f"{printable(unknown[0])}: unknown flag; --help lists all")
    return cls(**vars(known))


def to_argv(config: Any) -> list[str]:
    """The non-default flags that change a result; `parse` gives the same config back."""
    words = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if item.metadata["flag"].repro and value != item.default:
            words += _words(item, value)
    return words


def repro_command(script: str, config: Any) -> str:
    """The shell line that repeats a run, as a row keeps it.

    What cannot stand in a row is shown escaped; `--write_result` refuses such a command.
    """
    words = [NOT_IN_A_ROW.sub(lambda m: repr(m[0])[1:-1], word) for word in to_argv(config)]
    return shlex.join(["python", script, *words])


def _words(item: dataclasses.Field, value: Any) -> list[str]:
    name, text = f"--{item.name}", str(value)
    if _is_positional(item):
        return [text]
    if isinstance(value, bool):
        return [name if value else f"--no-{item.name}"]
    if text == item.metadata["flag"].bare:
        return [name]
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def help_text(cls: type, name: str = "") -> str:
    """What --help prints; `name` is that of the command, where a program has several."""
    return _parser(cls, name).format_help()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(printable(message.removeprefix("argument ")))


@functools.cache
def _parser(cls: type, name: str = "") -> argparse.ArgumentParser:
    parser = _Parser(
        usage=" ".join(filter(None, ["python %(prog)s", name, *_positionals(cls), "[flags]"])),
        description=cls.__doc__,
        add_help=False,  # a --help inside a row's repro must not end the reader: see `run`
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, width=170, max_help_position=40
        ),
    )
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        names = [f"--{name}" for name in (item.name, *item.metadata["flag"].aliases)]
        parser.add_argument(*([item.name] if _is_positional(item) else names), **_argument(item))
    return parser


def _positionals(cls: type) -> list[str]:
    """As the line of usage has them."""
    found = [item for item in dataclasses.fields(cls) if _is_positional(item)]
    texts = [item.name.upper() for item in found]
    return [
        text if item.default is MISSING else f"[{text}]"
        for item, text in zip(found, texts, strict=True)
    ]


def _is_positional(item: dataclasses.Field) -> bool:
    return item.default is MISSING or item.metadata["flag"].positional


def _argument(item: dataclasses.Field) -> dict[str, Any]:
    """The keywords of argparse's `add_argument` for one field."""
    spec: Flag = item.metadata["flag"]
    details = [f"one of {', '.join(spec.choices)}"] if spec.choices else []
    if item.default not in (None, MISSING):
        details.append(f"default: {item.default}")
    text = spec.help + (f" ({'; '.join(details)})" if details else "")
    if plain_type(item.type) is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    keywords = {"type": functools.partial(_value, item), "help": text}
    is_positional = _is_positional(item)
    keywords["metavar"] = item.name.upper() if is_positional else METAVARS[plain_type(item.type)]
    if is_positional and item.default is not MISSING:
        keywords["nargs"] = "?"
    if spec.bare is not None:
        keywords |= {"nargs": "?", "const": spec.bare}
    return keywords


def _value(item: dataclasses.Field, text: str) -> Any:
    """A flag's value from its text, checked against its type, choices and range."""
    spec: Flag = item.metadata["flag"]
    kind = plain_type(item.type)
    where = f"{'--' * (not _is_positional(item))}{item.name} {printable(text)}"
    if kind is Path and not text:  # it would be the current folder
        raise UserError(f"{where}: names nothing; give a path")
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"{where}: must be a {'whole ' * (kind is int)}number") from None
    if spec.choices and value not in spec.choices:
        raise UserError(f"{where}: must be one of {', '.join(spec.choices)}")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{where}: must be a finite number")
    if spec.minimum is not None and value < spec.minimum:
        raise UserError(f"{where}: must be at least {spec.minimum}")
    if spec.maximum is not None and value > spec.maximum:
        raise UserError(f"{where}: must be at most {spec.maximum}")
    return value


def check_one_line(config: Any, cure: str) -> None:
    """Refuse what cannot stand in the repro of a row, which is one line of UTF-8."""
    for word in to_argv(config):
        if found := NOT_IN_A_ROW.search(word):
            raise UserError(
                f"{printable(word, 60)}: {found[0]!r} cannot be written to the --write_result row;"
                f" {cure}"
            )


def describe(error: BaseException) -> str:
    """One line about an error, as it stands on stderr, in `--json` and in a row.

    A line for each fault of a UserError.
    """
    if isinstance(error, UserError):
        return "\n".join(printable(cause, limit=1000) for cause in error.args)
    if isinstance(error, KeyboardInterrupt):
        return printable(str(error))
    name = type(error).__name__
    first_line = str(error).strip().partition("\n")[0]
    return f"{name}: {printable(first_line)}" if first_line else name
