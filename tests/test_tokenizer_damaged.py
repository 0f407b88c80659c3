"""A tokenizer file that is damaged or made to hurt works or is refused in one line, never else."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import FOLDER_KINDS, byte_level_json, write

from config import UserError
from tokenizer import open_tokenizer

TEXT = "Hello 12 <s> 🦙\n" + "a" * 60 + "c"


def works_or_is_refused(folder: Path) -> str:
    """What it says instead of working; '' when it works."""
    try:
        tokenizer = open_tokenizer(folder)
        tokenizer.decode(tokenizer.encode(TEXT))
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        assert message.startswith(f"{folder}/")
        return message
    return ""


def flipped(data: bytes, choice: random.Random) -> bytes:
    """One to three bytes changed, or a stretch left out, doubled, or cut off with what follows."""
    damaged = bytearray(data)
    for _ in range(choice.randint(1, 3)):
        start = choice.randrange(len(damaged))
        end = start + choice.randint(1, 40)
        match choice.randrange(6):
            case 0:
                del damaged[start:end]
            case 1:
                damaged[start:start] = damaged[start:end]
            case 2:
                del damaged[max(1, start) :]
            case _:
                damaged[start] = choice.randrange(256)
    return bytes(damaged)


def swapped(data: bytes, choice: random.Random) -> bytes:
    """A JSON file with one value, not of the vocabulary, replaced by something else."""
    spec = json.loads(data)
    place: Any = spec
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = choice.choice([k for k in keys if k not in ("vocab", "merges")])
        inside = place[key]
        if not inside or not isinstance(inside, dict | list) or choice.random() < 0.3:
            break
        place = inside
    place[key] = choice.choice([None, 0, -1, 2**40, "", "x", [], {}, True, 1.5, [["a", "b"]]])
    return json.dumps(spec).encode()


@pytest.mark.parametrize("kind", FOLDER_KINDS)
def test_damage_is_one_line(kind: str, tmp_path: Path) -> None:
    name, content = FOLDER_KINDS[kind]
    whole = content()
    data = whole.encode() if isinstance(whole, str) else whole
    outcomes = set()
    for seed in range(150):
        choice = random.Random(seed)
        damage = swapped if name.endswith("json") and seed % 2 else flipped
        write(tmp_path, {name: damage(data, choice)})
        outcomes.add(bool(works_or_is_refused(tmp_path)))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a|aa)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}},
        {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [],
                            "special_tokens": {"x": 1}}},
        {"decoder": []},
        {"decoder": {"decoders": [1]}},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_made_to_hurt_is_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.json": json.loads(byte_level_json()) | changes})
    assert works_or_is_refused(tmp_path)


def test_a_merge_longer_than_any_token_is_one_line(tmp_path: Path) -> None:
    spec = json.loads(byte_level_json())
    spec["model"]["merges"].append(["a" * 1000, "b" * 1000])
    write(tmp_path, {"tokenizer.json": spec})
    assert "tokenizer.json: " in works_or_is_refused(tmp_path)
