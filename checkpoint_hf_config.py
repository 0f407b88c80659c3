"""config.json of Hugging Face folders: which models are supported, and ModelConfig from its keys.

Every key that would change the forward pass is either read or refused by its name. Defaults and
precedence of spellings are those of transformers 5, models/*/configuration_*.py and
modeling_rope_utils.py.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpoint_fields import COMPLETE, Fields, refusing
from model_config import ModelConfig, RopeScaling

log = logging.getLogger("kv_fast")


@dataclass(frozen=True)
class Architecture:
    """How a supported architecture differs from Llama.

    Attributes:
        qkv_bias: q, k and v have a bias, o has none, whatever `attention_bias` says.
        reads_attention_bias: `attention_bias` gives q, k, v and o a bias.
        qk_norm: q and k have a norm per head.
        default_window: `sliding_window` where the file has no such key; null there means none.
        chooses_window: the window counts where `use_sliding_window` is true, in the layers that
            `layer_types` or else `max_window_layers` says.
    """

    qkv_bias: bool = False
    reads_attention_bias: bool = False
    qk_norm: bool = False
    default_window: int | None = None
    chooses_window: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(reads_attention_bias=True),
    "MistralForCausalLM": Architecture(default_window=4096),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, default_window=4096, chooses_window=True),
    "Qwen3ForCausalLM": Architecture(
        reads_attention_bias=True, qk_norm=True, default_window=4096, chooses_window=True
    ),
}
"""The only list of them: those whose forward pass is model.py's."""

# Settings that would make it another one, where they are not these; most are of close relatives.
REQUIRED_SETTINGS: dict[str, Any] = {
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "use_mrope": False,
    "quantization_config": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_experts": None,
    "num_local_experts": None,
}
LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_MAX_WINDOW_LAYERS = 28


def read_config(fields: Fields) -> ModelConfig:
    """ModelConfig of a config.json; what it leaves out has the defaults of its architecture.

    Raises:
        UserError: a setting is missing, senseless or not supported; the line names it.
    """
    with refusing(fields.file, (OverflowError,), COMPLETE):  # whole numbers beyond all floats
        return _read_config(fields)


def _read_config(fields: Fields) -> ModelConfig:
    architecture = read_architecture(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    check_attention_scale(fields, head_dim)
    theta, scaling = read_rope(fields)
    has_bias = architecture.reads_attention_bias and fields.boolean("attention_bias", default=False)
    return fields.model_config(
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=read_max_seq_len(fields, architecture, scaling),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=has_bias or architecture.qkv_bias,
        o_bias=has_bias,
        qk_norm=architecture.qk_norm,
    )


def read_architecture(fields: Fields) -> Architecture:
    names = fields.get("architectures")
    if names not in [[name] for name in ARCHITECTURES]:
        raise fields.error("architectures", f"supported are {', '.join(ARCHITECTURES)}")
    fields.require(REQUIRED_SETTINGS)
    return ARCHITECTURES[names[0]]


def check_attention_scale(fields: Fields, head_dim: int) -> None:
    """Scores are divided by the root of head_dim; relatives name another scale in these keys."""
    scales = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": float(head_dim)}
    for key, scale in scales.items():
        if not math.isclose(fields.number(key, scale), scale, rel_tol=1e-6):
            raise fields.error(key, f"attention is scaled by head_dim ** -0.5, hence {scale}")


# Lengths


def read_max_seq_len(
    fields: Fields, architecture: Architecture, scaling: RopeScaling | None
) -> int:
    """The context up to which attention is exact.

    Under yarn `max_position_embeddings` may still be the length before scaling.
    """
    length = fields.integer("max_position_embeddings")
    if scaling and scaling.kind == "yarn":
        length = max(length, int(scaling.factor * scaling.original_max_seq_len))
    if not has_window(fields, architecture):
        return length
    return fields.within_window(length, "sliding_window", architecture.default_window)


def has_window(fields: Fields, architecture: Architecture) -> bool:
    """Whether `sliding_window` counts in some layer."""
    layer_types = fields.get("layer_types", [])
    if not isinstance(layer_types, list) or not all(kind in LAYER_TYPES for kind in layer_types):
        raise fields.error("layer_types", f"supported are {', '.join(LAYER_TYPES)}")
    return not architecture.chooses_window or uses_window(fields, layer_types)


def uses_window(fields: Fields, layer_types: list[str]) -> bool:
    if not fields.boolean("use_sliding_window", default=False):
        return False
    if layer_types:
        return "sliding_attention" in layer_types
    first = fields.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    if type(first) is not int:
        raise fields.error("max_window_layers", "a whole number is needed")
    return first < fields.integer("num_hidden_layers")


# Rope


def read_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, spelled `rope_theta` + `rope_scaling` or, later, `rope_parameters`."""
    rope = rope_section(fields)
    theta = read_theta(fields, rope)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "only rope over whole heads is supported")
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(key)
    if kind is None:
        if rope.get("factor", 1.0) != 1.0:
            raise rope.error("rope_type", "a factor without a type is not clear")
        return theta, None
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise rope.error(key, f"supported rope types are {', '.join(ROPE_TYPES)}")
    return theta, ROPE_TYPES[kind](fields, rope)


def rope_section(fields: Fields) -> Fields:
    """The one object that describes rope, empty where there is none."""
    sections = [fields.section(key) for key in ("rope_parameters", "rope_scaling")]
    new, old = (section or Fields(fields.file, {}) for section in sections)
    if new.values and old.values and new.values != old.values:
        raise fields.error("rope_scaling", "rope_parameters says something else; remove one")
    rope = new if new.values else old
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.error(key, "only one rope for all layers is supported")
    if rope.get("type", rope.get("rope_type")) != rope.get("rope_type", rope.get("type")):
        raise rope.error("type", "rope_type says something else; remove one")
    return rope


def read_theta(fields: Fields, rope: Fields) -> float:
    for section in (rope, fields):
        if section.get("rope_theta") is not None:
            return section.number("rope_theta")
    log.info("%s: rope_theta is missing, 10000 is taken", fields.file)
    return 10000.0


def linear_scaling(_: Fields, rope: Fields) -> RopeScaling:
    return RopeScaling(kind="linear", factor=rope.number("factor"))


def llama3_scaling(fields: Fields, rope: Fields) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_seq_len=original_max_seq_len(fields, rope),
    )


def yarn_scaling(fields: Fields, rope: Fields) -> RopeScaling:
    factor = rope.number("factor")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=original_max_seq_len(fields, rope),
        attention_factor=rope.number("attention_factor", yarn_attention_factor(rope, factor)),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", default=True),
    )


def yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Square root of YaRN's 1 / t (section 3.3), as it scales q and k; DeepSeek's is a ratio."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return magnitude(1.0)
    return magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))


def original_max_seq_len(fields: Fields, rope: Fields) -> int:
    """The context before scaling; a value outside the rope object goes first."""
    key = "original_max_position_embeddings"
    return fields.integer(key) if fields.get(key) is not None else rope.integer(key)


ROPE_TYPES: dict[str, Callable[[Fields, Fields], RopeScaling | None]] = {
    "default": lambda fields, rope: None,
    "linear": linear_scaling,
    "llama3": llama3_scaling,
    "yarn": yarn_scaling,
}
