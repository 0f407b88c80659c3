"""Checkpoints that are refused: one line that names the file, before any tensor is read."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import edit_json, refusal, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import open_checkpoint
from scripts.tiny_checkpoint import TINY, random_weights, write_gguf

TIED = dataclasses.replace(TINY, tie_embeddings=True)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def add_tensor(file: Path, name: str, tensor: Tensor) -> None:
    save_file({**load_file(file), name: tensor}, file)


# Settings


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 5},
        {"head_dim": 15},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**30},
        {"hidden_size": 2**40, "intermediate_size": 2**40},
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(changes: dict[str, int], tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    edit_json(folder / "config.json", **changes)
    refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.attention.value_length", 8),
        ("llama.rope.dimension_count", 8),
        ("llama.context_length", 0),
        ("llama.attention.causal", False),
        ("llama.attention.scale", 0.5),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.rope.scaling.attn_factor", 2.0),
        ("llama.logit_scale", 0.5),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 0),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_named(
    key: str, value: object, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "a.gguf", TINY, random_weights(TINY), fields={key: value})
    refusal(path, f"{key} is {value!r};")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe", {"num_experts": 8}),
        ("quantization_args", {"scheme": "int8_weight_int8_dynamic_activation"}),
        ("lora_args", {"rank": 16}),
        ("use_qk_norm", True),
        ("sliding_window", "8"),
    ],
)
def test_settings_of_params_json_that_are_not_supported_are_named(
    key: str, value: object, tmp_path: Path
) -> None:
    folder = tiny("meta", tmp_path)
    edit_json(folder / "params.json", **{key: value})
    refusal(folder, f"params.json: {key} is {value!r};")


def test_a_head_dim_that_the_weights_contradict_is_refused(tmp_path: Path) -> None:
    folder = tiny("meta", tmp_path)
    edit_json(folder / "params.json", head_dim=32)
    refusal(folder, "layers.0.attention.wq.weight (96, 80), not (192, 80)")


@pytest.mark.parametrize("length", [8, 2048, 4096])
def test_a_sliding_window_is_the_end_of_the_context_in_gguf_and_meta_too(
    length: int, tmp_path: Path
) -> None:
    folder = tiny("meta", tmp_path)
    edit_json(folder / "params.json", sliding_window=length)
    fields = {"llama.attention.sliding_window": length}
    file = write_gguf(tmp_path / "a.gguf", TINY, random_weights(TINY), fields=fields)
    for path in (folder, file):
        assert open_checkpoint(path).config.max_seq_len == min(length, TINY.max_seq_len)


def test_missing_gguf_metadata_is_named(tmp_path: Path) -> None:
    fields = {"llama.block_count": None}
    path = write_gguf(tmp_path / "a.gguf", TINY, random_weights(TINY), fields=fields)
    refusal(path, "llama.block_count is missing;")


def test_another_architecture_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    path = tiny("gguf", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
    refusal(path, "general.architecture is 'gemma'; supported are llama, qwen2, qwen3")


def test_text_from_a_file_cannot_break_the_line(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    edit_json(folder / "config.json", hidden_act="\n\x1b[31m" + "x" * 1000)
    message = refusal(folder, "hidden_act")
    assert "\x1b" not in message
    assert len(message) < len(str(folder)) + 400


# Sets of tensors


def test_missing_unknown_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for layer in range(4):
        del weights[f"model.layers.{layer}.self_attn.v_proj.weight"]
    weights["model.layers.0.self_attn.W_pack.weight"] = torch.zeros(2)
    weights[Q_PROJ] = torch.zeros(80, 96)
    save_file(weights, file)
    listed = ", ".join(f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(3))
    refusal(
        folder,
        f"tensors missing (4): {listed};",
        "tensors unknown (1): model.layers.0.self_attn.W_pack.weight;",
        f"tensors of the wrong shape (1): {Q_PROJ} (80, 96), not (96, 80);",
    )


def test_a_missing_head_of_an_untied_model_is_refused(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path, TIED)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    refusal(folder, "tensors missing (1): lm_head.weight;")


def test_rope_buffers_of_old_exports_are_left_out(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    add_tensor(folder / "model.safetensors", name, torch.zeros(8))
    assert len(dict(open_checkpoint(folder).weights("cpu", torch.float32))) == 27
    file = tiny("meta", tmp_path / "meta") / "consolidated.00.pth"
    torch.save({**torch.load(file), "rope.freqs": torch.zeros(8)}, file)
    assert len(dict(open_checkpoint(file.parent).weights("cpu", torch.float32))) == 27


def test_integers_are_no_weights(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    add_tensor(folder / "model.safetensors", "model.norm.weight", torch.ones(80).int())
    refusal(folder, "model.safetensors", "model.norm.weight is torch.int32")


# Sets of files


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny("hf-shards", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refusal(folder, "model.safetensors.index.json", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "", 3, [], None])
def test_an_index_names_plain_files_only(name: object, tmp_path: Path) -> None:
    folder = tiny("hf-shards", tmp_path)
    edit_json(folder / "model.safetensors.index.json", weight_map={"lm_head.weight": name})
    refusal(folder, "index.json", repr(name))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = tiny("hf-shards", tmp_path)
    add_tensor(folder / "model-00002-of-00003.safetensors", "lm_head.weight", torch.zeros(320, 80))
    refusal(folder, "lm_head.weight", "model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    ("kind", "left_out", "cause"),
    [
        ("hf", "config.json", "holds no config.json, params.json or .gguf file"),
        ("hf", "model.safetensors", "holds no safetensors file"),
        ("meta", "params.json", "holds no config.json, params.json or .gguf file"),
        ("meta", "consolidated.00.pth", "no consolidated.00.pth"),
    ],
)
def test_a_missing_file_is_named(kind: str, left_out: str, cause: str, tmp_path: Path) -> None:
    folder = tiny(kind, tmp_path)
    (folder / left_out).unlink()
    refusal(folder, cause)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path, "holds no config.json, params.json or .gguf file")


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path / "nowhere", "no such file or folder")
    refusal(tmp_path, "holds no config.json")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    refusal(tmp_path / "a.gguf", "is not a GGUF file")
    refusal(tmp_path, "holds 2 .gguf files")


@contextlib.contextmanager
def without_privileges(path: Path, mode: int) -> Iterator[None]:
    """Root may read everything: as nobody for a while, who may come up to `path`."""
    path.chmod(mode)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("kind", "name", "mode", "cause"),
    [
        ("hf", "", 0o000, "tiny: PermissionError: "),
        ("hf", "", 0o111, "tiny: PermissionError: "),
        ("meta", "", 0o444, "tiny: PermissionError: "),
        ("hf", "config.json", 0, "config.json: PermissionError: "),
        ("hf", "model.safetensors", 0, "model.safetensors: PermissionError: "),
        ("meta", "consolidated.00.pth", 0, "consolidated.00.pth: PermissionError: "),
        ("gguf", "", 0, "PermissionError: "),
    ],
)
def test_what_may_not_be_read_is_named(kind: str, name: str, mode: int, cause: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        path = tiny(kind, Path(folder))
        for file in Path(folder).glob("*/*"):  # the library of safetensors closes its files too
            file.chmod(0o644)
        with without_privileges(path / name, mode):
            refusal(path, cause)
