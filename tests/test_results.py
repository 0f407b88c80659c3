"""A row survives its line and its file; a bad line costs only itself."""

import dataclasses
import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_durable import ORIGIN_ROW

import results
from command import run_one_of
from config import repro_command
from generate_config import GenerateConfig
from reporting.commands import COMMANDS
from results import COLUMNS, KINDS, Row, append, format_row, parse_row, read_rows

ROOT = Path(results.__file__).parent
LINE = (
    "schema=1, time=2026-11-30T09:14:02Z, kind=speed, status=ok, model=Meta-Llama-3.1-8B,"
    " k_format=int8, v_format=int8, depth=4096, decode_tok_s=217.13 tok/s, decode_ci_pct=0.04 %,"
    " ttft_s=0.036195 s, prefill_tok_s=14145.60 tok/s, peak_mem_gb=16.6924 GB,"
    " kv_cache_gb=0.3152 GB, device_name=NVIDIA H200,"
    " bandwidth_gb_s=3326.5 GB/s, mbu_pct=77.2 %, model_size_gb=16.0605 GB,"
    " weight_format=none, dtype=bfloat16, batch_size=1, prompt_len=512, new_tokens=128,"
    " cache_len=4736, prefill_chunk=2048, depth_fill=prefill, ignore_eos=True, compile=True,"
    " attention=triton, expected_gb=16.4628 GB, unexplained_gb=0.2296 GB, compile_s=41.307 s,"
    " torch=2.11.0+cu128, threads=16, commit=3c1f2ab, model_sha=5f0c9be1a7d2,"
    " prompt_sha=a41d7702c9e6, num_samples=5,"
    " ttft_samples_s=0.036212;0.036187;0.036240;0.036195;0.036171 s,"
    " decode_samples_s=0.584911;0.585204;0.584702;0.585038;0.584866 s, key={key},"
    " repro: python generate.py --checkpoint_path checkpoints/Meta-Llama-3.1-8B --device cuda"
    " --kv_cache_quantization --prompt_tokens 512 --depth 4096 --max_new_tokens 128"
    " --temperature 0.0 --ignore_eos --num_samples 5"
)
# By hand: the lines name=text of the settings, in order.
SETTINGS = (
    "schema=1\nkind=speed\nk_format=int8\nv_format=int8\ndepth=4096\nweight_format=none\n"
    "dtype=bfloat16\nbatch_size=1\nprompt_len=512\nnew_tokens=128\ncache_len=4736\n"
    "prefill_chunk=2048\ndepth_fill=prefill\nignore_eos=True\ncompile=True\n"
    "model_sha=5f0c9be1a7d2\nprompt_sha=a41d7702c9e6"
)
LINE = LINE.format(key=hashlib.sha256(SETTINGS.encode()).hexdigest()[:12])
ROW = parse_row(LINE)

CORE = (
    "schema time kind status error model k_format v_format reference text context kl_mean kl_se "
    "kl_floor ln_ppl_ratio ln_ppl_ratio_se ln_ppl_ratio_floor top1_pct top1_floor_pct rms_dp_pct "
    "rms_dp_floor_pct first_diff first_diff_floor ppl ppl_ref kl_p99 kl_max needle_change "
    "needle_change_se needle_change_floor needle_lost needle_nll needle_nll_ref needle_nll_none "
    "needle_nll_none_ref needle_place_pct needle_trials windows floor_windows scored score_width "
    "kv_bytes_per_token depth decode_tok_s decode_ci_pct ttft_s "
    "prefill_tok_s overall_tok_s peak_mem_gb kv_cache_gb device_name bandwidth_gb_s mbu_pct "
    "model_size_gb weight_format dtype batch_size prompt_len new_tokens cache_len prefill_chunk "
    "depth_fill ignore_eos compile attention expected_gb unexplained_gb check check_kl "
    "check_top1_pct compile_s torch threads "
    "commit model_sha prompt_sha num_samples section run round arm flags ttft_samples_s "
    "decode_samples_s key repro"
)
COMPARED = "decode_tok_s decode_ci_pct ttft_s prefill_tok_s peak_mem_gb kv_cache_gb"
NASTY = ["", " ", "a", "%", "%2C", ",", ", ", ";", "=", ", repro: ", "\n", "\r", "\t", "\0",
         "\u2028", "\u2029", "\x85", "é", "漢", "🦙", " <torn>", "schema=1", "'", '"']  # fmt: skip


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(NASTY, k=rng.randint(0, 4)))


MAKERS = {
    str: random_text,
    int: lambda rng: rng.choice([0, 1, rng.randrange(10**12)]),
    float: lambda rng: rng.choice([0.0, -0.00001, 1e-9, rng.uniform(-1, 1), rng.uniform(0, 1e9)]),
    bool: lambda rng: rng.random() < 0.5,
}


def random_row(rng: random.Random) -> Row:
    """Any legal row: every optional column is absent in about half of them."""
    values = {}
    for name, item in COLUMNS.items():
        make = MAKERS[KINDS[name]]
        if item.default == ():
            values[name] = tuple(make(rng) for _ in range(rng.randint(0, 3)))
        elif item.default is dataclasses.MISSING or rng.random() < 0.5:
            values[name] = make(rng)
    del values["key"]
    values["schema"] = 1
    settings = GenerateConfig(
        prompt="".join(rng.choices([t for t in NASTY if t.isprintable()], k=4)),
        write_result=Path("r.txt"),
    )
    return Row(**values | {"repro": repro_command("generate.py", settings)})


def test_the_columns_are_these_in_this_order():
    assert list(COLUMNS) == CORE.split()


def test_the_example_line_is_read_and_written_back():
    assert format_row(ROW) == LINE
    assert ROW.decode_samples_s[0] == 0.584911
    assert (ROW.error, ROW.flags, ROW.compile) == (None, (), True)


def test_a_row_read_back_is_the_same_row():
    rng = random.Random(11)
    for _ in range(2000):
        row = random_row(rng)
        line = format_row(row)
        assert parse_row(line) == row
        assert "\n" not in line
        assert not line.encode().endswith(results.TORN)


def test_a_row_read_back_from_json_is_the_same_row():
    rng = random.Random(12)
    for _ in range(1000):
        row = random_row(rng)
        document = json.loads(json.dumps(results.to_json(row)))
        assert list(document) == [name for name in COLUMNS if name in document]
        assert document.pop("key") == row.key
        assert Row(**document) == row


@pytest.mark.parametrize("device_name", ["NVIDIA H200", "Intel(R) Xeon(R) Processor"])
@pytest.mark.parametrize("kv_format", ["int8", "bfloat16"])
def test_a_row_is_short_and_its_compared_figures_come_first(device_name, kv_format):
    texts = {"model": "SmolLM2-135M-Instruct.Q4_1", "device_name": device_name}
    line = format_row(dataclasses.replace(ROW, **texts, k_format=kv_format, v_format=kv_format))
    assert len(line) < 1200
    names = re.findall(r", (\w+)=[^,]+(?=,)", line[:301])
    first, last = names.index("decode_tok_s"), names.index("kv_cache_gb")
    assert names[first : last + 1] == COMPARED.split()


def other_value(item: dataclasses.Field) -> object:
    """A value that the example row does not have in this column."""
    value = getattr(ROW, item.name)
    other = {str: "other", int: 99, float: 0.5, bool: value is not True}[KINDS[item.name]]
    return (other,) if item.default == () else other


@pytest.mark.parametrize("name", [name for name in COLUMNS if name not in ("key", "repro")])
def test_the_key_changes_with_settings_only(name):
    row = dataclasses.replace(ROW, **{name: other_value(COLUMNS[name])})
    assert row != ROW
    assert (row.key != ROW.key) == COLUMNS[name].metadata["column"].key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ttft_s": float("nan")}, "ttft_s: nan is not finite"),
        ({"decode_samples_s": (1.0, float("inf"))}, "decode_samples_s: inf is not finite"),
        ({"model": "a\udc80"}, "surrogates not allowed"),
        ({"repro": "python generate.py --prompt \udc80"}, "surrogates not allowed"),
        ({"repro": "python generate.py --prompt 'a\nb'"}, "holds a control character"),
    ],
)
def test_what_no_line_can_hold_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ROW, **values)


def test_floats_are_rounded_as_they_are_written():
    row = dataclasses.replace(ROW, decode_tok_s=217.126, unexplained_gb=-0.00001, compile_s=2)
    assert (row.decode_tok_s, row.compile_s) == (217.13, 2.0)
    assert "unexplained_gb=0.0000 GB" in format_row(row)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("depth=4096", "depth=x", "depth=x: not int"),
        ("depth=4096", "depth=4097", "the settings give"),
        ("ttft_s=0.036195 s", "ttft_s=0.036195 ms", "ttft_s=0.036195 ms: not float s"),
        ("ttft_s=0.036195 s", "ttft_s=nan s", "ttft_s: nan is not finite"),
        ("compile=True", "compile=yes", "compile=yes: not bool"),
        ("compile=True", "compiled=True", "compiled: unknown column"),
        ("commit=3c1f2ab", "commit=3c1f2ab, commit=3c1f2ab", "commit: twice"),
        ("status=ok, ", "", "status: missing"),
        (", repro: ", ", ", "repro: missing"),
        (", key=", ", commit=", "commit: twice"),
        ("schema=1", "schema=2", "reads schema 1"),
        ("model=Meta", "model=%ff", "model=%ff"),
        ("--depth 4096", "--depth -4", "repro: --depth -4: must be at least 0"),
        ("--depth 4096", "--help", "repro: --help: unknown flag"),
        ("--depth 4096", "--prompt 'x", "No closing quotation"),
        ("generate.py", "eval.py", "repro: command 512: must be one of kl, needle"),
        ("generate.py", "other.py", "repro: 'other.py' writes no rows; known: generate.py, eval"),
        ("--depth 4096", "--\x1b[31m", r"\x1b[31m"),
    ],
)
def test_a_bad_line_is_named_and_left_out(old, new, message, tmp_path, caplog, capsys):
    path = tmp_path / "rows.txt"
    assert old in LINE
    path.write_text(f"# title\n{LINE}\n{LINE.replace(old, new, 1)}\n\n{LINE}\n")
    assert read_rows(path) == [ROW, ROW]
    (warning,) = caplog.messages
    assert warning.startswith(f"{path}:3: ")
    assert message in warning
    assert run_one_of(COMMANDS, ["validate", str(path)]) == 2
    assert capsys.readouterr() == (f"{warning}\n", "")


def test_headings_torn_and_origin_lines_are_passed_over(tmp_path, caplog, capsys):
    path = tmp_path / "rows.txt"
    lines = [
        b"\xff title",
        b"",
        ORIGIN_ROW,
        LINE[:70].encode() + b" <torn>",
        LINE.encode(),
        ORIGIN_ROW,
    ]
    path.write_bytes(b"\n".join(lines))
    assert read_rows(path) == [ROW]
    assert caplog.messages == []
    assert run_one_of(COMMANDS, ["validate", str(path)]) == 0
    assert capsys.readouterr() == ("1 rows, 2 of torchao\n", "")


def test_an_unfinished_last_line_is_no_row(tmp_path, caplog):
    path = tmp_path / "rows.txt"
    path.write_text(f"{LINE}\n{LINE}")
    assert read_rows(path) == [ROW]
    assert caplog.messages == [f"{path}:2: torn, the newline is missing"]


def test_a_missing_results_file_is_named(tmp_path, capsys):
    path = tmp_path / "none.txt"
    assert run_one_of(COMMANDS, ["validate", str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: No such file or directory\n"


@pytest.mark.parametrize("length", range(1, len(LINE), 97))
def test_a_line_torn_anywhere_costs_only_itself(length, tmp_path, caplog):
    path = tmp_path / "rows.txt"
    path.write_text(f"{LINE}\n{LINE[:length]}")
    append(path, ROW)
    assert read_rows(path) == [ROW, ROW]
    assert caplog.messages == []


def test_the_command_runs_and_imports_no_torch(tmp_path):
    append(tmp_path / "rows.txt", ROW)
    program = (
        "import sys, command, reporting.commands\n"
        "code = command.run_one_of(reporting.commands.COMMANDS)\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "validate", str(tmp_path / "rows.txt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 rows\n", "")
