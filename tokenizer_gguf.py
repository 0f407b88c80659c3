"""The tokenizer inside a GGUF file, rebuilt from its metadata for the library of its kind.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Where a key is
absent, llama.cpp's default for that kind holds.
"""

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from chat_template import ChatTemplate
from config import UserError
from tokenizer import LLAMA3_WORDS, sentencepiece_tokenizer
from tokenizer_base import (
    Tokenizer,
    all_stop_ids,
    control_texts,
    piece_from_byte_level,
    quoted,
)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> the patterns that cut text into words, one after the other, as in
# llama.cpp's src/llama-vocab.cpp.
WORDS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_WORDS,),
    "llama-bpe": (LLAMA3_WORDS,),
    "llama3": (LLAMA3_WORDS,),
    "qwen2": (LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "smollm": (r"\p{N}", GPT2_WORDS),
}
# Those that want a BOS by default and take a word that is a token whole, without its merges.
LLAMA3_NAMES = ("llama-bpe", "llama3")

TEMPLATE_KEY = "tokenizer.chat_template"
# The part of a key before _token_id -> what a chat template calls that token.
TOKEN_KEYS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}

# tokenizer.ggml.token_type; SentencePiece has the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TOKEN_TYPES = {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}


def gguf_tokenizer(fields: Mapping[str, Any], file: str = "GGUF metadata") -> Tokenizer:
    """The tokenizer that GGUF metadata describes.

    Args:
        fields: the file's `tokenizer.*` keys with plain Python values.
        file: for messages about the chat template.

    Raises:
        UserError: a key is missing or inconsistent, or names a kind that is not supported.
    """
    kind = _required(fields, "model")
    if kind not in READERS:
        raise UserError(f"tokenizer.ggml.model: {quoted(kind)}; supported: {', '.join(READERS)}")
    names, types = _required(fields, "tokens"), _required(fields, "token_type")
    if len(types) != len(names) or not TOKEN_TYPES.issuperset(types):
        raise UserError(
            f"tokenizer.ggml.token_type: {len(types)} types {quoted(sorted(set(types)))} for "
            f"{len(names)} tokens; download the file again"
        )
    tokenizer = READERS[kind](fields)
    return dataclasses.replace(tokenizer, chat_template=_chat_template(fields, file), source=file)


def _byte_level_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Model `gpt2`: byte-level BPE. Control tokens stay out of the library: no text gives them."""
    names, types = _required(fields, "tokens"), _required(fields, "token_type")
    rule = fields.get("tokenizer.ggml.pre", "default")
    if rule not in WORDS:
        raise UserError(f"tokenizer.ggml.pre: {quoted(rule)}; supported: {', '.join(WORDS)}")
    special_ids = frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL))
    vocab = {name: i for i, name in enumerate(names) if i not in special_ids}
    merges = [tuple(merge.split(" ")) for merge in _required(fields, "merges")]
    is_llama3 = rule in LLAMA3_NAMES
    try:
        library = tokenizers.Tokenizer(BPE(vocab, merges, ignore_merges=is_llama3))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"tokenizer.ggml.merges: {quoted(str(error))}; download the file again"
        ) from None
    library.pre_tokenizer = _word_splitter(rule)
    user_defined = [name for name, kind in zip(names, types, strict=True) if kind == USER_DEFINED]
    library.add_tokens([AddedToken(name, normalized=False) for name in user_defined])
    return Tokenizer(
        encode_text=lambda text: library.encode(text).ids,
        pieces=[b"" if i in special_ids else piece_from_byte_level(n) for i, n in enumerate(names)],
        bos_id=_bos_id(fields, wanted_by_default=is_llama3),
        stop_ids=all_stop_ids(names, special_ids, _declared_stop_ids(fields)),
        special_ids=special_ids,
        strips_leading_space=False,
        control_ids=control_texts(names, special_ids),
    )


def _word_splitter(rule: str) -> PreTokenizer:
    splits = [Split(Regex(pattern), behavior="isolated") for pattern in WORDS[rule]]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Model `llama`: the SentencePiece model the file was made from, put together again."""
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=_sentencepiece_model(fields))
    except RuntimeError as error:
        raise UserError(f"tokenizer.ggml.tokens: {quoted(str(error))}; download again") from None
    bos_id = _bos_id(fields, wanted_by_default=True)
    names = _required(fields, "tokens")
    return sentencepiece_tokenizer(library, names, bos_id, _declared_stop_ids(fields))


def _sentencepiece_model(fields: Mapping[str, Any]) -> bytes:
    """A SentencePiece ModelProto: the pieces, BPE with byte fallback, text as it is but a prefix.

    Field numbers: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
    """
    names, types = _required(fields, "tokens"), _required(fields, "token_type")
    scores = _required(fields, "scores")
    if len(scores) != len(names):
        raise UserError(
            f"tokenizer.ggml.scores: {len(scores)} scores for {len(names)} tokens; "
            "download the file again"
        )
    pieces = b"".join(
        _message(1, _message(1, name.encode()) + b"\x15" + struct.pack("<f", score) + _int(3, kind))
        for name, score, kind in zip(names, scores, types, strict=True)
    )
    bpe = 2
    trainer = _int(3, bpe) + _int(35, True)
    adds_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    removes_blanks = fields.get("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = _int(3, adds_prefix) + _int(4, removes_blanks)
    return pieces + _message(2, trainer) + _message(3, normalizer)


def _message(field: int, payload: bytes) -> bytes:
    """A protobuf field of bytes."""
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


def _int(field: int, value: int) -> bytes:
    """A protobuf field of an integer."""
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """7 bits per byte, the lowest first; the top bit says that more follow."""
    if value < 0x80:
        return bytes([value])
    return bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _bos_id(fields: Mapping[str, Any], wanted_by_default: bool) -> int | None:
    wanted = fields.get("tokenizer.ggml.add_bos_token", wanted_by_default)
    if type(wanted) is not bool:
        raise _error(fields, "add_bos_token", "true or false is needed")
    if not wanted:
        return None
    bos_id = _required(fields, "bos_token_id")
    if type(bos_id) is not int or not 0 <= bos_id < len(_required(fields, "tokens")):
        raise _error(fields, "bos_token_id", "the id of a token is needed")
    return bos_id


def _declared_stop_ids(fields: Mapping[str, Any]) -> list[int]:
    ends = [f"{end}_token_id" for end in ("eos", "eot", "eom")]
    values = {end: fields.get(f"tokenizer.ggml.{end}") for end in ends}
    declared = {end: value for end, value in values.items() if value is not None}
    for name, value in declared.items():
        if type(value) is not int:
            raise _error(fields, name, "the id of a token is needed")
    return list(declared.values())


def _chat_template(fields: Mapping[str, Any], file: str) -> ChatTemplate | None:
    """The template under its key, with the texts of the tokens that it may name."""
    text = fields.get(TEMPLATE_KEY)
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(f"{TEMPLATE_KEY}: is {quoted(text)}; the text of a template is needed")
    names = _required(fields, "tokens")
    ids = {token: fields.get(f"tokenizer.ggml.{key}_token_id") for key, token in TOKEN_KEYS.items()}
    known = range(len(names))
    tokens = {token: names[i] for token, i in ids.items() if i in known}
    return ChatTemplate(f"{file}: {TEMPLATE_KEY}", text, tokens)


def _error(fields: Mapping[str, Any], name: str, cure: str) -> UserError:
    key = f"tokenizer.ggml.{name}"
    return UserError(f"{key}: is {quoted(fields.get(key))}; {cure}")


def _required(fields: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in fields:
        raise UserError(f"{key}: missing in the GGUF file; use a file with its tokenizer inside")
    return fields[key]


READERS = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer}
