"""The tokenizer of a Hugging Face or Meta folder, found and read.

Encoding is left to the library the file was made for (tokenizers, sentencepiece, tiktoken),
decoding is `tokenizer_base.py`'s. The vocabulary inside a GGUF file: `tokenizer_gguf.py`.
"""

import base64
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
import tokenizers

from chat_template import LLAMA2_CHAT, LLAMA3_CHAT, ChatTemplate
from config import UserError
from plain_files import is_given
from tokenizer_base import (
    Tokenizer,
    all_stop_ids,
    control_texts,
    piece_from_byte_level,
    piece_from_sentencepiece,
    quoted,
    reading,
)
from tokenizer_files import (
    MOST_GAPS,
    SideFile,
    added_tokens,
    chat_template_of,
    declared_stop_ids,
    may_add_bos,
    read_json,
)

# How Llama 3 cuts text into words: meta-llama/llama-models, models/llama3/tokenizer.py.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The 256 control tokens that follow the ranks; same source.
LLAMA3_CONTROL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
]


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face or Meta folder.

    tokenizer.json is preferred to tokenizer.model, except in a Meta folder (params.json and no
    config.json), whose weights came with the latter. What kind of file a tokenizer.model is
    (SentencePiece or tiktoken) is found from its content.

    Raises:
        UserError: no tokenizer file, or one that cannot be read.
    """
    readers = {"tokenizer.json": _read_tokenizer_json, "tokenizer.model": _read_tokenizer_model}
    for name in reversed(readers) if is_meta(folder) else readers:
        if is_given(folder / name):
            with reading(folder / name):
                return replace(readers[name](folder), source=str(folder / name))
    raise UserError(f"{folder}: no tokenizer.json and no tokenizer.model; copy either one there")


def is_meta(folder: Path) -> bool:
    return is_given(folder / "params.json") and not is_given(folder / "config.json")


def _read_tokenizer_json(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    piece_bytes, strips_leading_space = _decoding(path)
    library = _load_library(path, path.read_text(encoding="utf-8"))
    ids = library.get_vocab()
    if not ids or max(ids.values()) > MOST_GAPS + len(ids):
        largest = max(ids.values(), default=0)
        raise UserError(f"{path}: {len(ids)} tokens, ids up to {largest}; download it again")
    names = [""] * (max(ids.values()) + 1)
    for name, token_id in ids.items():
        names[token_id] = name
    control = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
    special_ids = frozenset(control | {i for i, name in enumerate(names) if not name})
    return Tokenizer(
        encode_text=_encoder(library),
        pieces=[b"" if i in special_ids else piece_bytes(name) for i, name in enumerate(names)],
        bos_id=_bos_of_tokenizer_json(folder, library),
        stop_ids=all_stop_ids(names, special_ids, declared_stop_ids(folder, ids)),
        special_ids=special_ids,
        strips_leading_space=strips_leading_space,
        control_ids=control_texts(names, special_ids),
        encode_after_control=_encoder_after_control(path),
        chat_template=chat_template_of(folder),
    )


def _load_library(path: Path, text: str) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: {quoted(str(error))}; download it again") from None
    check_added_ids(path, library)
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None):  # of training: the ids of a text would be random
        library.model.dropout = None
    library.encode_special_tokens = True  # their text in a prompt is ordinary text
    return library


def check_added_ids(path: Path, library: tokenizers.Tokenizer) -> None:
    """Refuse added tokens whose id the library replaces by the next one that is free."""
    for token in read_json(path).get("added_tokens") or []:
        found = library.token_to_id(token["content"])
        if found is not None and found != token["id"]:
            cause = f"{quoted(token['content'])} has id {token['id']}, its library gives it {found}"
            raise UserError(f"{path}: added_tokens: {cause}; number them without gaps")


def _encoder(library: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: library.encode(text, add_special_tokens=False).ids


def _encoder_after_control(path: Path) -> Callable[[str], list[int]] | None:
    """Metaspace puts a blank before the `first` word alone: behind a control token it is none."""
    text = path.read_text(encoding="utf-8")
    never = re.sub('("prepend_scheme": *)"first"', r'\1"never"', text)
    return None if never == text else _encoder(_load_library(path, never))


def _decoding(path: Path) -> tuple[Callable[[str], bytes], bool]:
    """How a tokenizer.json turns a token into bytes, and whether the first blank is dropped."""
    decoder = read_json(path).get("decoder") or {}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if "type" in step}
    if steps.keys() == {"ByteLevel"}:
        return piece_from_byte_level, False
    is_known = all(_is_known_step(step) for step in steps.values())
    if is_known and not steps.keys().isdisjoint(("ByteFallback", "Metaspace")):
        strips = steps.get("Strip", {}).get("start", 0) > 0
        prepends = steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        return piece_from_sentencepiece, strips or prepends
    raise UserError(
        f"{path}: decoder {quoted(decoder)}; ByteLevel, or ByteFallback or Metaspace as of"
        " SentencePiece needed"
    )


def _is_known_step(step: dict[str, Any]) -> bool:
    """Whether a step of a decoder is part of what `piece_from_sentencepiece` and a strip do."""
    settings = {key: value for key, value in step.items() if key != "type"}
    if step["type"] == "Replace":
        return settings == {"pattern": {"String": "▁"}, "content": " "}
    if step["type"] == "Strip":
        return settings in ({"content": " ", "start": n, "stop": 0} for n in (0, 1))
    if step["type"] == "Metaspace":
        return settings.get("replacement", "▁") == "▁"
    return step["type"] in ("ByteFallback", "Fuse")


def _bos_of_tokenizer_json(folder: Path, library: tokenizers.Tokenizer) -> int | None:
    """The BOS this folder wants: by flag, else by what the file's post-processor puts in front."""
    if not may_add_bos(folder):
        return None
    probe = library.encode("a")
    if probe.special_tokens_mask[:1] == [1]:
        return probe.ids[0]
    config = SideFile(folder / "tokenizer_config.json")
    if not config.flag("add_bos_token"):
        return None
    bos_id = library.token_to_id(config.token("bos_token"))
    if bos_id is None:
        raise UserError(
            f"{config.path}: add_bos_token without a known bos_token; name a token as bos_token"
        )
    return bos_id


def _read_tokenizer_model(folder: Path) -> Tokenizer:
    """SentencePiece or tiktoken: the first begins with the tag of a protobuf field, a newline."""
    path = folder / "tokenizer.model"
    data = path.read_bytes()
    if not data:
        raise UserError(f"{path}: the file is empty; download it again")
    if not data.startswith(b"\n"):
        return _tiktoken_tokenizer(folder, _tiktoken_ranks(path, data))
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise UserError(f"{path}: {quoted(str(error))}; download it again") from None
    names = [library.id_to_piece(i) for i in range(len(library))]
    names += added_tokens(folder, len(names))
    ids = {name: i for i, name in enumerate(names)}
    declared = {*declared_stop_ids(folder, ids), library.eos_id()} - {-1}
    bos_id = library.bos_id() if library.bos_id() >= 0 and may_add_bos(folder) else None
    tokenizer = sentencepiece_tokenizer(library, names, bos_id, declared)
    tokens = {"bos_token": library.bos_id(), "eos_token": library.eos_id()}
    texts = {key: names[i] for key, i in tokens.items() if i >= 0}
    known = ChatTemplate(str(path), LLAMA2_CHAT, texts) if is_meta(folder) else None
    return replace(tokenizer, chat_template=chat_template_of(folder) or known)


def sentencepiece_tokenizer(
    library: sentencepiece.SentencePieceProcessor,
    names: Sequence[str],
    bos_id: int | None,
    declared: Iterable[int],
) -> Tokenizer:
    """A SentencePiece model as a Tokenizer.

    Args:
        library: the model.
        names: its pieces, and behind them control tokens that it does not know.
        bos_id: as in `Tokenizer`.
        declared: the stop ids that its checkpoint names.
    """
    known = range(len(library))
    special = {i for i in known if library.is_control(i) or library.is_unknown(i)}
    special_ids = frozenset(special | set(range(len(library), len(names))))
    pieces = [piece_from_sentencepiece(name) for name in names]
    return Tokenizer(
        encode_text=library.encode,
        pieces=[b"" if i in special_ids else piece for i, piece in enumerate(pieces)],
        bos_id=bos_id,
        stop_ids=all_stop_ids(names, special_ids, declared),
        special_ids=special_ids,
        strips_leading_space=_drops_first_blank(library, names[: len(library)]),
        control_ids=control_texts(names, special_ids),
    )


def _drops_first_blank(library: sentencepiece.SentencePieceProcessor, names: Sequence[str]) -> bool:
    """Whether the model puts a blank before a text; decoding one word-start token tells."""
    word_start = next((i for i, name in enumerate(names) if name.startswith("▁")), None)
    if word_start is None:
        return False
    return library.decode([word_start]) != names[word_start].replace("▁", " ")


def _tiktoken_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """The lines `base64 rank`; read here because tiktoken's own reader caches files by path."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(
                f"{path}: no SentencePiece model, and line {number} is {quoted(line)}, not base64 "
                "and a rank as tiktoken has it; download it again"
            ) from None
    every_byte = all(bytes([byte]) in ranks for byte in range(256))
    if not every_byte or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: the ranks have gaps or lack a single byte; download it again")
    return ranks


def _tiktoken_tokenizer(folder: Path, ranks: dict[bytes, int]) -> Tokenizer:
    """Llama 3's tokenizer; the library is told of no special token, so all text is ordinary."""
    library = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens={}
    )
    names = [""] * len(ranks) + LLAMA3_CONTROL
    special_ids = frozenset(range(len(ranks), len(names)))
    ids = control_texts(names, special_ids)
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    known = ChatTemplate(str(folder), LLAMA3_CHAT, tokens) if is_meta(folder) else None

    def encode_text(text: str) -> list[int]:
        parts = _cut_blank_runs(text)
        return list(itertools.chain.from_iterable(map(library.encode_ordinary, parts)))

    return Tokenizer(
        encode_text=encode_text,
        pieces=sorted(ranks, key=ranks.__getitem__) + [b""] * len(LLAMA3_CONTROL),
        bos_id=ids["<|begin_of_text|>"] if may_add_bos(folder) else None,
        stop_ids=all_stop_ids(names, special_ids, declared_stop_ids(folder, ids)),
        special_ids=special_ids,
        strips_leading_space=False,
        control_ids=ids,
        chat_template=chat_template_of(folder) or known,
    )


def _cut_blank_runs(text: str) -> Iterator[str]:
    """Cuts after every 25,000 blanks in a row, as Meta does: tiktoken dies of a longer run."""
    cuts = [match.end() for match in re.finditer(r"\s{25000}", text)]
    return (text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)]))
