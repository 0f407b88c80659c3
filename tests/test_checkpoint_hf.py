"""Hugging Face folders: which files are read, and a head that is tied, copied, alone or missing."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import edit_json, refusal, tiny
from checkpoint_shards import bin_name, pickle_hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import open_checkpoint
from checkpoint_hf_config import ARCHITECTURES
from scripts.tiny_checkpoint import TINY, random_weights

TIED = dataclasses.replace(TINY, tie_embeddings=True)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
BIN_SHARDS = [bin_name(name) for name in SHARDS]


def edit_tensors(file: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def names_read(folder: Path) -> list[str]:
    return [file.name for file in open_checkpoint(folder).weight_files]  # type: ignore[attr-defined]


def opened_with_notes(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO, "kv_fast"):
        open_checkpoint(folder)
    return caplog.messages


# Which files


def test_safetensors_are_read_where_both_are_and_the_choice_is_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny("hf", tmp_path)
    torch.save({"layers.0.attention.wq.weight": torch.zeros(3)}, folder / "pytorch_model.bin")
    (folder / "model.pt").write_bytes(b"")
    notes = opened_with_notes(folder, caplog)
    assert notes == [f"{folder}: reads model.safetensors, not model.pt, pytorch_model.bin"]
    assert names_read(folder) == ["model.safetensors"]


@pytest.mark.parametrize("kind", ["hf", "hf-shards", "hf-bin", "hf-bin-shards"])
def test_a_folder_with_one_set_of_files_needs_no_note(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert opened_with_notes(tiny(kind, tmp_path), caplog) == []


@pytest.mark.parametrize("kind", ["hf-shards", "hf-bin-shards"])
def test_a_file_of_zeros_that_the_index_does_not_name_is_ignored_with_a_note(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny(kind, tmp_path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in random_weights(TINY).items()}
    if kind == "hf-shards":
        stray = folder / "model-00004-of-00004.safetensors"
        save_file(zeros, stray)
    else:
        stray = folder / "pytorch_model-00004-of-00004.bin"
        torch.save(zeros, stray)
    (note,) = opened_with_notes(folder, caplog)
    assert note.endswith(f"not {stray.name}")
    tensors = dict(open_checkpoint(folder).weights("cpu", torch.float32))
    assert torch.equal(tensors["lm_head.weight"], random_weights(TINY)[HEAD])


def test_a_missing_bin_shard_is_named_before_any_file_is_opened(tmp_path: Path) -> None:
    folder = tiny("hf-bin-shards", tmp_path)
    (folder / BIN_SHARDS[0]).write_bytes(b"damaged")
    (folder / BIN_SHARDS[1]).unlink()
    cause = f"pytorch_model.bin.index.json: 1 files it names are missing: {BIN_SHARDS[1]};"
    refusal(folder, cause)


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    folder = tiny("hf-shards", tmp_path)
    for name in SHARDS:
        (folder / name).unlink()
    refusal(folder, f"3 files it names are missing: {', '.join(SHARDS)};")


def test_an_index_without_any_of_its_files_gives_way_to_bin_files(tmp_path: Path) -> None:
    folder = pickle_hf(tiny("hf", tmp_path))
    index = {"weight_map": dict.fromkeys(random_weights(TINY), SHARDS[0])}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names_read(folder) == ["pytorch_model.bin"]


def test_an_interrupted_safetensors_download_does_not_give_way_to_bin_files(
    tmp_path: Path,
) -> None:
    folder = tiny("hf-shards", tmp_path / "a")
    for file in tiny("hf-bin", tmp_path / "b").glob("*.bin"):
        file.rename(folder / file.name)
    (folder / SHARDS[2]).unlink()
    refusal(folder, f"1 files it names are missing: {SHARDS[2]};")


def test_a_single_file_goes_before_an_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny("hf-shards", tmp_path)
    save_file(random_weights(TINY), folder / "model.safetensors")
    (note,) = opened_with_notes(folder, caplog)
    assert note == f"{folder}: reads model.safetensors, not {', '.join(SHARDS)}"


def test_an_index_that_names_the_wrong_shard_of_a_tensor_does_no_harm(tmp_path: Path) -> None:
    folder = tiny("hf-shards", tmp_path)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = sorted(set(weight_map.values()))
    turned = {name: shards[shards.index(shard) - 1] for name, shard in weight_map.items()}
    edit_json(index, weight_map=turned)
    tensors = dict(open_checkpoint(folder).weights("cpu", torch.float32))
    assert torch.equal(tensors["lm_head.weight"], random_weights(TINY)[HEAD])


def test_an_index_of_another_model_is_refused_with_the_tensors_that_are_missing(
    tmp_path: Path,
) -> None:
    folder = tiny("hf-shards", tmp_path)
    index = {"weight_map": {"model.norm.weight": SHARDS[0]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refusal(folder, "tensors missing (", *ARCHITECTURES)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("hf-shards", "3 *.safetensors files, no model.safetensors.index.json; add it"),
        ("hf-bin-shards", "3 pytorch_model*.bin files, no pytorch_model.bin.index.json; add it"),
    ],
)
def test_several_files_need_an_index(kind: str, cause: str, tmp_path: Path) -> None:
    folder = tiny(kind, tmp_path)
    next(folder.glob("*.index.json")).unlink()
    refusal(folder, cause)


def test_bin_files_of_other_things_are_no_weights(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    (folder / "model.safetensors").rename(folder / "training_args.bin")
    refusal(folder, "holds no safetensors file, nor pytorch_model.bin")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hf", "config.json"),
        ("hf", "model.safetensors"),
        ("hf-shards", "model.safetensors.index.json"),
        ("meta", "params.json"),
        ("meta", "consolidated.00.pth"),
    ],
)
def test_what_is_no_regular_file_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    folder = tiny(kind, tmp_path)
    (folder / name).unlink()
    (folder / name).mkdir()
    refusal(folder, f"{name}: is no regular file")
    (folder / name).rmdir()
    (folder / name).symlink_to("gone")
    refusal(folder, f"{name}: is a link to a file that is not there")


@pytest.mark.parametrize("is_zip", [True, False], ids=["object", "old"])
def test_a_bin_file_with_more_than_tensors_is_refused_with_the_remedy(
    is_zip: bool, tmp_path: Path
) -> None:
    folder = tiny("hf-bin", tmp_path)
    file = folder / "pytorch_model.bin"
    stored = torch.load(file) | ({"trainer": re.compile("x")} if is_zip else {})
    torch.save(stored, file, _use_new_zipfile_serialization=is_zip)
    refusal(folder, "pytorch_model.bin: ", "re-save its tensors as safetensors")


# Tied and untied heads


def copy_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def train_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING] * 1.01


def rename_to_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def drop_both(tensors: dict[str, Tensor]) -> None:
    tensors.pop(EMBEDDING)


NOT_A_COPY = f"tie_word_embeddings is true, but {HEAD} in model.safetensors is no copy"
MISSING_HEAD = f"tensors missing (1): {HEAD};"
MISSING_EMBEDDING = f"tensors missing (1): {EMBEDDING};"


@pytest.mark.parametrize(
    ("is_tied", "edit", "outcome"),
    [
        (True, dict, "tied"),
        (True, copy_head, "tied"),
        (True, rename_to_head, "tied"),
        (True, train_head, NOT_A_COPY),
        (True, drop_both, MISSING_EMBEDDING),
        (False, dict, MISSING_HEAD),
        (False, copy_head, "untied"),
        (False, train_head, "untied"),
        (False, rename_to_head, MISSING_EMBEDDING),
        (None, dict, MISSING_HEAD),
        (None, copy_head, "untied"),
    ],
)
def test_a_head_is_tied_as_the_config_says_or_refused(
    is_tied: bool | None, edit: Callable[[dict[str, Tensor]], object], outcome: str, tmp_path: Path
) -> None:
    folder = tiny("hf", tmp_path, TIED)
    edit_json(folder / "config.json", tie_word_embeddings=is_tied)
    edit_tensors(folder / "model.safetensors", edit)
    if outcome not in ("tied", "untied"):
        refusal(folder, outcome)
        return
    tensors = dict(open_checkpoint(folder).weights("cpu", torch.float32))
    assert ("lm_head.weight" in tensors) == (outcome == "untied")
    assert torch.equal(tensors["embed_tokens.weight"], random_weights(TIED)[EMBEDDING])
    if edit is train_head:
        assert torch.equal(tensors["lm_head.weight"], random_weights(TIED)[EMBEDDING] * 1.01)


@pytest.mark.parametrize("shape", [(320,), (319, 80), (320, 80)])
def test_a_tied_head_of_another_shape_or_dtype_is_no_copy(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    folder = tiny("hf", tmp_path, TIED)
    zeros = torch.zeros(shape)  # fp32, the embedding is bf16
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({HEAD: zeros}))
    refusal(folder, NOT_A_COPY)
