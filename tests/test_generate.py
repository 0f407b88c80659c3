"""What a run of generate.py gives: text on stdout, progress on stderr, and a row."""

import dataclasses
import json
import re
import shlex
from functools import partial

import pytest
import torch
from checkpoint_kinds import TOKENIZER, edit_json

import generate
from generate_config import GenerateConfig
from results import Row, read_rows
from scripts.tiny_checkpoint import TINY, random_weights, write_hf
from tokenizer import open_tokenizer

pytest_plugins = ["generate_process"]

PROMPT = GenerateConfig.prompt
EXACT = ("--dtype", "float32", "--temperature", "0")  # no rounding decides which id is next


@pytest.fixture(scope="module")
def stopping_checkpoint(tmp_path_factory):
    """Half of its ids end a text."""
    folder = tmp_path_factory.mktemp("checkpoint") / "stopping"
    end_ids = {"generation_config.json": json.dumps({"eos_token_id": list(range(160))}).encode()}
    files = {**TOKENIZER.hf_files, **end_ids}
    return write_hf(folder, TINY, random_weights(TINY), files=files)


@pytest.fixture(scope="module")
def streamed(run_generate):
    return run_generate(*EXACT, "--max_new_tokens", 20)


@pytest.fixture(scope="module")
def as_json(run_generate):
    return run_generate(*EXACT, "--max_new_tokens", 20, "--json")


def test_stdout_is_the_prompt_and_its_text_and_stderr_holds_the_row(streamed, as_json):
    assert streamed.code == 0
    assert streamed.stdout == as_json.document["texts"][0] + "\n"
    assert streamed.stdout.startswith(PROMPT)
    assert "\x1b" not in streamed.stderr
    row = streamed.row
    assert (row.model, row.status, row.depth) == ("a tiny model", "ok", 0)
    assert row.prompt_len == 1 + len(PROMPT)
    assert "streamed" in row.flags


def test_json_prints_one_document_with_the_fields_of_the_row(as_json):
    assert as_json.code == 0
    assert len(as_json.stdout.splitlines()) == 1
    fields, row = as_json.document, as_json.row
    assert len(fields.pop("texts")) == 1
    assert fields.pop("key") == row.key
    assert Row(**fields) == row
    assert "streamed" not in row.flags


def test_progress_names_the_cache_the_kernel_and_the_stop_ids(run_generate, streamed, checkpoint):
    quantised = run_generate("--kv_cache_quantization", "--max_new_tokens", 2)
    # 4 layers, 2 KV heads, 128 slots, 16 values for K and for V
    shape = "[1, 2, 128, 16], 0.0 MB data + 0.0 MB scales (bf16: 0.1)"
    assert f"4 layers of K int8, V int8 {shape}, attention: " in quantised.stderr
    stop_ids = open_tokenizer(checkpoint).stop_ids
    assert stop_ids
    assert f"stop ids: {', '.join(map(str, sorted(stop_ids)))}\n" in streamed.stderr


def test_a_written_row_repeats_itself_to_the_same_key_and_text(run_generate, tmp_path):
    file = tmp_path / "results.txt"
    file.write_text("A heading\n")
    flags = [*EXACT, "--prompt", 'it\'s "so"', "--max_new_tokens", 12, "--write_result", file]
    first = run_generate(*flags)
    [row] = read_rows(file)
    assert row == first.row
    script, *words = shlex.split(row.repro)[1:]
    assert script == "generate.py"
    again = run_generate(*words, "--write_result", file)
    rows = read_rows(file)
    assert [row.key for row in rows] == [first.row.key] * 2
    assert again.row.repro == row.repro
    assert again.stdout == first.stdout
    assert file.read_text().startswith("A heading\nschema=1, ")
    assert "streamed" not in row.flags


def test_a_sample_has_the_text_of_its_seed_whatever_was_before(run_generate):
    flags = ["--max_new_tokens", 10, "--dtype", "float32", "--ignore_eos", "--json"]
    texts = run_generate(*flags, "--seed", 5, "--num_samples", 3).document["texts"]
    assert len(set(texts)) == 3
    assert run_generate(*flags, "--seed", 7).document["texts"] == texts[2:]
    assert run_generate(*flags, "--seed", 5, "--num_samples", 3).document["texts"] == texts


def test_several_samples_are_printed_one_after_the_other(run_generate):
    flags = [*EXACT, "--max_new_tokens", 4]
    one, two = run_generate(*flags), run_generate(*flags, "--num_samples", 2)
    assert two.stdout == 2 * one.stdout
    assert len(two.row.ttft_samples_s) == 2


def test_an_end_token_ends_the_text_unless_it_is_ignored(run_generate, stopping_checkpoint):
    run = partial(run_generate, *EXACT, "--max_new_tokens", 40, path=stopping_checkpoint)
    stopped, ignored = run(), run("--ignore_eos")
    assert 1 <= stopped.row.new_tokens < 40
    assert ignored.row.new_tokens == 40
    assert (stopped.row.ignore_eos, ignored.row.ignore_eos) == (False, True)
    assert ignored.stdout.startswith(stopped.stdout.rstrip("\n\ufffd"))
    assert "stop ids: none" in ignored.stderr


def test_the_cache_is_as_large_as_computed_and_its_length_changes_no_text(run_generate):
    peak_gb = {}
    for kv_format, vector_bytes in (("bf16", 32), ("int8", 18)):
        flags = [*EXACT, "--max_new_tokens", 8, "--kv_cache_quantization", kv_format]
        small, large = run_generate(*flags), run_generate(*flags, "--cache_size", 1_000_000)
        assert small.stdout == large.stdout
        row = large.row
        assert (small.row.cache_len, row.cache_len) == (128, 1_000_064)
        assert row.kv_cache_gb == pytest.approx(
            4 * 2 * 2 * vector_bytes * 1_000_064 / 1e9, abs=5e-5
        )
        assert (row.k_format, row.v_format) == (kv_format, kv_format)
        assert "mem_unexplained" not in row.flags
        peak_gb[kv_format] = row.peak_mem_gb
    saved_gb = 4 * 2 * 2 * (32 - 18) * 1_000_064 / 1e9
    assert 0.95 * saved_gb < peak_gb["bf16"] - peak_gb["int8"] < 1.05 * saved_gb


def test_depth_is_filled_and_in_the_row(run_generate):
    runs = [run_generate(*EXACT, "--depth", 300, "--seed", seed) for seed in (1, 2)]
    row = runs[0].row
    assert (row.depth, row.depth_fill, row.prompt_len) == (300, "prefill", len(PROMPT))
    assert row.cache_len == 640
    assert runs[0].stdout.startswith(PROMPT)
    assert runs[0].stdout != runs[1].stdout  # the seed of a greedy run is that of its depth alone


def test_a_synthetic_depth_is_in_the_row_with_a_key_of_its_own(run_generate):
    flags = ["--depth", 1500, "--prompt_tokens", 9, "--max_new_tokens", 5, "--ignore_eos"]
    real, synthetic = run_generate(*flags), run_generate(*flags, "--depth_fill", "synthetic")
    assert (synthetic.code, synthetic.row.depth_fill) == (0, "synthetic")
    assert (synthetic.row.depth, synthetic.row.cache_len) == (1500, real.row.cache_len)
    assert synthetic.row.key != real.row.key
    assert "synthetic" in synthetic.row.flags
    assert "the depth holds random values" in synthetic.stderr
    assert "--depth_fill synthetic" in synthetic.row.repro


def weights_are_not_read() -> None:
    generate.load_model = None


def test_the_expected_peak_and_its_parts_are_told_before_weights_are_read(run_generate):
    flags = ["--kv_cache_quantization", "--cache_size", 1_000_000, "--max_new_tokens", 2]
    run, stopped = run_generate(*flags), run_generate(*flags, prepare=weights_are_not_read)
    assert stopped.code == 1
    for stderr in (run.stderr, stopped.stderr):
        [peak_gb] = re.findall(r"^expected peak memory: (\S+) GB \(weights 0.5 MB, ", stderr)
        assert float(peak_gb) == pytest.approx(run.row.expected_gb, abs=0.02)
        assert "KV cache data 0.26 GB, KV cache scales 32.0 MB, workspace 0.0 MB" in stderr


def load_with_a_peak() -> None:
    load_model = generate.load_model

    def load(*args):
        torch.ones(600 << 20, dtype=torch.uint8)
        return load_model(*args)

    generate.load_model = load


def test_the_peak_is_that_of_the_samples_and_not_of_loading(run_generate):
    row = run_generate("--max_new_tokens", 5, prepare=load_with_a_peak).row
    assert abs(row.unexplained_gb) < 0.2
    assert "mem_unexplained" not in row.flags


def test_a_prompt_of_random_ids_prints_no_text(run_generate):
    run = run_generate("--prompt_tokens", 20, "--max_new_tokens", 5)
    assert (run.code, run.stdout, run.row.prompt_len) == (0, "", 20)


def test_an_empty_prompt_starts_from_the_bos(run_generate):
    run = run_generate("--prompt", "", "--max_new_tokens", 5, "--ignore_eos")
    assert (run.code, run.row.prompt_len, run.row.new_tokens) == (0, 1, 5)


def test_a_single_token_has_a_row_without_decode_figures(run_generate):
    run = run_generate("--max_new_tokens", 1)
    assert run.code == 0
    assert run.row.decode_tok_s is None
    assert "decode " not in run.stderr


def test_more_new_tokens_than_the_context_holds_are_cut_with_one_line(run_generate):
    flags = ["--prompt_tokens", 2040, "--max_new_tokens", 20, "--ignore_eos"]
    run = run_generate(*flags)
    assert run.row.new_tokens == 8
    assert run.stderr.count("2040 prompt tokens + 20 new tokens exceed the model's context") == 1


def test_a_compiled_run_gives_the_text_of_an_eager_one_and_the_time_it_took(run_generate, streamed):
    run = run_generate(*EXACT, "--max_new_tokens", 20, eager=False)
    assert run.stdout == streamed.stdout
    assert run.row.compile
    assert run.row.compile_s > 0.1
    assert streamed.row.compile_s is None


def test_rows_of_the_head_beyond_the_tokenizer_change_no_text(run_generate, streamed, tmp_path):
    weights = random_weights(TINY)
    padding = torch.full((64, TINY.hidden_size), 30.0).bfloat16()
    padding[::2] *= -1  # of each sign: one of them would always be the likeliest id
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat((weights[name], padding))
    config = dataclasses.replace(TINY, vocab_size=TINY.vocab_size + 64)
    folder = write_hf(tmp_path / "padded", config, weights, files=TOKENIZER.hf_files)
    run = run_generate(*EXACT, "--max_new_tokens", 20, path=folder)
    assert (run.code, run.stdout) == (0, streamed.stdout)


def test_a_text_ends_at_the_sliding_window_with_a_note(run_generate, tmp_path):
    weights = random_weights(TINY)
    folder = write_hf(tmp_path / "mistral", TINY, weights, files=TOKENIZER.hf_files)
    edit_json(folder / "config.json", architectures=["MistralForCausalLM"], sliding_window=50)
    flags = ["--prompt_tokens", 40, "--max_new_tokens", 20, "--ignore_eos"]
    run = run_generate(*flags, path=folder)
    assert (run.code, run.row.new_tokens) == (0, 10)
    assert "config.json: sliding_window 50: the context of 2048 ends there" in run.stderr
    assert "40 prompt tokens + 20 new tokens exceed the model's context of 50" in run.stderr


@pytest.mark.parametrize("options", [{"qkv_bias": True}, {"qk_norm": True}], ids=["Qwen2", "Qwen3"])
def test_a_compiled_run_of_qwen_gives_the_text_of_an_eager_one(options, run_generate, tmp_path):
    config = dataclasses.replace(TINY, **options)
    folder = write_hf(tmp_path / "a", config, random_weights(config), files=TOKENIZER.hf_files)
    texts = [
        run_generate(*EXACT, "--max_new_tokens", 20, path=folder, eager=eager).stdout
        for eager in (True, False)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith(PROMPT)
