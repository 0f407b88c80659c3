"""Tokenizers built from GGUF metadata: keys, defaults, word rules and bad values."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizer_kinds import NUM_RANKS, TEXTS, gguf_byte_level, gguf_sentencepiece, train_byte_level
from tokenizers import pre_tokenizers

from config import UserError
from tokenizer_base import Tokenizer
from tokenizer_gguf import gguf_tokenizer


def byte_level_with_rule(rule: str) -> Tokenizer:
    return gguf_tokenizer(gguf_byte_level() | {"tokenizer.ggml.pre": rule})


@pytest.mark.parametrize("text", [*TEXTS, "Ⅷ ½ x²  ٣٤", "1\n\n  22   333"])
def test_smollm_splits_every_digit_before_the_gpt2_rule(text: str) -> None:
    library = train_byte_level()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    assert byte_level_with_rule("smollm").encode(text) == library.encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_splits_as_the_library_does(text: str) -> None:
    library = train_byte_level()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert byte_level_with_rule("gpt-2").encode(text) == library.encode(text).ids


def test_only_llama3_names_want_a_bos_by_default() -> None:
    wants = {rule: byte_level_with_rule(rule).bos_id for rule in ("smollm", "gpt-2", "llama-bpe")}
    assert wants == {"smollm": None, "gpt-2": None, "llama-bpe": NUM_RANKS}


@pytest.mark.parametrize(("rule", "ids"), [("llama-bpe", [256]), ("gpt-2", [87, 88])])
def test_llama3_takes_a_word_that_is_a_token_without_its_merges(rule: str, ids: list[int]) -> None:
    fields = gguf_byte_level() | {"tokenizer.ggml.pre": rule, "tokenizer.ggml.merges": []}
    fields["tokenizer.ggml.add_bos_token"] = False
    fields["tokenizer.ggml.tokens"][256] = "xy"
    assert gguf_tokenizer(fields).encode("xy") == ids


def test_a_control_token_is_not_made_from_a_word_of_its_text() -> None:
    fields = gguf_byte_level() | {"tokenizer.ggml.merges": []}
    fields["tokenizer.ggml.tokens"][256] = "xy"
    fields["tokenizer.ggml.token_type"][256] = 3
    assert gguf_tokenizer(fields).encode("xy") == [NUM_RANKS, 87, 88]


def test_a_token_outside_the_byte_alphabet_prints_its_own_text() -> None:
    fields = gguf_byte_level()
    fields["tokenizer.ggml.tokens"][-1] = "工具"
    tokenizer = gguf_tokenizer(fields)
    assert tokenizer.encode("工具") == [NUM_RANKS, tokenizer.vocab_size - 1]
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "工具"


def test_without_a_space_prefix_no_blank_is_added_or_dropped() -> None:
    plain = gguf_tokenizer(gguf_sentencepiece() | {"tokenizer.ggml.add_space_prefix": False})
    prefixed = gguf_tokenizer(gguf_sentencepiece())
    assert plain.encode(" the fox") == prefixed.encode("the fox")
    assert plain.decode(plain.encode(" the fox")) == " the fox"


@pytest.mark.parametrize("fields", [gguf_byte_level, gguf_sentencepiece])
def test_no_bos_where_the_gguf_key_wants_none(fields: Callable[[], dict[str, Any]]) -> None:
    tokenizer = gguf_tokenizer(fields() | {"tokenizer.ggml.add_bos_token": False})
    assert tokenizer.bos_id is None
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("end", ["eos", "eot", "eom"])
def test_stop_ids_come_from_every_gguf_key(end: str) -> None:
    tokenizer = gguf_tokenizer(gguf_sentencepiece() | {f"tokenizer.ggml.{end}_token_id": 77})
    assert 77 in tokenizer.stop_ids
    assert 2 in tokenizer.stop_ids


@pytest.mark.parametrize(
    ("fields", "change", "cause"),
    [
        (gguf_byte_level, {"model": "bert"}, "model: 'bert'; supported: gpt2, llama"),
        (gguf_byte_level, {"pre": "tekken"}, "pre: 'tekken'; supported: default, gpt-2"),
        (gguf_byte_level, {"merges": ["a b c"]}, "merges: "),
        (gguf_byte_level, {"merges": ["a zzz"]}, "merges: .*zzz"),
        (gguf_byte_level, {"token_type": [1, 2]}, "token_type: 2 types .* for 637 tokens"),
        (gguf_byte_level, {"token_type": [9] * 637}, r"token_type: 637 types \[9\]"),
        (gguf_sentencepiece, {"scores": [0.0]}, "scores: 1 scores for 400 tokens"),
        (gguf_sentencepiece, {"tokens": ["a"] * 400}, "tokens: .*already defined"),
        (gguf_sentencepiece, {"bos_token_id": None}, "bos_token_id: missing"),
        (gguf_sentencepiece, {"tokens": None}, "tokens: missing"),
        (gguf_sentencepiece, {"add_bos_token": "no"}, "add_bos_token: is 'no'; true or false"),
        (gguf_sentencepiece, {"bos_token_id": 400}, "bos_token_id: is 400; the id of a token"),
        (gguf_byte_level, {"bos_token_id": "a"}, "bos_token_id: is 'a'; the id of a token"),
        (gguf_byte_level, {"eot_token_id": [1]}, r"eot_token_id: is \[1\]; the id of a token"),
    ],
)
def test_a_bad_gguf_key_is_named_in_one_line(
    fields: Callable[[], dict[str, Any]], change: dict[str, Any], cause: str
) -> None:
    changed = fields() | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(UserError, match=f"tokenizer.ggml.{cause}") as caught:
        gguf_tokenizer({key: value for key, value in changed.items() if value is not None})
    assert "\n" not in str(caught.value)
