"""config.json: what would give another model, or makes no sense, is refused in a line naming it."""

import json
from pathlib import Path

import pytest
from checkpoint_kinds import edit_json, refusal, tiny
from hf_config_case import LINEAR, LLAMA3, YARN, changed, spoken

from checkpoint import open_checkpoint
from checkpoint_hf_config import ARCHITECTURES
from config import UserError
from model_config import RopeScaling


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["PhiForCausalLM"]),
        ("architectures", ["BaichuanForCausalLM"]),
        ("architectures", ["LlamaForCausalLM", "MistralForCausalLM"]),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", []),
        ("architectures", None),
        ("attention_bias", "yes"),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("sliding_window", 0),
        ("sliding_window", "4096"),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("layer_types", "full_attention"),
        ("partial_rotary_factor", 0.5),
        ("use_mrope", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("attention_multiplier", 0.0625),
        ("query_pre_attn_scalar", 256),
        ("embedding_multiplier", 12),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 8),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("num_local_experts", 8),
        ("hidden_size", None),
        ("hidden_size", "80"),
        ("hidden_size", 80.5),
        ("vocab_size", -1),
        ("num_hidden_layers", True),
        ("rms_norm_eps", 0),
        ("rope_theta", float("inf")),
        ("rope_theta", "10000"),
        ("rope_scaling", [1]),
        ("rope_parameters", "default"),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_setting_of_config_json_that_is_not_supported_is_named(
    key: str, value: object, tmp_path: Path
) -> None:
    folder = tiny("hf", tmp_path)
    edit_json(folder / "config.json", **{key: value})
    refusal(folder, f"config.json: {key} is {value!r};")


@pytest.mark.parametrize("key", ["hidden_size", "architectures", "max_position_embeddings"])
def test_a_missing_setting_is_named(key: str, tmp_path: Path) -> None:
    file = tiny("hf", tmp_path) / "config.json"
    settings = json.loads(file.read_text())
    del settings[key]
    file.write_text(json.dumps(settings))
    refusal(file.parent, f"config.json: {key} is missing;")


def test_another_architecture_is_refused_with_the_list_of_those_supported(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    edit_json(folder / "config.json", architectures=["BaichuanForCausalLM"])
    refusal(folder, "'BaichuanForCausalLM'", *ARCHITECTURES)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", 4, ["yarn"]])
def test_an_unknown_rope_type_is_named(
    section: str, spelling: str, kind: object, tmp_path: Path
) -> None:
    folder = tiny("hf", tmp_path)
    edit_json(folder / "config.json", **{section: {spelling: kind, "factor": 4.0}})
    refusal(folder, f"config.json: {spelling} is {kind!r};", "default, linear, llama3, yarn")


@pytest.mark.parametrize(
    ("rope", "cause"),
    [
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": 0.5}, "rope factor 0.5"),
        ({"type": "linear", "factor": "4"}, "factor is '4'"),
        ({"factor": 4.0}, "rope_type is missing"),
        ({"type": "linear", "rope_type": "yarn", "factor": 4.0}, "type is 'linear'"),
        (spoken(LLAMA3, low_freq_factor=None), "low_freq_factor is None"),
        (
            spoken(LLAMA3, high_freq_factor=1.0),
            "high_freq_factor 1.0 is not above low_freq_factor 1.0",
        ),
        (spoken(LLAMA3, low_freq_factor=5), "high_freq_factor 4.0 is not above low_freq_factor 5"),
        (spoken(LLAMA3, original_max_position_embeddings=None), "embeddings is None"),
        (spoken(YARN, original_max_position_embeddings=0), "embeddings is 0"),
        (spoken(YARN, original_max_position_embeddings=10**400), "OverflowError"),
        (spoken(YARN, factor=None), "factor is None"),
        (spoken(YARN, factor=1e308), "OverflowError"),
        (spoken(YARN, beta_fast=1, beta_slow=32), "beta_fast 1.0 is not above beta_slow 32.0"),
        (spoken(YARN, beta_fast=0), "beta_fast is 0"),
        (spoken(YARN, truncate="no"), "truncate is 'no'"),
        (spoken(YARN, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention is {"),
    ],
    ids=str,
)
def test_a_rope_object_that_is_not_clear_is_refused(
    rope: dict[str, object], cause: str, tmp_path: Path
) -> None:
    folder = tiny("hf", tmp_path)
    edit_json(folder / "config.json", rope_scaling=rope)
    refusal(folder, "config.json: ", cause)


def test_two_rope_objects_that_disagree_are_refused(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path)
    changes = {"rope_scaling": spoken(LINEAR), "rope_parameters": {"rope_type": "default"}}
    edit_json(folder / "config.json", **changes)
    refusal(folder, "config.json: rope_scaling is", "rope_parameters says something else")


def test_yarn_needs_a_theta_above_1(tmp_path: Path) -> None:
    folder = tiny("hf", tmp_path, changed(rope_scaling=YARN))
    edit_json(folder / "config.json", rope_theta=1)
    refusal(folder, "config.json: rope_theta 1.0: numbers above 1 are supported")


ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 2, 3.5, 1e308, 1e-308, 10**30, 10**400, float("nan")),
    *(float("inf"), "", "16", "a\nb", [], [1], [[]], {}, {"a": 1}, {"factor": 2.0}),
]


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN], ids=str)
def test_any_value_under_any_key_is_read_or_refused_in_one_line(
    kind: str, scaling: RopeScaling | None, tmp_path: Path
) -> None:
    folder = tiny("hf", tmp_path, changed(rope_scaling=scaling, qk_norm=kind[:4] == "Qwen"))
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | {"sliding_window": 9, "use_sliding_window": True}
    settings |= {"max_window_layers": 2, "layer_types": None, "rope_parameters": None}
    rope = {"mscale": 1.0, "mscale_all_dim": 1.0, **(settings.pop("rope_scaling", None) or {})}
    variants = [{**settings, key: odd} for key in settings for odd in ODD_VALUES]
    variants += [
        {**settings, "rope_scaling": {**rope, key: odd}} for key in rope for odd in ODD_VALUES
    ]
    num_refused = 0
    for variant in variants:
        file.write_text(json.dumps(variant))
        try:
            open_checkpoint(folder)
        except UserError as error:
            assert str(error).startswith(str(folder)), variant
            assert "\n" not in str(error), variant
            num_refused += 1
    assert len(variants) // 3 < num_refused < len(variants)
