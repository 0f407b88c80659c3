"""--quantization from its text to a loaded model, and what it refuses before anything is read."""

import dataclasses
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import TOKENIZER, CausalCache, tiny
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

import accounting
import quantize
from checkpoint import open_checkpoint
from checkpoint_gguf_header import read_header
from command import run
from config import UserError
from engine import load_model
from quantize import QuantizeConfig, Scheme, main, parse_scheme, planned_formats
from scripts.tiny_checkpoint import TINY, random_weights, write_gguf, write_hf
from weight_formats import LAYOUTS, WEIGHT_FORMATS, encode, gathered, parameter_shapes

pytest_plugins = ["generate_process"]

CPU = torch.device("cpu")
WIDE = dataclasses.replace(
    TINY, hidden_size=128, intermediate_size=256, head_dim=64, num_heads=4, num_kv_heads=2
)
TIED = dataclasses.replace(WIDE, tie_embeddings=True)
BIASED = dataclasses.replace(WIDE, qkv_bias=True)


@pytest.mark.parametrize(
    ("spec", "layers", "head"),
    [
        ("int8", "int8", "int8"),
        ("int8:64", "int8:64", "int8:64"),
        ("int4", "int4:32", "int8"),
        ("int4:128", "int4:128", "int8"),
        ("int4:64,int4", "int4:64", "int4:32"),
        ("int4,none", "int4:32", "none"),
        ("none", "none", "none"),
        ("none,int8", "none", "int8"),
    ],
)
def test_the_head_is_the_second_word_or_what_suits_the_layers(spec, layers, head):
    assert parse_scheme(spec) == Scheme(layers, head)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "int5",
        "int4:",
        "int4:16",
        "int4:x",
        "int8:48",
        "int8:0",
        "int4,",
        "q4_1",
        ",int8",
        "none:32",
    ],
)
def test_unknown_formats_are_refused_with_all_known_ones(spec):
    with pytest.raises(UserError) as caught:
        parse_scheme(spec)
    line = str(caught.value)
    assert line.startswith(f"--quantization {spec}")
    assert "\n" not in line
    assert line.endswith(
        "known: int8, int4, int8:32, int8:64, int8:128, int4:32, int4:64, int4:128, none"
    )


def test_a_third_word_is_refused():
    with pytest.raises(UserError, match="LAYERS,HEAD"):
        parse_scheme("int8,int8,int8")


def test_a_group_that_does_not_divide_the_channels_is_refused_with_layer_and_shape(tmp_path):
    config = dataclasses.replace(WIDE, hidden_size=96)
    loaded = open_checkpoint(write_hf(tmp_path / "a", config, random_weights(config)))
    with pytest.raises(UserError) as caught:
        planned_formats(loaded, parse_scheme("int4:64"))
    line = str(caught.value)
    assert line.startswith(
        "--quantization int4:64: layers.0.attention.qkv_proj.weight is [512, 96]"
    )
    assert line.endswith("take int4:32")
    assert planned_formats(loaded, parse_scheme("int4:32"))


def logits_of(model):
    tokens = torch.randint(TINY.vocab_size, (1, 24), generator=torch.Generator().manual_seed(4))
    caches = [CausalCache()] * model.config.num_layers
    with torch.inference_mode():
        x = model(tokens, torch.zeros(1, dtype=torch.long), caches, past_len=0)
        return model.logits(x)


def plain_logits(config, weights):
    """Of the dense weights that a quantised model stands for, in fp32."""
    from model import Transformer  # noqa: PLC0415

    model = Transformer(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    return logits_of(model)


def dequantised(weight, layout):
    scheme = WEIGHT_FORMATS[layout.partition(":")[0]]
    return encode(weight, scheme, LAYOUTS[layout].group).dequantize()


SPECS = ["int8", "int8:32", "int4", "int4:64", "int4:128,int4", "int8,none", "none,int8", "none"]
CONFIGS = {"untied": WIDE, "tied": TIED, "biased": BIASED}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_quantised_at_load_is_the_model_of_its_rounded_weights(spec, config, tmp_path):
    loaded = open_checkpoint(write_hf(tmp_path / "a", config, random_weights(config)))
    formats = planned_formats(loaded, parse_scheme(spec))
    model = load_model(loaded, CPU, torch.float32, formats)
    weights = dict(loaded.weights(CPU, torch.float32))
    rounded = {n: dequantised(w, formats[n]) if n in formats else w for n, w in weights.items()}
    expected = plain_logits(config, rounded)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [WIDE, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_a_gguf_file_are_kept_unless_another_format_is_asked_for(kind, config, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, config, random_weights(config), tensor_type=GGMLQuantizationType[kind])
    loaded = open_checkpoint(path)
    kept = load_model(loaded, CPU, torch.float32)
    assert accounting.weight_format(kept) == kind.lower()
    weights = dict(loaded.weights(CPU, torch.float32))
    expected = plain_logits(config, weights)
    torch.testing.assert_close(logits_of(kept), expected, rtol=1e-4, atol=1e-4)
    for spec, name in {"none": "fp32", "int4,int8": "int4:32,int8"}.items():
        formats = planned_formats(loaded, parse_scheme(spec))
        model = load_model(loaded, CPU, torch.float32, formats)
        assert accounting.weight_format(model) == name
        halves = {n: w.half() if n in formats else w for n, w in weights.items()}
        rounded = {n: dequantised(w, formats[n]) if n in formats else w for n, w in halves.items()}
        expected = plain_logits(config, rounded)
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("config", [WIDE, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sizes_are_those_of_the_tensors_and_a_tied_matrix_is_there_once(
    spec, config, dtype, tmp_path
):
    loaded = open_checkpoint(write_hf(tmp_path / "a", config, random_weights(config)))
    formats = planned_formats(loaded, parse_scheme(spec))
    model = load_model(loaded, CPU, dtype, formats)
    shapes = parameter_shapes(config)
    assert set(formats) <= {name for name, shape in shapes.items() if len(shape) == 2}
    sizes = accounting.stored_bytes(config, formats, dtype, CPU)
    assert accounting.model_size_bytes(model) == sum(sizes.values())
    unread = 0 if config.tie_embeddings else sizes["embed_tokens.weight"]
    assert accounting.weight_read_bytes(model) == sum(sizes.values()) - unread


def test_weights_that_cannot_be_quantised_are_refused_with_file_and_name(tmp_path):
    weights = random_weights(WIDE)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    loaded = open_checkpoint(write_hf(tmp_path / "a", WIDE, weights))
    formats = planned_formats(loaded, parse_scheme("int8"))
    with pytest.raises(UserError) as caught:
        load_model(loaded, CPU, torch.float32, formats)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'a'}: layers.1.mlp.down_proj.weight")
    assert "\n" not in line


def test_other_kinds_of_checkpoints_give_the_same_codes(tmp_path: Path):
    found = {}
    for kind in ("hf", "meta", "gguf"):
        loaded = open_checkpoint(tiny(kind, tmp_path / kind, WIDE))
        formats = planned_formats(loaded, parse_scheme("int4"))
        found[kind] = load_model(loaded, CPU, torch.bfloat16, formats).layers[1].attention.qkv_proj
    assert torch.equal(found["hf"].codes, found["meta"].codes)
    assert torch.equal(found["hf"].codes, found["gguf"].codes)


def run_command(*words):
    return run(main, QuantizeConfig, [str(word) for word in words])


@pytest.mark.parametrize(
    ("target", "flags", "cause"),
    [
        ("new", ["--quantization", "int5"], "'int5' is not a weight format"),
        ("new", ["--quantization", "none"], "leaves nothing to quantise"),
        ("new", ["--quantization", "int4:64"], "qkv_proj.weight is [160, 80]"),
        (".", [], "is not empty"),
    ],
)
def test_the_command_refuses_in_one_line_and_leaves_nothing(target, flags, cause, tmp_path, capsys):
    source = tiny("hf", tmp_path / "source")
    assert run_command(source, tmp_path / target, *flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert cause in line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_faults_of_the_checkpoint_and_of_its_tokenizer_are_told_together(tmp_path, capsys):
    source = tiny("hf", tmp_path / "source")
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_bytes(b"<html>")
    assert run_command(source, tmp_path / "new") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {source}/config.json: ")
    assert second.startswith(f"error: {source}/tokenizer.json: ")


def test_a_random_model_has_no_file_to_quantise(tmp_path, capsys):
    assert run_command("random:tiny", tmp_path / "new") == 2
    assert "generate.py --quantization" in capsys.readouterr().err


def test_weights_that_cannot_be_quantised_leave_no_folder(tmp_path, capsys):
    weights = random_weights(TINY)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = float("inf")
    source = write_hf(tmp_path / "source", TINY, weights, files=TOKENIZER.hf_files)
    assert run_command(source, tmp_path / "new") == 2
    assert "layers.1.mlp.down_proj.weight" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_generate_quantises_at_load_and_reads_the_written_folder(run_generate, tmp_path):
    source = tiny("hf", tmp_path / "source", WIDE)
    assert run_command(source, tmp_path / "q", "--quantization", "int4") == 0
    flags = ("--temperature", 0, "--max_new_tokens", 12, "--dtype", "float32")
    at_load = run_generate(*flags, "--quantization", "int4", path=source)
    from_file = run_generate(*flags, path=tmp_path / "q")
    dense = run_generate(*flags, path=source)
    assert at_load.stdout == from_file.stdout
    assert at_load.row.weight_format == from_file.row.weight_format == "int4:32,int8"
    assert dense.row.weight_format == "fp32"
    assert at_load.row.model_size_gb == from_file.row.model_size_gb < dense.row.model_size_gb
    assert "the slow path; leave out --no-compile" in at_load.stderr
    assert "slow path" not in dense.stderr


def test_a_compiled_step_runs_with_quantised_weights(run_generate, tmp_path):
    source = tiny("hf", tmp_path / "source", TIED)
    flags = ("--temperature", 0, "--max_new_tokens", 12, "--dtype", "float32", "--ignore_eos")
    flags += ("--quantization", "int4")
    compiled = run_generate(*flags, path=source, eager=False)
    assert compiled.code == 0, compiled.stderr
    assert "slow path" not in compiled.stderr
    assert compiled.stdout == run_generate(*flags, path=source).stdout


def test_a_bad_format_is_refused_beside_all_else_that_is_wrong(run_generate):
    run = run_generate("--quantization", "int3", "--prompt_file", "/nowhere")
    assert run.code == 2
    assert "--quantization int3" in run.stderr
    assert "/nowhere" in run.stderr


@pytest.mark.parametrize("shape", [(1, 64), (16, 64), (50, 128), (333, 40)])
@pytest.mark.parametrize("num_bytes", [1, 3000, 1 << 20])
def test_a_weight_is_laid_out_block_by_block_as_it_is_whole(shape, num_bytes, monkeypatch):
    monkeypatch.setattr(quantize, "BLOCK_BYTES", num_bytes)
    weight = encode(torch.randn(shape), WEIGHT_FORMATS["int8"], 0)
    blocks = [block.laid_out_for(CPU) for block in quantize.blocks_of(weight)]
    found = gathered(shape[0], blocks, torch.empty)
    assert found.shape == weight.shape
    assert all(map(torch.equal, found.parts, weight.laid_out_for(CPU).parts))


NUMBERS = {
    "tokenizer.ggml.padding_token_id": (GGUFValueType.INT32, -1),
    "tokenizer.ggml.seperator_token_id": (GGUFValueType.UINT64, 2**64 - 1),
    "tokenizer.x.negative": (GGUFValueType.INT64, -(2**40)),
    "tokenizer.x.large": (GGUFValueType.FLOAT64, 1e300),
    "tokenizer.x.truth": (GGUFValueType.BOOL, True),
    "tokenizer.x.text": (GGUFValueType.STRING, "é"),
}


def test_every_value_of_a_gguf_tokenizer_is_written_as_it_was(tmp_path):
    writer = GGUFWriter(tmp_path / "in.gguf", "llama")
    for key, (kind, value) in NUMBERS.items():
        writer.add_key_value(key, value, kind)
    writer.add_array("tokenizer.x.scores", [0.5, -1e9])
    writer.add_array("tokenizer.x.empty", [])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    values = read_header(tmp_path / "in.gguf")[0]
    quantize.write_gguf_header(tmp_path / "out.gguf", values)
    assert read_header(tmp_path / "out.gguf")[0] == values
