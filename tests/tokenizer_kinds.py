"""One small tokenizer of every kind, trained here: what the tokenizer tests run over."""

import base64
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from tokenizer import LLAMA3_CONTROL, LLAMA3_WORDS, open_tokenizer
from tokenizer_base import Tokenizer
from tokenizer_gguf import gguf_tokenizer

NUM_RANKS = 380  # of the byte-level vocabulary; its control tokens follow
# <|end_of_text|>, <|eom_id|>, <|eot_id|>
LLAMA3_STOP = {NUM_RANKS + 1, NUM_RANKS + 8, NUM_RANKS + 9}
NUM_PIECES = 400  # of the SentencePiece vocabulary
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "There were 12 of them in 1984 and 365 more    in the years that followed the fox.",
    "def fox(dog):\n\treturn dog + 1\n",
    "L'été, où naïve façade déjà vu; über größer, señor mañana.",
] * 3
TEXTS = [
    "",
    " ",
    "a",
    "Hello, my name is",
    " leading and  double  spaces ",
    "   three blanks first",
    "tabs\tand\nnewlines\r\n\r\n  x=1234567890",
    "a  3",
    "\n\n42",
    "emoji 👍🏽 and 🦙, family 👩‍👩‍👧",
    "你好，世界！我叫小明。",
    "한국어 뷁",
    "e\u0301 combining, \u00a0 no-break, \x00 nul, \ufffd itself",
    "it's WE'LL don't",
    "<0x41> is no byte, Ġ is no blank",
]
CONTROL_TEXT = "what is <|endoftext|> and <|eot_id|>, <s></s>, <|begin_of_text|><|im_end|>?"


def train_byte_level() -> tokenizers.Tokenizer:
    """Ids as Llama 3 has them: tokens by rank, then the control tokens."""
    library = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=NUM_RANKS, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    return library


@functools.cache
def byte_level_json() -> str:
    library = train_byte_level()
    library.add_special_tokens(LLAMA3_CONTROL)
    bos = "<|begin_of_text|>"
    library.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))]
    )
    return library.to_str()


@functools.cache
def sentencepiece_model(eos_piece: str = "</s>") -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=NUM_PIECES,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        eos_piece=eos_piece,
        minloglevel=2,
    )
    return model.getvalue()


def sentencepiece_json() -> str:
    """The SentencePiece model as a tokenizer.json: all ways to split a piece are its merges."""
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    ids = {library.id_to_piece(i): i for i in range(len(library))}
    merges = [
        (-library.get_score(i), ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, i in ids.items()
        if not (library.is_control(i) or library.is_byte(i) or library.is_unknown(i))
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    bpe = models.BPE(
        ids,
        [(left, right) for *_, left, right in sorted(merges)],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    result = tokenizers.Tokenizer(bpe)
    result.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    result.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    result.add_special_tokens(["<unk>", "<s>", "</s>"])
    result.add_tokens([AddedToken("<tool>", normalized=False)])
    result.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return result.to_str()


def gpt2_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, as openai/gpt-2's encoder.py defines it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


@functools.cache
def tiktoken_lines() -> bytes:
    vocab = train_byte_level().get_vocab()
    alphabet = gpt2_alphabet()
    pieces = [bytes(alphabet[c] for c in token) for token in sorted(vocab, key=vocab.__getitem__)]
    return b"".join(b"%s %d\n" % (base64.b64encode(p), rank) for rank, p in enumerate(pieces))


def gguf_byte_level() -> dict[str, Any]:
    model = json.loads(byte_level_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens + LLAMA3_CONTROL + ["<tool>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(LLAMA3_CONTROL) + [4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def gguf_sentencepiece() -> dict[str, Any]:
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    ids = range(len(library))
    kinds = [(2, library.is_unknown), (3, library.is_control), (6, library.is_byte)]
    types = [next((kind for kind, holds in kinds if holds(i)), 1) for i in ids]
    types[library.piece_to_id("<tool>")] = 4
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [library.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def in_folder(name: str, content: Callable[[], str | bytes]) -> Callable[[Path], Tokenizer]:
    def build(folder: Path) -> Tokenizer:
        write(folder, {name: content()})
        return open_tokenizer(folder)

    return build


FOLDER_KINDS: dict[str, tuple[str, Callable[[], str | bytes]]] = {
    "json-byte-level": ("tokenizer.json", byte_level_json),
    "json-sentencepiece": ("tokenizer.json", sentencepiece_json),
    "sentencepiece": ("tokenizer.model", sentencepiece_model),
    "tiktoken": ("tokenizer.model", tiktoken_lines),
}
KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    **{kind: in_folder(*file) for kind, file in FOLDER_KINDS.items()},
    "gguf-byte-level": lambda folder: gguf_tokenizer(gguf_byte_level()),
    "gguf-sentencepiece": lambda folder: gguf_tokenizer(gguf_sentencepiece()),
}
