"""The tokenizer of tiny_checkpoint.py, as every format stores it."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from checkpoint import Checkpoint
from checkpoint_gguf_header import read_header
from tokenizer import LLAMA3_CONTROL
from tokenizer_base import piece_from_byte_level
from tokenizer_gguf import CONTROL, LLAMA3_NAMES, NORMAL, WORDS


@dataclass(frozen=True)
class TinyTokenizer:
    """One tokenizer as files of a Hugging Face folder, of a Meta folder, and as GGUF metadata."""

    hf_files: Mapping[str, bytes]
    meta_files: Mapping[str, bytes]
    gguf_fields: Mapping[str, Any]


MERGES = [("t", "h"), ("i", "n"), ("e", "r"), ("Ġ", "t")]
NUM_TEXT_TOKENS = 256 + len(MERGES)
BOS_ID, EOS_ID = NUM_TEXT_TOKENS, NUM_TEXT_TOKENS + 1  # the first two of LLAMA3_CONTROL


def tiny_tokenizer(vocab_size: int) -> TinyTokenizer:
    """Llama 3's kind of tokenizer with 4 merges: byte b is id b, control tokens fill the rest."""
    texts = sorted(ByteLevel.alphabet(), key=piece_from_byte_level)
    texts += [left + right for left, right in MERGES]
    unused = [f"<|unused_{i}|>" for i in range(vocab_size)]
    names = (texts + LLAMA3_CONTROL + unused)[:vocab_size]
    ranks = [base64.b64encode(piece_from_byte_level(text)) for text in texts]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [NORMAL] * len(texts) + [CONTROL] * (vocab_size - len(texts)),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": True,
    }
    return TinyTokenizer(
        hf_files=hf_tokenizer_files(fields),
        meta_files={"tokenizer.model": b"".join(b"%s %d\n" % (t, i) for i, t in enumerate(ranks))},
        gguf_fields=fields,
    )


def hf_tokenizer_files(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json and what belongs to it, from byte-level BPE metadata of a GGUF file."""
    names, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {name: i for i, name in enumerate(names)}
    rule = fields["tokenizer.ggml.pre"]
    library = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule in LLAMA3_NAMES))
    splits = [Split(Regex(words), "isolated") for words in WORDS[rule]]
    library.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    control = [name for name, kind in zip(names, types, strict=True) if kind == CONTROL]
    library.add_special_tokens([AddedToken(name, normalized=False) for name in control])
    ids = {key: fields[f"tokenizer.ggml.{key}"] for key in ("bos_token_id", "eos_token_id")}
    config = {
        "add_bos_token": fields.get("tokenizer.ggml.add_bos_token", False),
        "bos_token": names[ids["bos_token_id"]],
        "eos_token": names[ids["eos_token_id"]],
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    return {
        "tokenizer.json": library.to_str(pretty=False).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(ids).encode(),
    }


def tokenizer_of(checkpoint: Checkpoint) -> TinyTokenizer:
    """A copy of a checkpoint's tokenizer; a folder's is not converted to GGUF metadata."""
    if checkpoint.path.is_file():
        fields = {k: v for k, v in read_header(checkpoint.path)[0].items() if "tokenizer." in k}
        files = hf_tokenizer_files(fields)
        return TinyTokenizer(files, files, fields)
    files = {
        file.name: file.read_bytes()
        for pattern in ("tokenizer*", "generation_config.json")
        for file in checkpoint.path.glob(pattern)
    }
    return TinyTokenizer(files, files, {})
