"""The sections of benchmarks.sh: each case is a command, and all that was promised is there."""

import pytest

from config import parse
from programs import PROGRAMS
from scripts.sweep_sections import MAX, SECTIONS, section_cases

DEVICES = ("cpu", "cuda", "mps")


def configs(name: str, device: str = "cpu", common=None, extra=()):
    """What the cases of a section ask for."""
    return [
        parse(PROGRAMS[case.program], ["128" if word == MAX else word for word in case.flags])
        for case in section_cases(name, device, common or {}, extra)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SECTIONS)
def test_every_case_of_a_section_is_a_command_and_no_two_are_one(name, device):
    cases = list(section_cases(name, device, {"device": device}))
    assert len(configs(name, device, {"device": device})) == len(set(cases)) == len(cases) > 0
    assert {config.device for config in configs(name, device, {"device": device})} == {device}


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "quality"])
def test_every_measured_case_has_a_plain_cache_and_an_int8_one(name):
    caches = [config.kv_cache_quantization for config in configs(name)]
    assert caches == ["bf16", "int8"] * (len(caches) // 2)
    assert all(config.ignore_eos and config.num_samples >= 3 for config in configs(name))


def test_weights_of_16_8_and_4_bits_meet_both_caches_at_two_depths():
    found = [(c.depth, c.quantization, c.kv_cache_quantization) for c in configs("weights")]
    assert found == [
        (depth, weights, cache)
        for depth in (0, 4096)
        for weights in ("none", "int8", "int4")
        for cache in ("bf16", "int8")
    ]


def test_kv_goes_up_to_the_context_in_one_shape():
    depths = [config.depth for config in configs("kv")][::2]
    assert depths == [0, 1024, 4096, 16384, 65536, 128]
    assert {(c.prompt_tokens, c.max_new_tokens) for c in configs("kv")} == {(512, 128)}
    last = list(section_cases("kv", "cpu", {}))[-1]
    assert MAX in last.flags


def test_million_goes_up_to_a_million_tokens_without_a_prefill():
    for device, model in (("cuda", "random:llama-3.1-8b"), ("cpu", "random:smollm2-4-layers")):
        found = configs("million", device)
        assert sorted({c.depth for c in found}) == [100_000, 200_000, 500_000, 1_000_000]
        assert {(c.checkpoint_path, c.depth_fill) for c in found} == {(model, "synthetic")}


def test_legacy_is_the_matrix_of_the_origin_and_a_small_model_beside_it_on_a_cpu():
    sizes = [8192, 16384, 32768, 65536, 131072]
    found = [(c.checkpoint_path, c.cache_size) for c in configs("legacy", "cuda")][::2]
    models = ["random:llama-2-7b", "random:llama-3-8b", "random:llama-3.1-8b"]
    assert found == [(model, size) for model in models for size in sizes]
    small = {c.checkpoint_path for c in configs("legacy", "cpu")} - set(models)
    assert small == {"random:smollm2-135m"}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_checkpoint_that_is_asked_for_replaces_all_others(name):
    found = configs(name, common={"checkpoint_path": "a model"})
    assert {config.checkpoint_path for config in found} == {"a model"}
    assert len(found) <= len(configs(name))


@pytest.mark.parametrize("name", SECTIONS)
def test_flags_behind_all_others_win(name):
    found = configs(name, extra=["--dtype", "float16", "--threads", "3"])
    assert {(config.dtype, config.threads) for config in found} == {("float16", 3)}
