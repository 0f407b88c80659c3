"""Write one model as Hugging Face folder, Meta folder and GGUF file, for tests and comparisons.

    python scripts/tiny_checkpoint.py OUT_DIR                      a seeded 4-layer model
    python scripts/tiny_checkpoint.py OUT_DIR --source CHECKPOINT  an existing one, rounded to bf16

The weights are in memory once, under Hugging Face's names; see scripts/tiny_weights.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command import end_on_signals, run

if __name__ == "__main__":
    end_on_signals()  # before the imports that take a second

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file
from torch import Tensor

from checkpoint import Checkpoint, open_checkpoint
from config import MISSING, flag
from fetch import resolve
from model_config import ModelConfig, RopeScaling
from rope import rope_frequencies
from scripts.tiny_tokenizer import tiny_tokenizer, tokenizer_of
from scripts.tiny_weights import (
    TINY,
    interleaved_rows,
    random_weights,
    tensor_names,
    tensor_shape,
)


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Write a small seeded Llama, or an existing one, in all checkpoint formats."""

    out_dir: Path = flag(MISSING, help="folder for hf/, meta/ and model.gguf")
    source: str | None = flag(None, help="convert this checkpoint instead of making one up")
    tie_embeddings: bool = flag(False, help="no head of its own; a checkpoint decides for itself")
    seed: int = flag(0, help="of the made-up weights")
    gguf_type: str = flag(
        "BF16",
        choices=("BF16", "F16", "F32"),
        help="of matrices in model.gguf; elsewhere bf16",
    )


def weights_of(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The weights of an existing checkpoint under Hugging Face's names."""
    ours = dict(checkpoint.weights("cpu", dtype))
    weights = {}
    start = dict.fromkeys(ours, 0)
    for names in tensor_names(checkpoint.config):
        end = start[names.ours] + tensor_shape(checkpoint.config, names.hf)[0]
        weights[names.hf] = ours[names.ours][start[names.ours] : end].clone()
        start[names.ours] = end
    return weights


def write_hf(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_shards: int = 1,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """config.json, safetensors and the tokenizer's `files`; with more than one shard an index."""
    write_files(folder, files or {})
    write_json(folder / "config.json", hf_config(config))
    names = list(weights)
    shards = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    if num_shards == 1:
        shards = ["model.safetensors"]
    weight_map = {name: shards[i * num_shards // len(names)] for i, name in enumerate(names)}
    for shard in shards:
        tensors = {name: weights[name].to(dtype) for name in names if weight_map[name] == shard}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    if num_shards > 1:
        write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def architecture(config: ModelConfig) -> str:
    """The one that has the model's options, as Hugging Face calls it; in GGUF in small letters."""
    return "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias > config.o_bias else "Llama"


def hf_config(config: ModelConfig) -> dict[str, Any]:
    kind = architecture(config)
    settings = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias,
        "hidden_act": "silu",
    }
    if config.rope_scaling:
        settings["rope_scaling"] = hf_rope_scaling(config.rope_scaling)
    return settings


def hf_rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    if scaling.kind != "llama3":
        raise ValueError(f"config.json cannot hold rope scaling {scaling.kind!r}")
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def write_meta(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """params.json, consolidated.00.pth and the tokenizer's `files`; a tied head becomes a copy."""
    if config.qkv_bias or config.o_bias or config.qk_norm:
        raise ValueError("params.json cannot hold biases of attention, nor norms of q and k")
    if config.rope_scaling and config.rope_scaling.kind != "llama3":
        raise ValueError(f"params.json cannot hold rope scaling {config.rope_scaling.kind!r}")
    write_files(folder, files or {})
    params: dict[str, Any] = {
        "dim": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_seq_len": config.max_seq_len,
    }
    if config.rope_scaling:
        params |= {"use_scaled_rope": True, "rope_scaling_factor": config.rope_scaling.factor}
    write_json(folder / "params.json", params)
    tensors = {
        row.meta: interleaved_rows(weights[row.hf], config, row.hf) for row in tensor_names(config)
    }
    if config.tie_embeddings:
        tensors["output.weight"] = tensors["tok_embeddings.weight"].clone()
    torch.save(tensors, folder / "consolidated.00.pth")
    return folder


def write_gguf(
    file: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    tensor_type: GGMLQuantizationType = GGMLQuantizationType.BF16,
    fields: Mapping[str, Any] | None = None,
    max_tensors: int = 0,
) -> Path:
    """A .gguf file, or parts of at most `max_tensors`; norms are F32 whatever the matrices are.

    Args:
        fields: Metadata besides what the config gives, or instead of it; None leaves a key out.
    """
    name = architecture(config).lower()
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(file, name, split_max_tensors=max_tensors)
    adders: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in {**gguf_settings(config), **(fields or {})}.items():
        if value is not None:
            adders[type(value)](key, value)
    if config.rope_scaling and config.rope_scaling.kind != "linear":
        plain = rope_frequencies(replace(config, rope_scaling=None))
        writer.add_tensor("rope_freqs.weight", (plain / rope_frequencies(config)).numpy())
    for names in tensor_names(config):
        weight = weights[names.hf]
        if name == "llama":
            weight = interleaved_rows(weight, config, names.hf)
        data = weight.float().numpy()
        kind = tensor_type if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(names.gguf, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_settings(config: ModelConfig) -> dict[str, Any]:
    name = architecture(config).lower()
    settings: dict[str, Any] = {
        f"{name}.block_count": config.num_layers,
        f"{name}.attention.head_count": config.num_heads,
        f"{name}.attention.head_count_kv": config.num_kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.rope.dimension_count": config.head_dim,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.context_length": config.max_seq_len,
        f"{name}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{name}.rope.freq_base": config.rope_theta,
    }
    scaling = config.rope_scaling
    if scaling and scaling.kind == "linear":
        linear = {"type": "linear", "factor": scaling.factor}
        settings |= {f"{name}.rope.scaling.{key}": value for key, value in linear.items()}
    return settings


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2), encoding="utf-8")


def main(options: TinyConfig) -> None:
    if options.source is None:
        config = replace(TINY, tie_embeddings=options.tie_embeddings)
        weights, tokenizer = random_weights(config, options.seed), tiny_tokenizer(config.vocab_size)
    else:
        source = open_checkpoint(resolve(options.source))
        config, tokenizer = source.config, tokenizer_of(source)
        weights = weights_of(source, torch.float32)
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    write_hf(options.out_dir / "hf", config, rounded, files=tokenizer.hf_files)
    write_meta(options.out_dir / "meta", config, rounded, files=tokenizer.meta_files)
    write_gguf(
        options.out_dir / "model.gguf",
        config,
        weights,
        tensor_type=GGMLQuantizationType[options.gguf_type],
        fields=tokenizer.gguf_fields,
    )
    print(options.out_dir)


if __name__ == "__main__":
    sys.exit(run(main, TinyConfig))
