"""A tokenizer is tried in a process of its own, so that its library can take none of ours along."""

import ctypes
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from test_request import byte_tokenizer

import tokenizer_trial
from config import UserError
from tokenizer_base import Tokenizer
from tokenizer_trial import tried_tokenizer

PATH = Path("model")


def encoding(encode: Callable[[str], list[int]]) -> Callable[[], Tokenizer]:
    return lambda: dataclasses.replace(byte_tokenizer(), encode_text=encode)


def crash(text: str) -> list[int]:
    ctypes.string_at(0)
    return []


def abort(text: str) -> list[int]:
    os.write(2, b"printed by a library")
    os.abort()


def spin(text: str) -> list[int]:
    while True:
        pass


def grow(text: str) -> list[int]:
    return [0] * (1 << 31)


def test_a_tokenizer_that_lives_is_given_back() -> None:
    tokenizer = tried_tokenizer(PATH, byte_tokenizer, "text")
    assert tokenizer is not None
    assert tokenizer.encode("a")[1:] == [ord("a")]
    assert tried_tokenizer(PATH, lambda: None, "text") is None


@pytest.mark.parametrize(
    ("encode", "cause"),
    [
        (crash, "SIGSEGV"),
        (abort, "SIGABRT"),
        (partial(lambda _, text: os.kill(os.getpid(), 9), 0), "SIGKILL"),
        (grow, "out of memory"),
    ],
    ids=["crash", "abort", "killed", "memory"],
)
def test_a_library_that_dies_is_one_line(
    encode: Callable[[str], list[int]], cause: str, capfd: pytest.CaptureFixture
) -> None:
    for read in (encoding(encode), lambda: encode("")):
        with pytest.raises(UserError) as caught:
            tried_tokenizer(PATH, read, "text")
        message = str(caught.value)
        assert message.startswith("model: its tokenizer ends the process")
        assert f"({cause})" in message
    assert capfd.readouterr() == ("", "")


def test_a_library_that_never_ends_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial, "CPU_S", 1)
    with pytest.raises(UserError, match="SIGXCPU"):
        tried_tokenizer(PATH, encoding(spin), "text")


def test_what_is_refused_is_refused_in_its_own_words() -> None:
    def refuse() -> Tokenizer:
        raise UserError("tokenizer.json: no")

    with pytest.raises(UserError, match="^tokenizer.json: no$"):
        tried_tokenizer(PATH, refuse, "text")
    assert tried_tokenizer(PATH, byte_tokenizer, "a\udcff") is not None  # the request refuses it


def test_a_signal_ends_the_trial_too() -> None:
    def interrupt() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        tried_tokenizer(PATH, encoding(spin), "text")
    assert os.waitpid(-1, 0)[1] == signal.SIGKILL
