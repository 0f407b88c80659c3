"""Files cut off, changed, or made to attack: one line that names the file, no traceback."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import every_format, refusal, tiny

from checkpoint import open_checkpoint
from config import UserError


def weight_file(path: Path) -> Path:
    return path if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.pth")][0]


@every_format
def test_a_cut_off_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tiny(kind, tmp_path)
    file = weight_file(path)
    data = file.read_bytes()
    for num_bytes in (0, 3, 4, 12, 30, 1000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:num_bytes])
        refusal(path)


def damaged(data: bytes) -> Iterator[bytes]:
    """60 copies of data, each with three bytes of the header changed."""
    generator = random.Random(0)
    for _ in range(60):
        copy = bytearray(data)
        for _ in range(3):
            copy[generator.randrange(min(len(copy), 4000))] = generator.randrange(256)
        yield bytes(copy)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["hf", "meta", "gguf"])
def test_random_damage_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    path = tiny(kind, tmp_path)
    file = weight_file(path)
    num_refused = 0
    for data in damaged(file.read_bytes()):
        file.write_bytes(data)
        try:
            open_checkpoint(path)
        except UserError as error:
            assert str(path) in str(error)
            num_refused += 1
    assert num_refused > 10


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN', "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    (folder / "config.json").write_text(text, encoding="latin-1")
    refusal(folder, "config.json")


class Attack:
    """Unpickling it would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[Path, bytes]]:
        return Path.write_bytes, (self.file, b"code ran")


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    folder = tiny("meta", tmp_path)
    torch.save({"tok_embeddings.weight": Attack(tmp_path / "mark")}, folder / "consolidated.00.pth")
    refusal(folder, "consolidated.00.pth", "re-save its tensors as safetensors")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "stored",
    [[1, 2], {1: torch.ones(80)}, {"norm.weight": 3}, {"norm.weight": torch.ones(80).to_sparse()}],
    ids=["list", "key", "number", "sparse"],
)
def test_a_pth_file_holds_plain_tensors_only(stored: object, tmp_path: Path) -> None:
    folder = tiny("meta", tmp_path)
    torch.save(stored, folder / "consolidated.00.pth")
    refusal(folder, "consolidated.00.pth", "re-save its tensors as safetensors")


def test_an_old_pth_file_that_is_no_zip_is_refused(tmp_path: Path) -> None:
    folder = tiny("meta", tmp_path)
    file = folder / "consolidated.00.pth"
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    refusal(folder, "consolidated.00.pth", "re-save its tensors as safetensors")


@pytest.mark.parametrize("merges", [5, ["no blank in it"]], ids=["type", "value"])
def test_a_wrong_tokenizer_key_is_one_line_naming_the_gguf_file_once(
    merges: object, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny("gguf", tmp_path))
    checkpoint.fields.values["tokenizer.ggml.merges"] = merges
    with pytest.raises(UserError) as refused:
        checkpoint.tokenizer()
    assert str(refused.value).count(str(checkpoint.path)) == 1
    assert "\n" not in str(refused.value)
