"""Rows that torchao's benchmark published are read, malformed ones reported, none dropped."""

import pytest
from test_results import LINE

from command import run_one_of
from reporting.commands import COMMANDS
from reporting.origin import parse_origin, scan_origin
from results import RowError

CLEAN = (
    "20240831225155, tok/s=107.38, mem/s=1418.93 GB/s, peak_mem=13.88 GB, model_size=13.21 GB"
    " quant: None, mod: Llama-2-7b-chat-hf, kv_quant: False, compile: True, compile_prefill: False,"
    " dtype: torch.bfloat16, device: cuda repro: python generate.py --checkpoint_path"
    " ../../../checkpoints/meta-llama/Llama-2-7b-chat-hf/model.pth --device cuda --precision"
    " torch.bfloat16 --compile --num_samples 5 --max_new_tokens 200 --top_k 200 --temperature 0.8"
)
GLUED = (
    "20240826161747, tok/s= 13.52, mem/s= 202.96 GB/s, peak_mem=17.52 GB, model_size=15.01 GB"
    " quant: None, mod: Meta-Llama-3.1-8B, kv_quant: True, compile: False, compile_prefill: False,"
    " dtype: torch.bfloat16, device: cuda repro: python generate.py --checkpoint_path"
    " ../../../checkpoints/meta-llama/Meta-Llama-3.1-8B/model.pth --num_samples 5"
    " --max_new_tokens 200 --cache_size 8192--kv_cache_quantization"
)
OLD = (
    "20240619231444, tok/s= 29.85, mem/s= 394.49 GB/s, peak_mem=nan GB, model_size=13.21 GB"
    " quant: int8wo, mod: Llama-2-7b-chat-hf, device: xpu"
)


def test_a_clean_row_is_read():
    row = parse_origin(CLEAN)
    assert (row.time, row.status, row.flags) == ("2024-08-31T22:51:55Z", "ok", ("origin",))
    assert (row.overall_tok_s, row.peak_mem_gb) == (107.38, 13.88)
    assert (row.model, row.k_format, row.v_format) == ("Llama-2-7b-chat-hf", "bf16", "bf16")
    assert (row.weight_format, row.dtype, row.device_name) == ("None", "bfloat16", "cuda")
    assert (row.compile, row.new_tokens, row.cache_len) == (True, 200, None)
    assert row.decode_tok_s is None  # theirs has the prefill in it
    assert row.repro.startswith("python generate.py --checkpoint_path ../../../checkpoints/")


def test_flags_that_were_published_glued_together_are_taken_apart():
    row = parse_origin(GLUED)
    assert (row.overall_tok_s, row.k_format, row.cache_len) == (13.52, "int8", 8192)
    assert row.repro.endswith(" --cache_size 8192 --kv_cache_quantization")


def test_missing_names_and_nan_are_absent():
    row = parse_origin(OLD)
    assert (row.peak_mem_gb, row.k_format, row.compile, row.repro) == (None, None, None, "")
    assert (row.overall_tok_s, row.weight_format, row.device_name) == (29.85, "int8wo", "xpu")


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("107.38", "fast", "tok/s=fast: not a number"),
        ("13.88", "13.8.8", "peak_mem=13.8.8: not a number"),
        ("compile: True", "compile: maybe", "compile: maybe: neither True nor False"),
        ("kv_quant: False", "kv_quant: int8", "kv_quant: int8: neither True nor False"),
        ("20240831", "20249931", "20249931225155: not a time"),
        ("mod: Llama", "mod: \x1b[31mLlama\x00", ""),
    ],
)
def test_a_malformed_row_is_reported_with_its_line_or_read(old, new, cause, tmp_path, capsys):
    path = tmp_path / "rows.txt"
    path.write_text(f"a heading\n{CLEAN}\n{CLEAN.replace(old, new, 1)}\n{LINE}\n{GLUED}")
    entries = list(scan_origin(path))
    assert len(entries) == 3
    bad = [entry for entry in entries if isinstance(entry, RowError)]
    assert len(bad) == bool(cause)
    code = run_one_of(COMMANDS, ["validate", str(path)])
    out = capsys.readouterr().out
    if cause:
        assert str(bad[0]).startswith(f"{path}:3: row of torchao: {cause}")
        assert (code, out) == (2, f"{bad[0]}\n")
    else:
        assert (code, out) == (0, "1 rows, 3 of torchao\n")
