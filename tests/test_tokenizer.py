"""What holds for every kind of tokenizer: encoding, decoding and streaming."""

import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizer_kinds import (
    CONTROL_TEXT,
    KINDS,
    LLAMA3_STOP,
    NUM_PIECES,
    NUM_RANKS,
    TEXTS,
    byte_level_json,
    in_folder,
    sentencepiece_json,
    sentencepiece_model,
)

from config import UserError
from tokenizer_base import TextStream, Tokenizer


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return KINDS[request.param](tmp_path)


def stream_text(tokenizer: Tokenizer, prompt_ids: list[int], new_ids: list[int]) -> str:
    stream = tokenizer.stream(prompt_ids)
    return "".join([stream.push(i) for i in new_ids]) + stream.flush()


def random_ids(tokenizer: Tokenizer, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(tokenizer.vocab_size), k=count)


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_give_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_exactly_one_bos_is_in_front(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(ids[0]) == 1
    assert text or ids == [tokenizer.bos_id]


def test_control_text_in_a_prompt_is_ordinary_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CONTROL_TEXT)
    assert not tokenizer.special_ids & set(ids[1:])
    assert not tokenizer.stop_ids & set(ids)
    assert tokenizer.decode(ids) == CONTROL_TEXT


def test_control_text_is_its_token_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    end, end_id = next((t, i) for t, i in tokenizer.control_ids.items() if i in tokenizer.stop_ids)
    bos = next(text for text, i in tokenizer.control_ids.items() if i == tokenizer.bos_id)
    ids = tokenizer.encode(f"say{end}{end}a <tag>", parse_special=True)
    first, *between, last = "".join("," if i == end_id else "." for i in ids).split(",")
    assert (first, between, bool(last)) == ("." * len(tokenizer.encode("say")), [""], True)
    assert tokenizer.decode(ids).replace(" ", "") == "saya<tag>"
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.encode(f"{bos}say{end}{end}a <tag>", parse_special=True) == ids
    assert tokenizer.encode("say <tag>", parse_special=True) == tokenizer.encode("say <tag>")


def test_control_tokens_and_only_they_print_nothing(tokenizer: Tokenizer) -> None:
    silent = {i for i, piece in enumerate(tokenizer.pieces) if not piece}
    assert silent == tokenizer.special_ids
    assert tokenizer.stop_ids <= tokenizer.special_ids
    assert tokenizer.decode(sorted(tokenizer.special_ids)) == ""


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="prompt: character 1 "):
        tokenizer.encode("a\udce9")


@pytest.mark.parametrize("kind", ["json-sentencepiece", "sentencepiece", "gguf-sentencepiece"])
def test_byte_fallback_prints_the_character(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind](tmp_path)
    first_byte = 4  # after <unk>, <s>, </s> and <tool>
    ids = [first_byte + byte for byte in "한🦙".encode()]
    assert tokenizer.encode("한🦙")[-len(ids) :] == ids
    assert tokenizer.decode(ids) == "한🦙"


@pytest.mark.parametrize("text", [*TEXTS, CONTROL_TEXT])
def test_one_vocabulary_gives_the_same_ids_in_every_file_format(text: str, tmp_path: Path) -> None:
    for family in ("byte-level", "sentencepiece"):
        kinds = ["tiktoken"] if family == "byte-level" else ["sentencepiece"]
        kinds += [f"json-{family}", f"gguf-{family}"]
        folders = [tmp_path / kind for kind in kinds]
        for folder in folders:
            folder.mkdir()
        ids = [
            KINDS[kind](folder).encode(text) for kind, folder in zip(kinds, folders, strict=True)
        ]
        assert ids[1:] == ids[:-1], family


def test_decoding_equals_the_libraries(tmp_path: Path) -> None:
    byte_level = tokenizers.Tokenizer.from_str(byte_level_json())
    tokenizer = KINDS["json-byte-level"](tmp_path)
    sp = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    sp_tokenizer = KINDS["gguf-sentencepiece"](tmp_path)
    for seed in range(100):
        ids = random_ids(tokenizer, 30, seed)
        assert tokenizer.decode(ids) == byte_level.decode(ids)
        pieces = [i for i in random_ids(sp_tokenizer, 30, seed) if i and not sp.is_byte(i)]
        assert sp_tokenizer.decode(pieces) == sp.decode(pieces)


@pytest.mark.parametrize("kind", ["json-sentencepiece", "sentencepiece", "gguf-byte-level"])
def test_an_added_token_that_is_no_control_token_still_matches(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind](tmp_path)
    tool_id = tokenizer.pieces.index(b"<tool>")
    ids = tokenizer.encode("use <tool> here")
    assert ids.count(tool_id) == 1
    assert tool_id not in tokenizer.special_ids


def test_a_very_long_run_of_blanks_is_encoded(tmp_path: Path) -> None:
    tokenizer = KINDS["tiktoken"](tmp_path)
    text = "a" + " " * 1_000_000 + "b"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_of_a_tokenizer_json_have_no_effect(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(byte_level_json())
    library.enable_truncation(4)
    library.enable_padding(length=50)
    tokenizer = in_folder("tokenizer.json", library.to_str)(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXTS[3])) == TEXTS[3]
    assert len(tokenizer.encode("a")) == 2


def test_ids_without_a_token_count_as_special(tmp_path: Path) -> None:
    spec = json.loads(sentencepiece_json())
    spec["model"]["vocab"]["far"] = NUM_PIECES + 5
    tokenizer = in_folder("tokenizer.json", lambda: json.dumps(spec))(tmp_path)
    gap = range(NUM_PIECES, NUM_PIECES + 5)
    assert tokenizer.vocab_size == NUM_PIECES + 6
    assert tokenizer.special_ids == {0, 1, 2, *gap}
    assert tokenizer.decode(gap) == ""


@pytest.mark.parametrize("seed", range(20))
def test_streamed_pieces_joined_equal_the_decode(tokenizer: Tokenizer, seed: int) -> None:
    prompt_ids = tokenizer.encode(TEXTS[seed % len(TEXTS)])
    new_ids = random_ids(tokenizer, 60, seed)
    prompt = tokenizer.decode(prompt_ids)
    assert prompt + stream_text(tokenizer, prompt_ids, new_ids) == tokenizer.decode(
        prompt_ids + new_ids
    )
    assert stream_text(tokenizer, [], new_ids) == tokenizer.decode(new_ids)


@pytest.mark.parametrize("char", ["🦙", "뷁", "世"])
def test_a_character_prints_nothing_until_it_is_complete(tokenizer: Tokenizer, char: str) -> None:
    prompt_ids = tokenizer.encode("x")
    new_ids = tokenizer.encode("x" + char)[len(prompt_ids) :]
    assert len(new_ids) == len(char.encode())
    stream = tokenizer.stream(prompt_ids)
    assert [stream.push(i) for i in new_ids] == [""] * (len(new_ids) - 1) + [char]
    assert stream.flush() == ""


def test_a_cut_character_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode("ab🦙")[:-1]
    assert "".join([stream.push(i) for i in ids]) == "ab"
    assert stream.flush() == "\ufffd"
    assert tokenizer.decode(ids) == "ab\ufffd"


def test_a_character_begun_by_the_prompt_is_printed_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🦙!")
    assert stream_text(tokenizer, ids[:-2], ids[-2:]) == "🦙!"


def test_control_tokens_print_nothing_in_a_stream(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream(tokenizer.encode("ab"))
    first, *rest = tokenizer.encode("한")[-3:]
    shown = [stream.push(first)]
    shown += [stream.push(i) for i in sorted(tokenizer.special_ids)]
    assert set(shown) == {""}
    assert "".join([stream.push(i) for i in rest]) == "한"


def test_any_bytes_stream_as_python_decodes_them() -> None:
    pieces = [bytes([byte]) for byte in range(256)]
    for seed in range(200):
        data = random.Random(seed).randbytes(50)
        stream = TextStream(pieces, strips_leading_space=False)
        text = "".join([stream.push(byte) for byte in data]) + stream.flush()
        assert text == data.decode("utf-8", errors="replace")


def test_stop_ids_of_each_kind(tokenizer: Tokenizer) -> None:
    llama3 = tokenizer.bos_id == NUM_RANKS
    assert tokenizer.stop_ids == (LLAMA3_STOP if llama3 else {2})
