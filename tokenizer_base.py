"""What every kind of tokenizer has in common: text in, ids out, and ids back to text as they come.

Every token id stands for some bytes, so the text of ids is those bytes decoded as UTF-8. That is
what makes streaming exact and cheap for all kinds alike.
"""

import codecs
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

from chat_template import ChatTemplate, Message
from config import UserError, describe

END_MARKERS = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>")
)


@contextmanager
def reading(source: Path | str) -> Iterator[None]:
    """Turn whatever a tokenizer library makes of a damaged file into one line naming it."""
    try:
        with _native_stderr_hidden():
            yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise UserError(f"{source}: {describe(error)}; download the tokenizer again") from None


@contextmanager
def _native_stderr_hidden() -> Iterator[None]:
    """A panic in Rust prints itself before Python hears of it; nothing of ours prints meanwhile."""
    stderr_fd = 2
    try:
        kept = os.dup(stderr_fd)
    except OSError:  # stderr is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as hidden:  # noqa: PTH123
            os.dup2(hidden.fileno(), stderr_fd)
            yield
    finally:
        os.dup2(kept, stderr_fd)
        os.close(kept)


class TextStream:
    """The text of tokens that arrive one by one; each push costs the same, however long the text.

    Pieces and flush joined are `decode(prompt_ids + new_ids)` without `decode(prompt_ids)`. Where
    the prompt ends inside a character, that character is printed whole once its rest arrives.
    """

    def __init__(self, pieces: list[bytes], strips_leading_space: bool) -> None:
        self._pieces = pieces
        self._strips_next_space = strips_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this token: '' inside a character or for a control."""
        piece = self._pieces[token_id]
        if piece and self._strips_next_space:
            piece = piece.removeprefix(b" ")
            self._strips_next_space = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What a character cut by the end leaves: '' or U+FFFD."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class Tokenizer:
    """One checkpoint's tokenizer, whatever kind of file it came from.

    Attributes:
        encode_text: ids of a text by the library; special tokens in it are ordinary text.
        pieces: the bytes each id prints; b"" for `special_ids`.
        bos_id: put before every prompt; None when this checkpoint wants none.
        stop_ids: the ids that end a text, from every place where the checkpoint names one.
        special_ids: control tokens, the unknown token and ids without one: never shown.
        strips_leading_space: the first blank of a text was added by `encode_text`.
        control_ids: text of a control token -> its id, where a chat template writes one.
        encode_after_control: `encode_text` for text behind a control token; None: the same.
        chat_template: None where the checkpoint brings none.
        source: the file, for messages.
    """

    encode_text: Callable[[str], list[int]]
    pieces: list[bytes]
    bos_id: int | None
    stop_ids: frozenset[int]
    special_ids: frozenset[int]
    strips_leading_space: bool
    control_ids: Mapping[str, int] = field(default_factory=dict)
    encode_after_control: Callable[[str], list[int]] | None = None
    chat_template: ChatTemplate | None = None
    source: str = "tokenizer"

    @property
    def vocab_size(self) -> int:
        """How many ids decode; a model's embedding may be padded beyond it."""
        return len(self.pieces)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids of `text` after exactly one BOS where the checkpoint wants one.

        Args:
            text: without its own BOS, unless control tokens are parsed.
            parse_special: the text of a control token is that token.

        Raises:
            UserError: the text holds bytes that are not UTF-8 (lone surrogates in Python).
        """
        check_text(text)
        parts = self._control_pattern().split(text) if parse_special else [text]
        with reading(self.source):
            return self._behind_bos(self._encode_parts(parts))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the assistant begins.

        Control tokens are those that the template writes; their text inside a message stays text.
        BOS stands in front once where the checkpoint wants one, whether or not the template
        writes it.

        Raises:
            UserError: the checkpoint has no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise UserError("--chat: the checkpoint has no chat template; leave the flag out")
        texts = [message["content"] for message in messages]
        for text in texts:
            check_text(text)
        mark = unused_character([*texts, self.chat_template.text])
        control = self._control_pattern()
        # The mark breaks the text of a control token, so that the rendered text has no such token.
        safe = [control.sub(lambda m: m[0][0] + mark + m[0][1:], text) for text in texts]
        rendered = self.chat_template.render(
            [{**message, "content": text} for message, text in zip(messages, safe, strict=True)]
        )
        parts = [part.replace(mark, "") for part in control.split(rendered)]
        with reading(self.source):
            return self._behind_bos(self._encode_parts(parts))

    def _behind_bos(self, ids: list[int]) -> list[int]:
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _control_pattern(self) -> re.Pattern[str]:
        """Matches the text of a control token, the longest first; nothing where there are none."""
        texts = sorted(self.control_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def _encode_parts(self, parts: Sequence[str]) -> list[int]:
        """The ids of ordinary text and control tokens in turns."""
        ids = []
        encode = self.encode_text
        for text, control in itertools.zip_longest(parts[::2], parts[1::2], fillvalue=""):
            ids += encode(text) if text else []
            ids += [self.control_ids[control]] if control else []
            encode = self.encode_after_control or encode
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without control tokens; bytes that are no UTF-8 give U+FFFD."""
        stream = TextStream(self.pieces, self.strips_leading_space)
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def stream(self, prompt_ids: Iterable[int] = ()) -> TextStream:
        """A stream that continues the text of `prompt_ids`."""
        stream = TextStream(self.pieces, self.strips_leading_space)
        for token_id in prompt_ids:
            stream.push(token_id)
        return stream


def check_text(text: str) -> None:
    """Refuse what is no UTF-8: lone surrogates in Python."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt: character {error.start} is no valid text; pass the prompt as UTF-8"
        ) from None


def unused_character(texts: Sequence[str]) -> str:
    """A character that occurs in none of the texts, of those that Unicode leaves to everybody.

    Raises:
        UserError: all of them do.
    """
    used = set().union(*texts)
    for code in itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)):
        if chr(code) not in used:
            return chr(code)
    raise UserError("--chat: prompt and template use all private characters; leave some out")


def control_texts(names: Sequence[str], special_ids: Iterable[int]) -> dict[str, int]:
    """The text of each control token, and its id; ids without a token have none."""
    return {names[i]: i for i in special_ids if names[i]}


def all_stop_ids(
    names: Sequence[str], special_ids: frozenset[int], declared: Iterable[int]
) -> frozenset[int]:
    """The declared end ids, and the control tokens whose text is a known end marker."""
    return frozenset(declared) | {i for i in special_ids if names[i] in END_MARKERS}


def piece_from_byte_level(token: str) -> bytes:
    """The bytes of a token written in GPT-2's alphabet, which has a visible character per byte."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def piece_from_sentencepiece(token: str) -> bytes:
    """The bytes of a SentencePiece token: `▁` is a blank, `<0xEA>` a single byte."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(match[1])
    return token.replace("▁", " ").encode()


def quoted(value: object) -> str:
    """A value from a file as one short printable line, for messages."""
    return repr(value)[:200]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: bytes that print stand for themselves, the rest follow from U+0100 on."""
    alphabet = set(ByteLevel.alphabet())
    printable = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
