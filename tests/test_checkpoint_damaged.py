"""Files cut off, changed, or made to attack: one line that names the file, no traceback."""

from pathlib import Path

import pytest
from checkpoint_kinds import every_format, refusal, tiny

from checkpoint import open_checkpoint
from config import UserError


def weight_file(path: Path) -> Path:
    if path.is_file():
        return path
    patterns = ("*.safetensors", "*.bin", "*.pth", "*.gguf")
    return min(file for pattern in patterns for file in path.glob(pattern))


@every_format
def test_a_cut_off_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tiny(kind, tmp_path)
    file = weight_file(path)
    data = file.read_bytes()
    for num_bytes in (0, 3, 4, 12, 30, 1000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:num_bytes])
        refusal(path, file.name)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN', "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    (folder / "config.json").write_text(text, encoding="latin-1")
    refusal(folder, "config.json")


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
