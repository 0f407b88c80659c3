"""What a run of eval.py gives: a table or a document on stdout, progress on stderr, and a row."""

import dataclasses
import functools
import math
import shlex

import pytest
import torch
from checkpoint_kinds import TOKENIZER, WRITERS, tiny
from generate_process import Run

import eval as program
from command import run as run_command
from eval_config import EvalConfig
from kv_formats import FORMATS
from results import Row, format_row, read_rows
from scoring import Stream
from scripts.tiny_checkpoint import TINY, random_weights, write_hf

SMALL = ["--context", "100", "--scored", "40", "--windows", "3"]
NEEDLE = ["--context", "500", "--trials", "3"]
GROUPED = dataclasses.replace(TINY, hidden_size=96, intermediate_size=128)  # whole groups of 32
LOSSY = [name for name in FORMATS if name != "fp32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "a tiny model"
    return write_hf(folder, TINY, random_weights(TINY), files=TOKENIZER.hf_files)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "it's a text.txt"
    file.write_text("".join(f"Line {i * i} of the text, é.\n" for i in range(80)))
    return file


@pytest.fixture
def run_eval(checkpoint, text, capsys, caplog):
    """Runs eval.py on the tiny checkpoint, on one CPU thread."""

    def run(command, *flags, path=checkpoint) -> Run:
        words = [command, "--checkpoint_path", path, "--device", "cpu", "--threads", 1]
        words += ["--text", text] if command == "kl" else []
        threads = torch.get_num_threads()
        caplog.clear()
        try:
            code = run_command(program.main, EvalConfig, [str(word) for word in (*words, *flags)])
        finally:
            torch.set_num_threads(threads)
        captured = capsys.readouterr()
        messages = "".join(f"{message}\n" for message in caplog.messages)
        return Run(code, captured.out, messages + captured.err)

    return run


def test_kl_prints_each_figure_beside_its_floor_and_a_row(run_eval, checkpoint):
    run = run_eval("kl", *SMALL, "--kv_cache_quantization")
    assert (run.code, run.errors) == (0, [])
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["tested", "noise", "floor"]
    assert lines[1].startswith("KL, nats per token")
    row = run.row
    assert f"{row.kl_mean:.2e} ± " in lines[1]
    assert f"{row.kl_floor:.2e}" in lines[1]
    assert (row.kind, row.status, row.model, row.reference) == ("quality", "ok", checkpoint.name,
                                                               "cache")  # fmt: skip
    assert (row.k_format, row.v_format, row.dtype) == ("int8", "int8", "float32")
    assert row.text == "it's a text.txt"
    assert (row.context, row.scored, row.windows, row.floor_windows) == (100, 40, 3, 3)
    # 4 layers, 2 KV heads, K and V, 16 codes and a bf16 scale
    assert row.kv_bytes_per_token == 4 * 2 * 2 * (16 + 2)
    assert row.kv_cache_gb == round(256 * row.kv_bytes_per_token / 1e9, 4)
    assert math.log(row.ppl / row.ppl_ref) == pytest.approx(row.ln_ppl_ratio, abs=1e-5)
    assert row.decode_tok_s is None
    assert len(format_row(row)) < 1500
    assert "window 3 of 3: KL " in run.stderr


@pytest.mark.parametrize("name", LOSSY)
def test_no_lossy_cache_is_free(name, run_eval):
    row = run_eval("kl", *SMALL, "--kv_cache_quantization", name).row
    assert row.kl_mean > 10 * row.kl_floor
    assert 0 < row.kl_mean < row.kl_max


def test_k_and_v_are_judged_apart(run_eval):
    rows = [
        run_eval("kl", *SMALL, "--kv_cache_quantization", spec).row
        for spec in ("int8", "int8,fp32", "fp32,int8")
    ]
    both, k, v = (row.kl_mean for row in rows)
    assert 0 < max(k, v) < both < 2 * (k + v)


def test_the_reference_itself_shows_the_floor(run_eval):
    run = run_eval("kl", *SMALL)
    row = run.row
    assert "what is tested is the reference itself" in run.stderr
    assert (row.k_format, row.kl_mean, row.top1_pct) == ("fp32", row.kl_floor, 100)
    assert row.kl_mean < 1e-9
    assert row.ppl == pytest.approx(row.ppl_ref, abs=2e-4)


def test_arithmetic_of_16_bits_raises_the_floor(run_eval):
    rows = [run_eval("kl", *SMALL, "--dtype", dtype).row for dtype in ("float32", "bfloat16")]
    assert rows[0].kl_floor < 1e-9
    assert rows[1].kl_floor > 1e-7
    assert rows[1].k_format == "bf16"


@pytest.mark.parametrize("name", ["int8", "int4:32"])
def test_weights_are_judged_against_unquantised_ones(name, run_eval, tmp_path):
    path = write_hf(tmp_path, GROUPED, random_weights(GROUPED), files=TOKENIZER.hf_files)
    run_eval = functools.partial(run_eval, path=path)
    flags = [*SMALL, "--reference", "weights", "--quantization", name]
    row, cache_too = (
        run_eval("kl", *flags, *more).row for more in ([], ["--kv_cache_quantization"])
    )
    assert (row.reference, row.weight_format.partition(",")[0]) == ("weights", name)
    assert row.kl_mean > 10 * row.kl_floor
    assert cache_too.kl_mean != row.kl_mean
    assert cache_too.ppl_ref == row.ppl_ref
    same = run_eval("kl", *SMALL, "--quantization", name)  # its own weights, its own cache
    assert same.row.kl_mean == same.row.kl_floor


def test_the_floor_is_measured_on_as_many_windows_as_asked_for(run_eval):
    flags = [*SMALL, "--kv_cache_quantization"]
    one, all_three = (run_eval("kl", *flags, "--floor_windows", n) for n in (1, 3))
    assert one.row.floor_windows == 1
    assert one.row.kl_mean == all_three.row.kl_mean
    assert "window 2 of 3: KL tested" in one.stderr
    assert one.row.key == all_three.row.key


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind in ("meta", "gguf")])
def test_other_kinds_of_checkpoints_give_the_same_figures(kind, run_eval, tmp_path):
    flags = [*SMALL, "--kv_cache_quantization"]
    row, other = run_eval("kl", *flags).row, run_eval("kl", *flags, path=tiny(kind, tmp_path)).row
    assert other.prompt_sha == row.prompt_sha
    assert other.ppl == pytest.approx(row.ppl, rel=1e-3)
    assert other.kl_mean == pytest.approx(row.kl_mean, rel=0.05)


def test_json_prints_one_document_with_the_row_and_the_windows(run_eval):
    run = run_eval("kl", *SMALL, "--kv_cache_quantization", "--json")
    assert run.code == 0
    assert len(run.stdout.splitlines()) == 1
    document = run.document
    details = document.pop("details")
    assert document.pop("key") == run.row.key
    assert Row(**document) == run.row
    of_windows = [window["kl"] for window in details["windows"]]
    assert sum(of_windows) / 3 == pytest.approx(run.row.kl_mean, rel=1e-3)
    assert details["floor"]["kl_mean"] == pytest.approx(run.row.kl_floor, rel=1e-3)


@pytest.mark.parametrize("command", ["kl", "needle"])
def test_a_written_row_repeats_itself_to_the_same_figures(command, run_eval, tmp_path):
    file = tmp_path / "rows.txt"
    size = {"kl": SMALL, "needle": [*NEEDLE, "--places", "0,100", "--seed", "5"]}[command]
    first = run_eval(command, *size, "--kv_cache_quantization", "int8,bf16", "--write_result", file)
    [row] = read_rows(file)
    assert row == first.row
    script, *words = shlex.split(row.repro)[1:]
    assert (script, words[0]) == ("eval.py", command)
    code = run_command(program.main, EvalConfig, [*words, "--write_result", str(file)])
    assert code == 0
    rows = read_rows(file)
    figures = [
        {name: value for name, value in vars(each).items() if name not in ("time", "commit")}
        for each in rows
    ]
    assert figures[0] == figures[1]


def test_needle_prints_each_place_and_a_row(run_eval):
    run = run_eval("needle", *NEEDLE, "--kv_cache_quantization")
    assert (run.code, run.errors) == (0, [])
    row = run.row
    assert (row.kind, row.needle_place_pct, row.needle_trials) == ("needle", (10, 50, 90), 3)
    assert (row.text, row.windows, row.kl_mean) == (None, None, None)
    assert len(row.needle_nll) == len(row.needle_nll_ref) == 3
    means = [sum(of) / 3 for of in (row.needle_nll, row.needle_nll_ref)]
    assert row.needle_change == pytest.approx(means[0] - means[1], abs=2e-3)
    assert row.needle_change != 0
    assert abs(row.needle_change_floor) < 1e-4
    places = [line for line in run.stdout.splitlines() if line.startswith("needle at ")]
    assert [line.split()[2] for line in places] == ["10", "50", "90"]
    assert f"{row.needle_nll[1]:.3f}" in places[1]
    assert f"{row.needle_nll_ref[1]:.3f}" in places[1]


def test_a_longer_needle_text_has_another_key(run_eval):
    rows = [run_eval("needle", "--context", n, "--trials", "1").row for n in (500, 900)]
    assert rows[0].key != rows[1].key
    assert rows[0].prompt_sha != rows[1].prompt_sha


FAULTS = {
    "unknown format": (["--kv_cache_quantization", "int3"], "--kv_cache_quantization int3: give"),
    "unknown weights": (["--quantization", "int3"], "--quantization int3: 'int3' is not a weight"),
    "beyond the model": (["--context", "2000"], "--context 2000 and --scored 256: 2256 tokens"),
    "no text": (["--text", "nowhere.txt"], "--text nowhere.txt: No such file or directory"),
    "short text": (["--windows", "900"], "900 windows of 1792 + 256 need 232449"),
    "no window": (["--windows", "0"], "--windows 0: must be at least 1"),
    "wide step": (["--score_width", "17"], "--score_width 17: must be at most 16"),
    "other command": (["--trials", "3"], "--trials: has no effect on kl; leave it out"),
    "reference": (["--reference", "other"], "--reference other: must be one of cache, weights"),
    "folder of the row": (["--write_result", "/nowhere/rows.txt"], "cannot be written"),
    "checkpoint": (["--checkpoint_path", "nowhere"], "nowhere: no such file or folder"),
}
NEEDLE_FAULTS = {
    "text": (["--text", "sotu.txt"], "--text: has no effect on needle"),
    "no room": (["--context", "100"], "--context 100: has no room for the needle"),
    "beyond the model": (["--context", "2049"], "--context 2049: 2049 tokens exceed"),
    "places": (["--places", "10,101"], "--places 10,101: give whole numbers from 0 to 100"),
    "other digits": (
        ["--places", "10,\u0665\u0660"],
        "--places 10,\u0665\u0660: give whole numbers",
    ),
    "words": (["--places", "10,x"], "--places 10,x: give whole numbers"),
    "none": (["--places", ""], "--places : give whole numbers"),
}


@pytest.mark.parametrize(
    ("command", "fault"),
    [("kl", each) for each in FAULTS] + [("needle", each) for each in NEEDLE_FAULTS],
)
def test_a_bad_request_is_one_line_and_reads_no_weight(command, fault, run_eval, monkeypatch):
    flags, cause = (FAULTS if command == "kl" else NEEDLE_FAULTS)[fault]
    monkeypatch.setattr(program, "load_model", None)
    run = run_eval(command, *flags)
    assert (run.code, run.stdout) == (2, "")
    [line] = run.errors
    assert cause in line
    assert run.stderr == line + "\n"


def test_several_faults_are_told_together(run_eval):
    run = run_eval("kl", "--context", "9000", "--kv_cache_quantization", "int3", "--json")
    assert run.code == 2
    assert len(run.errors) == 2
    assert run.document["status"] == "error"


def test_what_does_not_fit_is_refused_with_its_parts(run_eval, monkeypatch):
    monkeypatch.setattr("machine.free_bytes", lambda device: 1000)
    run = run_eval("kl", *SMALL, "--kv_cache_quantization")
    assert run.code == 2
    [line] = run.errors
    assert "KV caches" in line
    assert line.endswith("0.0 MB free; a smaller --context needs less")


def decode_without_the_cache(self, ids, start):
    engine = self.engine
    x = engine.model(
        ids[None], torch.tensor([0]), [CausalOnly()] * len(engine.caches), past_len=start
    )
    return engine.model.logits(x[0])


class CausalOnly:
    def attend(self, q, k, v, *_):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


def test_a_cache_that_is_not_read_is_an_error_and_no_row(run_eval, monkeypatch, tmp_path):
    monkeypatch.setattr(Stream, "logits", torch.inference_mode()(decode_without_the_cache))
    file = tmp_path / "rows.txt"
    run = run_eval("kl", *SMALL, "--kv_cache_quantization", "--write_result", file)
    assert (run.code, run.stdout) == (1, "")
    assert "KL is exactly 0 though the formats differ: the cache was not read" in run.stderr
    assert read_rows(file) == []


def test_weights_that_lose_nothing_are_no_error(run_eval, monkeypatch):
    monkeypatch.setattr(program, "is_exact", lambda windows: True)
    flags = [*SMALL, "--reference", "weights", "--quantization", "int8"]
    assert run_eval("kl", *flags).code == 0
    assert run_eval("kl", *flags, "--kv_cache_quantization").code == 1


def test_an_interrupted_run_leaves_no_row(run_eval, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt("SIGINT")

    monkeypatch.setattr(program, "score_window", interrupt)
    file = tmp_path / "rows.txt"
    run = run_eval("kl", *SMALL, "--kv_cache_quantization", "--write_result", file)
    assert run.code == 130
    assert run.stderr.endswith("interrupted: SIGINT\n")
    assert file.read_text() == ""


def test_non_finite_logits_are_an_error(run_eval, tmp_path):
    weights = random_weights(TINY)
    weights["model.layers.0.mlp.down_proj.weight"][3, 3] = math.nan
    folder = write_hf(tmp_path / "nan", TINY, weights, files=TOKENIZER.hf_files)
    run = run_eval("kl", *SMALL, path=folder)
    assert run.code == 1
    assert "non-finite logits" in run.stderr
