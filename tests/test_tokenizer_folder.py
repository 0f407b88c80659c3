"""The tokenizer files of a folder: which one is read, its BOS and stop ids, and bad files."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import (
    FOLDER_KINDS,
    LLAMA3_STOP,
    NUM_RANKS,
    byte_level_json,
    sentencepiece_model,
    tiktoken_lines,
    write,
)

import tokenizer
from config import UserError
from tokenizer import LLAMA3_CONTROL, open_tokenizer


@pytest.mark.parametrize("kind", FOLDER_KINDS)
def test_no_bos_where_the_tokenizer_config_wants_none(kind: str, tmp_path: Path) -> None:
    name, content = FOLDER_KINDS[kind]
    write(tmp_path, {name: content(), "tokenizer_config.json": {"add_bos_token": False}})
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.bos_id is None
    assert tokenizer.encode("") == []
    assert not tokenizer.special_ids & set(tokenizer.encode("Hello"))


@pytest.mark.parametrize(
    ("config", "bos"),
    [
        ({}, None),
        ({"add_bos_token": None, "bos_token": "<|begin_of_text|>"}, None),
        ({"add_bos_token": True, "bos_token": "<|begin_of_text|>"}, "<|begin_of_text|>"),
        ({"add_bos_token": True, "bos_token": {"content": "<|eot_id|>"}}, "<|eot_id|>"),
    ],
)
def test_without_a_post_processor_the_flag_decides_on_the_bos(
    config: dict[str, Any], bos: str | None, tmp_path: Path
) -> None:
    spec = json.loads(byte_level_json()) | {"post_processor": None}
    write(tmp_path, {"tokenizer.json": spec, "tokenizer_config.json": config})
    expected = None if bos is None else NUM_RANKS + LLAMA3_CONTROL.index(bos)
    assert open_tokenizer(tmp_path).bos_id == expected


@pytest.mark.parametrize(
    ("name", "content", "added"),
    [
        ("config.json", {"eos_token_id": 7}, {7}),
        ("config.json", {"eos_token_id": [7, 9]}, {7, 9}),
        ("config.json", {"eos_token_id": None}, set()),
        ("generation_config.json", {"eos_token_id": [8]}, {8}),
        ("tokenizer_config.json", {"eos_token": "a"}, {64}),
        ("special_tokens_map.json", {"eos_token": {"content": "b"}}, {65}),
        ("special_tokens_map.json", {"eos_token": "nowhere"}, set()),
    ],
)
def test_stop_ids_come_from_every_file(
    name: str, content: dict[str, Any], added: set[int], tmp_path: Path
) -> None:
    write(tmp_path, {"tokenizer.json": byte_level_json(), name: content})
    assert open_tokenizer(tmp_path).stop_ids == LLAMA3_STOP | added


def test_the_end_token_of_a_sentencepiece_model_stops_whatever_its_text(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.model": sentencepiece_model(eos_piece="<end>")})
    assert open_tokenizer(tmp_path).stop_ids == {2}


def test_added_tokens_json_puts_control_tokens_behind_a_sentencepiece_model(tmp_path: Path) -> None:
    added = {"<|im_start|>": 400, "<|im_end|>": 402, "<s>": 1}
    write(tmp_path, {"tokenizer.model": sentencepiece_model(), "added_tokens.json": added})
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 403
    assert tokenizer.special_ids == {0, 1, 2, 400, 401, 402}
    assert tokenizer.stop_ids == {2, 402}
    assert tokenizer.control_ids["<|im_start|>"] == 400
    assert not {400, 402} & set(tokenizer.encode("a <|im_start|>"))
    assert tokenizer.decode([400, 401, 402]) == ""


@pytest.mark.parametrize("value", ["x", 10**9, 1.5, None])
def test_added_tokens_that_are_no_ids_are_named(value: Any, tmp_path: Path) -> None:
    added = {"<|a|>": value}
    write(tmp_path, {"tokenizer.model": sentencepiece_model(), "added_tokens.json": added})
    if value is None:
        assert open_tokenizer(tmp_path).vocab_size == 400
        return
    with pytest.raises(UserError, match=r"added_tokens.json: <\|a\|> is "):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("beside", "vocab_size"),
    [
        ({}, 636),
        ({"config.json": {}}, 636),
        ({"config.json": {}, "params.json": {}}, 636),
        ({"params.json": {}}, 400),
    ],
)
def test_tokenizer_json_is_preferred_except_in_a_meta_folder(
    beside: dict[str, Any], vocab_size: int, tmp_path: Path
) -> None:
    files = {"tokenizer.json": byte_level_json(), "tokenizer.model": sentencepiece_model()}
    write(tmp_path, files | beside)
    assert open_tokenizer(tmp_path).vocab_size == vocab_size


def without_rank(rank: int) -> bytes:
    lines = tiktoken_lines().splitlines(keepends=True)
    return b"".join(lines[:rank] + lines[rank + 1 :])


def without_first_byte() -> bytes:
    tokens = [line.split()[0] for line in tiktoken_lines().splitlines()[1:]]
    return b"".join(b"%s %d\n" % (token, rank) for rank, token in enumerate(tokens))


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
REPLACE_ = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}
META_ = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never", "split": False}


def decoded(*steps: str | dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with these steps of decoding."""
    full = [{"type": step} if isinstance(step, str) else step for step in steps]
    return json.loads(byte_level_json()) | {"decoder": {"type": "Sequence", "decoders": full}}


def added(text: str, token_id: int) -> dict[str, Any]:
    """A tokenizer.json with one more token behind the vocabulary."""
    spec = json.loads(byte_level_json())
    spec["added_tokens"].append({**spec["added_tokens"][0], "content": text, "id": token_id})
    return spec


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("other.json", "{}", "no tokenizer.json and no tokenizer.model"),
        ("tokenizer.json", "{", "tokenizer.json: is not JSON"),
        ("tokenizer.json", "[1]", "tokenizer.json: is not a JSON object"),
        ("tokenizer.json", b"\xff\n", "tokenizer.json: is not JSON"),
        ("tokenizer.json", {"decoder": {"type": "ByteLevel"}}, "tokenizer.json: "),
        ("tokenizer.json", {"decoder": {"type": "WordPiece"}}, "tokenizer.json: decoder .*WordP"),
        ("tokenizer.json", {"decoder": None}, "tokenizer.json: decoder "),
        ("tokenizer.json", decoded("ByteLevel", STRIP), "tokenizer.json: decoder .*Strip"),
        ("tokenizer.json", decoded("ByteFallback", REPLACE_), "json: decoder .*Replace"),
        ("tokenizer.json", decoded("ByteFallback", STRIP | {"start": 2}), "json: decoder .*Strip"),
        ("tokenizer.json", decoded("ByteFallback", STRIP | {"stop": 1}), "json: decoder .*Strip"),
        ("tokenizer.json", decoded("ByteFallback", {"type": "CTC"}), "json: decoder .*CTC"),
        ("tokenizer.json", decoded("Metaspace", META_), "json: decoder .*Metaspace"),
        ("tokenizer.json", added("<new>", 9000), "'<new>' has id 9000, its library gives it "),
        ("tokenizer.json", added("<new>", 5), "'<new>' has id 5, its library gives it "),
        ("tokenizer.model", b"", "tokenizer.model: the file is empty"),
        ("tokenizer.model", b"version https://git-lfs\nx", "tokenizer.model: .* line 1 is .*lfs"),
        ("tokenizer.model", tiktoken_lines() + b"!!! 380\n", "tokenizer.model: .* line 381 is "),
        ("tokenizer.model", tiktoken_lines() + b"YWJj ten\n", "tokenizer.model: .* line 381 is "),
        ("tokenizer.model", without_rank(300), "tokenizer.model: the ranks have gaps"),
        ("tokenizer.model", without_first_byte(), "tokenizer.model: .* lack a single byte"),
        ("tokenizer.model", b"\x80\x81" * 500, "tokenizer.model: .* line 1 is "),
        ("tokenizer.model", b"\n\xff\xff", "tokenizer.model: "),
        ("tokenizer.model", sentencepiece_model()[:3000], "tokenizer.model: "),
    ],
)
def test_a_bad_file_is_named_in_one_line(
    name: str, content: Any, cause: str, tmp_path: Path
) -> None:
    write(tmp_path, {name: content})
    with pytest.raises(UserError, match=cause) as caught:
        open_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("config.json", {"eos_token_id": "two"}, "config.json: eos_token_id is 'two'"),
        ("tokenizer_config.json", "nope", "tokenizer_config.json: is not JSON"),
        ("tokenizer_config.json", {"add_bos_token": True}, "tokenizer_config.json: add_bos_token"),
        ("tokenizer_config.json", {"add_bos_token": "no"}, "_config.json: add_bos_token is 'no'; "),
        ("tokenizer_config.json", {"eos_token": 5}, "_config.json: eos_token is 5; the text of a"),
        (
            "tokenizer_config.json",
            {"eos_token": ["a"]},
            r"_config.json: eos_token is \['a'\]; the ",
        ),
        ("tokenizer_config.json", {"eos_token": {"content": 5}}, "eos_token is {'content': 5}; "),
        ("special_tokens_map.json", {"eos_token": True}, "_map.json: eos_token is True; the text"),
        ("config.json", {"eos_token_id": [True]}, r"config.json: eos_token_id is \[True\]; give"),
        (
            "generation_config.json",
            {"eos_token_id": 2.0},
            "_config.json: eos_token_id is 2.0; give",
        ),
    ],
)
def test_a_bad_file_beside_the_tokenizer_is_named(
    name: str, content: Any, cause: str, tmp_path: Path
) -> None:
    spec = json.loads(byte_level_json()) | {"post_processor": None}
    write(tmp_path, {"tokenizer.json": spec, name: content})
    with pytest.raises(UserError, match=cause):
        open_tokenizer(tmp_path)


SIDE_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.json",
]
NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("gone"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", SIDE_FILES)
def test_what_has_the_name_of_a_file_but_is_none_is_refused_not_left_out(
    name: str, kind: str, tmp_path: Path
) -> None:
    write(tmp_path, {"tokenizer.model": tiktoken_lines()})
    if name != "tokenizer.json":
        write(tmp_path, {"tokenizer.json": byte_level_json()})
    NO_FILES[kind](tmp_path / name)
    cause = "is a link to a file that is not there" if kind in ("link", "loop") else "is no regular"
    with pytest.raises(UserError, match=f"^{tmp_path}/{name}: {cause}"):
        open_tokenizer(tmp_path)


def test_a_dropout_of_training_makes_no_ids_random(tmp_path: Path) -> None:
    spec = json.loads(byte_level_json())
    write(tmp_path, {"tokenizer.json": spec})
    expected = open_tokenizer(tmp_path).encode("Hello in the")
    spec["model"]["dropout"] = 0.9
    write(tmp_path, {"tokenizer.json": spec})
    assert [open_tokenizer(tmp_path).encode("Hello in the") for _ in range(9)] == 9 * [expected]


PANICKING = {"type": "FixedLength", "length": 0}
PROGRAM = """
import sys
from pathlib import Path
from config import UserError
from tokenizer import open_tokenizer
try:
    open_tokenizer(Path(sys.argv[1]))
except UserError as error:
    sys.exit(f"error: {error}")
"""


def test_a_library_that_panics_prints_no_lines_of_its_own(tmp_path: Path) -> None:
    spec = json.loads(byte_level_json()) | {"pre_tokenizer": PANICKING}
    write(tmp_path, {"tokenizer.json": spec})
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    root = Path(tokenizer.__file__).parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/tokenizer.json: PanicException: ")
    assert done.stderr.count("\n") == 1


def test_reading_works_where_stderr_is_closed(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.json": byte_level_json()})
    command = f'{shlex.quote(sys.executable)} -c "$0" {shlex.quote(str(tmp_path))} 2>&-'
    root = Path(tokenizer.__file__).parent
    assert subprocess.run(["sh", "-c", command, PROGRAM], cwd=root, check=False).returncode == 0
