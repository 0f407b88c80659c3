"""Quantised checkpoints: written, read again, and refused where they are damaged."""

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from checkpoint_kinds import WRITERS, refusal
from gguf import GGMLQuantizationType
from test_quantize import BIASED, TIED, WIDE, logits_of

import accounting
import checkpoint_quantized
from checkpoint import open_checkpoint
from checkpoint_quantized import KEY, TOKENIZER_FOLDER, WEIGHTS_FILE
from checkpoint_summary import as_text, summarize
from engine import load_model
from model_config import ModelConfig, RopeScaling
from quantize import QuantizeConfig, main, parse_scheme, planned_formats
from scripts.tiny_checkpoint import random_weights, write_files, write_gguf, write_hf
from scripts.tiny_tokenizer import tiny_tokenizer

CPU = torch.device("cpu")
TOKENIZER = tiny_tokenizer(WIDE.vocab_size)
TEXT = "Hello 12\n  thé 🦙"


def written(source: Path, target: Path, spec: str) -> Path:
    main(QuantizeConfig(source=str(source), target=target, quantization=spec))
    return target


def source_of(kind: str, folder: Path, config: ModelConfig = WIDE) -> Path:
    path = WRITERS[kind](folder / "tiny", config, random_weights(config))
    if kind.startswith("meta"):  # shards are written without
        write_files(path, TOKENIZER.meta_files)
    return path


def check_same(source: Path, target: Path, spec: str) -> None:
    """The written checkpoint is that which is quantised at load: logits, sizes, tokens."""
    original, loaded = open_checkpoint(source), open_checkpoint(target)
    assert loaded.config == original.config
    formats = planned_formats(original, parse_scheme(spec))
    assert loaded.kept == formats
    for dtype in (torch.float32, torch.bfloat16):
        expected = load_model(original, CPU, dtype, formats)
        found = load_model(loaded, CPU, dtype)
        assert torch.equal(logits_of(found), logits_of(expected))
        assert accounting.weight_format(found) == accounting.weight_format(expected)
        assert accounting.model_size_bytes(found) == accounting.model_size_bytes(expected)
    ours, theirs = loaded.tokenizer(), original.tokenizer()
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert (ours.bos_id, ours.stop_ids) == (theirs.bos_id, theirs.stop_ids)
    assert ours.special_ids == theirs.special_ids


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_checkpoint_is_loaded_as_it_would_be_quantised(kind, tmp_path):
    source = source_of(kind, tmp_path)
    check_same(source, written(source, tmp_path / "q", "int4"), "int4")


@pytest.mark.parametrize("spec", ["int8", "int4:64", "int4:128,int4", "int8,none", "none,int8"])
@pytest.mark.parametrize("config", [WIDE, TIED, BIASED], ids=["untied", "tied", "biased"])
def test_every_format_is_loaded_as_it_would_be_quantised(spec, config, tmp_path):
    source = source_of("hf", tmp_path, config)
    check_same(source, written(source, tmp_path / "q", spec), spec)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="linear", factor=2.0),
        RopeScaling(kind="llama3", factor=8.0),
        RopeScaling(kind="yarn", factor=4.0, truncate=False),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_rope_scaling_is_in_the_file(scaling, tmp_path):
    config = dataclasses.replace(WIDE, rope_scaling=scaling, rope_theta=12345.6)
    source = source_of("hf", tmp_path, config)
    check_same(source, written(source, tmp_path / "q", "int8"), "int8")


def test_frequency_factors_are_in_the_file(tmp_path):
    config = dataclasses.replace(WIDE, rope_scaling=RopeScaling(kind="llama3", factor=8.0))
    source = source_of("gguf", tmp_path, config)
    assert open_checkpoint(source).config.rope_scaling.kind == "factors"
    check_same(source, written(source, tmp_path / "q", "int8"), "int8")


def test_float32_weights_that_stay_dense_stay_exact(tmp_path):
    weights = {name: w.float() + 1e-4 for name, w in random_weights(WIDE).items()}
    source = write_hf(tmp_path / "a", WIDE, weights, dtype=torch.float32, files=TOKENIZER.hf_files)
    check_same(source, written(source, tmp_path / "q", "int8,none"), "int8,none")


def test_kept_blocks_and_a_quantised_checkpoint_can_be_quantised_again(tmp_path):
    source = write_gguf(
        tmp_path / "a.gguf",
        WIDE,
        random_weights(WIDE),
        tensor_type=GGMLQuantizationType.Q4_1,
        fields=TOKENIZER.gguf_fields,
    )
    first = written(source, tmp_path / "q", "int4,int8")
    check_same(source, first, "int4,int8")
    check_same(first, written(first, tmp_path / "again", "int8"), "int8")
    check_same(first, written(first, tmp_path / "same", "int4,int8"), "int4,int8")
    one, two = (folder / WEIGHTS_FILE for folder in (first, tmp_path / "same"))
    assert one.read_bytes() == two.read_bytes()


def test_the_file_may_have_any_name(tmp_path):
    folder = written(source_of("hf", tmp_path), tmp_path / "q", "int4:128")
    (folder / WEIGHTS_FILE).rename(folder / "weights-g32.safetensors")
    assert open_checkpoint(folder).kept["layers.0.mlp.down_proj.weight"] == "int4:128"


def test_the_library_reads_the_file_and_its_parts_are_in_rows(tmp_path):
    folder = written(source_of("hf", tmp_path), tmp_path / "q", "int4")
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    loaded = open_checkpoint(folder)
    for name in loaded.kept:
        weight = loaded.read_kept(name)
        found = [tensors.pop(f"{name}.{p}", None) for p in ("codes", "scales", "mins")]
        assert all(map(torch.equal, weight.parts, filter(lambda part: part is not None, found)))
        assert not weight.is_tiled
    assert set(tensors) == set(loaded.sources()) - set(loaded.kept)


def test_dense_weights_are_made_block_by_block(tmp_path, monkeypatch):
    folder = written(source_of("hf", tmp_path), tmp_path / "q", "int4")
    loaded = open_checkpoint(folder)
    expected = dict(loaded.weights(CPU, torch.bfloat16))
    monkeypatch.setattr(checkpoint_quantized, "DENSE_BYTES", 5000)
    for name, weight in loaded.weights(CPU, torch.bfloat16):
        assert torch.equal(weight, expected[name])
        if name in loaded.kept:
            assert torch.equal(weight, loaded.read_kept(name).dequantize(torch.bfloat16))


def test_the_summary_shows_what_is_kept(tmp_path):
    loaded = open_checkpoint(written(source_of("hf", tmp_path), tmp_path / "q", "int4"))
    document = summarize(loaded, loaded.tokenizer())
    assert "kept int4:32,int8" in document["dtype"]
    assert "quantised by this tool" in as_text(document)


def rewrite(file: Path, change) -> None:
    """Change metadata and tensors of a written file."""
    tensors = safetensors.torch.load_file(file)
    with safetensors.safe_open(file, "pt") as opened:
        settings = json.loads(opened.metadata()[KEY])
    change(settings, tensors)
    safetensors.torch.save_file(tensors, file, metadata={KEY: json.dumps(settings)})


DOWN = "layers.0.mlp.down_proj.weight"
DAMAGE = {
    "version": lambda s, t: s.update(version=2),
    "version is True": lambda s, t: s.update(version=True),
    "config": lambda s, t: s.pop("config"),
    "formats": lambda s, t: s.update(formats=[]),
    "hidden_size": lambda s, t: s["config"].update(hidden_size="128"),
    "num_heads": lambda s, t: s["config"].pop("num_heads"),
    "num_spaces": lambda s, t: s["config"].update(num_spaces=1),
    "tie_embeddings": lambda s, t: s["config"].update(tie_embeddings=1),
    "100000 layers": lambda s, t: s["config"].update(num_layers=100000),
    "q5_0": lambda s, t: s["formats"].update({DOWN: "q5_0"}),
    "no matrix": lambda s, t: s["formats"].update({"layers.0.mlp_norm.weight": "int8"}),
    f"{DOWN}.codes": lambda s, t: s["formats"].pop(DOWN),
    f"{DOWN}.scales": lambda s, t: t.pop(f"{DOWN}.scales"),
    f"{DOWN}.mins": lambda s, t: t.update({f"{DOWN}.mins": t[f"{DOWN}.mins"].float()}),
    "of the wrong shape": lambda s, t: t.update({f"{DOWN}.codes": t[f"{DOWN}.codes"][1:]}),
    "unknown": lambda s, t: t.update(more=torch.zeros(3)),
    "missing": lambda s, t: t.pop("norm.weight"),
    "norm.weight": lambda s, t: t.update({"norm.weight": t["norm.weight"].to(torch.int8)}),
    "layout": lambda s, t: s["formats"].update({DOWN: "int4:64"}),
    "as a dense tensor too": lambda s, t: t.update({DOWN: torch.ones(128, 256)}),
}


@pytest.mark.parametrize("cause", DAMAGE)
def test_a_file_that_contradicts_itself_is_refused_in_one_line(cause, tmp_path):
    folder = written(source_of("hf", tmp_path), tmp_path / "q", "int4")
    rewrite(folder / WEIGHTS_FILE, DAMAGE[cause])
    refusal(folder, cause)


@pytest.mark.parametrize("width", [40, 68, 72, 80])
def test_channels_that_are_no_multiple_of_the_group_are_refused(width, tmp_path):
    config = dataclasses.replace(WIDE, hidden_size=width)
    folder = written(source_of("hf", tmp_path, config), tmp_path / "q", "int8")
    name = "layers.0.mlp.gate_up_proj.weight"

    def pretend(settings, tensors):
        num_rows = len(tensors[f"{name}.codes"])
        tensors[f"{name}.codes"] = torch.zeros(num_rows, width // 2, dtype=torch.uint8)
        for part in ("scales", "mins"):
            tensors[f"{name}.{part}"] = torch.ones(num_rows, width // 32).half()
        settings["formats"][name] = "int4:32"

    rewrite(folder / WEIGHTS_FILE, pretend)
    refusal(folder, f"{name} is 'int4:32'; but {width} channels are no multiple of 32")


@pytest.mark.parametrize("text", ["\ud800", '{"version": 1, "config": {"\ud800": 1}}'])
def test_metadata_that_is_no_text_is_refused(text, tmp_path):
    folder = written(source_of("hf", tmp_path), tmp_path / "q", "int8")
    data = (folder / WEIGHTS_FILE).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]) | {"__metadata__": {KEY: text}}
    changed = json.dumps(header).encode()
    start = len(changed).to_bytes(8, "little") + changed
    (folder / WEIGHTS_FILE).write_bytes(start + data[8 + size :])
    refusal(folder)


def test_a_tokenizer_that_is_missing_is_named(tmp_path):
    folder = written(source_of("hf", tmp_path), tmp_path / "q", "int4")
    (folder / TOKENIZER_FOLDER / "tokenizer.json").unlink()
    with pytest.raises(Exception, match=f"{folder / TOKENIZER_FOLDER}: no tokenizer.json"):
        open_checkpoint(folder).tokenizer()
