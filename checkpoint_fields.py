"""Settings out of a checkpoint's files, by key; what is missing or senseless is refused by name."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from config import UserError, describe, printable
from model_config import ModelConfig
from plain_files import DamagedFile
from strict_json import json_object

log = logging.getLogger("kv_fast")

COMPLETE = "complete the download, or take another checkpoint"


@contextmanager
def refusing(file: Path, errors: tuple[type[Exception], ...], cure: str) -> Iterator[None]:
    """Turn a library's complaint about `file` into one line for the user."""
    try:
        yield
    except errors as error:
        is_ours = isinstance(error, DamagedFile)
        cause = printable(str(error), limit=400) if is_ours else describe(error)
        raise UserError(f"{file}: {cause}; {cure}") from error


class Fields:
    """Settings read from one file, by key; a missing or senseless one is refused by name."""

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values

    @classmethod
    def from_json(cls, file: Path) -> "Fields":
        with refusing(file, (OSError, DamagedFile), COMPLETE):
            return cls(file, parse_object(file.read_bytes()))

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; null counts as missing."""
        value = self.values.get(key)
        return default if value is None else value

    def section(self, key: str) -> "Fields | None":
        """The object under `key`; None when it is missing or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "an object is needed")
        return None if value is None else Fields(self.file, value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, "a whole number above 0 is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(key, "a number above 0 is needed")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false is needed")
        return value

    def require(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings with which the forward pass would be another; missing ones are right.

        Raises:
            UserError: all that are not as in `settings`, a line each.
        """
        cause = "the model would differ; take another checkpoint"
        found = [key for key, value in settings.items() if self.get(key, value) != value]
        if found:
            raise UserError(*(str(self.error(key, cause)) for key in found))

    def within_window(self, length: int, key: str, default: int | None = None) -> int:
        """The context up to which attention is exact, with a note where the window shortens it.

        No token attends past a sliding window, so that a context within it is the same with and
        without it.

        Args:
            length: the context by itself.
            key: of the window, in tokens that a query sees, itself included; null there: none.
            default: where the file has no such key; None: no window.
        """
        if self.values.get(key, default) is None:
            return length
        window = self.integer(key, default)
        if window >= length:
            return length
        log.info("%s: %s %d: the context of %d ends there", self.file, key, window, length)
        return window

    def error(self, key: str, cause: str) -> UserError:
        found = f"is {printable(repr(self.values[key]))}" if key in self.values else "is missing"
        return UserError(f"{self.file}: {key} {found}; {cause}")

    def model_config(self, **settings: Any) -> ModelConfig:
        try:
            return ModelConfig(**settings)
        except ValueError as error:
            raise UserError(f"{self.file}: {error}; take another checkpoint") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """`json_object` of a part of a file that is checked as a whole: refuses with DamagedFile."""
    try:
        return json_object(data)
    except ValueError as error:
        raise DamagedFile(str(error)) from error
