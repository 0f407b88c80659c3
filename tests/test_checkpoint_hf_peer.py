"""Hugging Face folders against transformers, which never is a requirement: fp32 logits.

Runs where transformers 5 can be imported, or where TRANSFORMERS_PYTHON names the interpreter of an
environment that has it (pip install torch==2.13.0 transformers==5.24.0); else all are skipped.
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import edit_json, loaded_logits
from checkpoint_shards import pickle_hf
from material import default_model
from plain_llama import plain_logits
from safetensors.torch import load_file
from torch import Tensor

from checkpoint import open_checkpoint
from model import Transformer
from model_config import ModelConfig
from scripts.tiny_checkpoint import TINY, random_weights, weights_of, write_hf

SCRIPT = Path(__file__).with_name("transformers_logits.py")
PYTHON = os.environ.get("TRANSFORMERS_PYTHON") or (
    sys.executable if importlib.util.find_spec("transformers") else None
)
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="no transformers here: TRANSFORMERS_PYTHON names no interpreter with it"
)

# 6 heads, 2 KV heads, head_dim 32 where hidden_size / num_heads, which must be whole there, is 16.
BASE = dataclasses.replace(TINY, hidden_size=96, head_dim=32)
QWEN2 = dataclasses.replace(BASE, head_dim=16, qkv_bias=True)  # transformers knows no other there
QWEN3 = dataclasses.replace(BASE, qk_norm=True)
IDS = torch.randint(BASE.vocab_size, (300,), generator=torch.Generator().manual_seed(2))
WINDOW = 100

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 0.7}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 32}


def old(rope: Mapping[str, object]) -> dict[str, object]:
    """Spelled as before transformers 4.43: `type`, theta outside."""
    values = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    return {"rope_scaling": values, "rope_theta": 5e4}


def new(rope: Mapping[str, object]) -> dict[str, object]:
    """Spelled as transformers 5 does."""
    return {"rope_parameters": {**rope, "rope_theta": 5e4}, "rope_theta": None}


CASES: dict[str, tuple[ModelConfig, dict[str, object]]] = {
    "default": (BASE, {}),
    "default, new spelling": (BASE, new({"rope_type": "default"})),
    "tied": (dataclasses.replace(BASE, tie_embeddings=True), {}),
    "one KV head": (dataclasses.replace(BASE, num_kv_heads=1), {}),
    "linear, old spelling": (BASE, old(LINEAR)),
    "linear, new spelling": (BASE, new(LINEAR)),
    "llama3, old spelling": (BASE, old(LLAMA3)),
    "llama3, new spelling": (BASE, new(LLAMA3)),
    "yarn, old spelling": (BASE, old(YARN)),
    "yarn, new spelling": (BASE, new(YARN)),
    "yarn with DeepSeek's factors": (BASE, new(YARN | DEEPSEEK)),
    "yarn with own numbers": (
        BASE,
        new(YARN | {"attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0}),
    ),
    "yarn without truncation": (BASE, new(YARN | {"truncate": False})),
    "Llama with biases": (dataclasses.replace(BASE, qkv_bias=True, o_bias=True), {}),
    "Mistral": (BASE, MISTRAL | {"sliding_window": None}),
    "Mistral with a window": (BASE, MISTRAL | {"sliding_window": WINDOW}),
    "Qwen2": (QWEN2, {"use_sliding_window": False, "sliding_window": WINDOW}),
    "Qwen2 with a window in some layers": (
        QWEN2,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "Qwen2 with yarn": (QWEN2, old(YARN)),
    "Qwen3": (QWEN3, {}),
    "Qwen3 with biases": (dataclasses.replace(QWEN3, qkv_bias=True, o_bias=True), {}),
    "Qwen3 with yarn": (QWEN3, new(YARN)),
    "bin": (BASE, {}),
    "bin, tied": (dataclasses.replace(BASE, tie_embeddings=True), {}),
}


def run_peer(
    ids: Mapping[Path, Tensor], scratch: Path, attention: str = "eager"
) -> dict[Path, Tensor]:
    """By transformers: logits [N, V] after each of a folder's ids [N]."""
    requests, out = scratch / "ids.json", scratch / "logits.safetensors"
    requests.write_text(json.dumps({str(folder): each.tolist() for folder, each in ids.items()}))
    assert PYTHON
    subprocess.run([PYTHON, str(SCRIPT), attention, str(requests), str(out)], check=True)
    return {Path(folder): logits for folder, logits in load_file(out).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, (config, changes) in CASES.items():
        folders[name] = tmp_path_factory.mktemp("peer") / "tiny"
        write_hf(folders[name], config, random_weights(config))
        edit_json(folders[name] / "config.json", **changes)
        if name.startswith("bin"):
            pickle_hf(folders[name])
    return folders


@pytest.fixture(scope="module")
def peer_logits(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    """By transformers, [N, V] of each case."""
    requests = dict.fromkeys(folders.values(), IDS)
    logits = run_peer(requests, tmp_path_factory.mktemp("peer"))
    return {name: logits[folder] for name, folder in folders.items()}


@pytest.mark.parametrize("name", [name for name in CASES if "a window" not in name])
def test_logits_far_beyond_the_original_context_are_those_of_transformers(
    name: str, folders: dict[str, Path], peer_logits: dict[str, Tensor]
) -> None:
    difference = (loaded_logits(folders[name], IDS[None])[0] - peer_logits[name]).abs().max()
    print(f"{name}: {difference:.1e}")
    assert difference < 1e-4


@pytest.mark.parametrize("name", [name for name in CASES if "a window" in name])
def test_up_to_the_window_logits_are_those_of_transformers_and_not_beyond(
    name: str, folders: dict[str, Path], peer_logits: dict[str, Tensor]
) -> None:
    differences = (loaded_logits(folders[name], IDS[None])[0] - peer_logits[name]).abs().amax(-1)
    print(f"{name}: {differences[:WINDOW].max():.1e}, one further {differences[WINDOW]:.1e}")
    assert differences[:WINDOW].max() < 1e-4
    assert differences[WINDOW] > 1e-3


@pytest.mark.network
@pytest.mark.slow
def test_logits_of_the_default_model_are_as_near_to_fp64_as_those_of_transformers(
    tmp_path: Path,
) -> None:
    source = open_checkpoint(default_model())
    weights = weights_of(source)
    folder = write_hf(tmp_path / "default", source.config, weights)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(source.config.vocab_size, (1, 300), generator=generator)
    exact = plain_logits(source.config, weights, ids[0])
    ours, peer = loaded_logits(folder, ids)[0], run_peer({folder: ids[0]}, tmp_path)[folder]
    error, peer_error = ((each - exact).square().mean().sqrt() for each in (ours, peer))
    print(f"default model, rms off fp64: {error:.1e}, transformers {peer_error:.1e}")
    print(
        f"logits up to {exact.abs().max():.0f}, largest difference {(ours - peer).abs().max():.1e}"
    )
    assert peer_error < 1e-6 * exact.abs().max()  # no more than fp32 rounds away
    assert error < 1.5 * peer_error


def rope_in_fp32(model: Transformer, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`Transformer._rope` of plain frequencies, with angles rounded as transformers rounds them."""
    exponents = torch.arange(0, model.config.head_dim, 2).float() / model.config.head_dim
    angles = positions[..., None].float() * (1.0 / model.config.rope_theta**exponents)
    return angles.cos(), angles.sin()


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("seed", [9, 11])
def test_only_the_exactness_of_rope_tells_the_default_model_from_that_of_transformers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 seeds the two whose logits differ most, by up to 4e-4, as those of transformers do from
    fp64 and its two kinds of attention from each other."""
    source = open_checkpoint(default_model())
    folder = write_hf(tmp_path / "default", source.config, weights_of(source))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(source.config.vocab_size, (1, 300), generator=generator)
    peer = run_peer({folder: ids[0]}, tmp_path, "sdpa")[folder]
    monkeypatch.setattr(Transformer, "_rope", rope_in_fp32)
    difference = (loaded_logits(folder, ids)[0] - peer).abs().max()
    print(f"seed {seed}: {difference:.1e}")
    assert difference < 1e-4
    shutil.rmtree(tmp_path)
