"""Text that goes through generate.py: chat, special tokens, stop ids, padded vocabularies."""

import json
import os
from functools import partial

import pytest
import torch
from checkpoint_kinds import TOKENIZER

from scripts.tiny_checkpoint import TINY, random_weights, write_hf
from tokenizer import open_tokenizer

pytest_plugins = ["generate_process"]

EXACT = ("--dtype", "float32", "--temperature", "0", "--max_new_tokens", 20)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
    "{{ m.content }}<|eot_id|>{% endfor %}"
)


def one_stream():
    """As a terminal, which shows both in the order of time."""
    os.dup2(2, 1)


def with_files(folder, *, weights=None, **files):
    """The tiny model with other small files beside it."""
    small = {name: json.dumps(content).encode() for name, content in files.items()}
    return write_hf(
        folder, TINY, weights or random_weights(TINY), files={**TOKENIZER.hf_files, **small}
    )


@pytest.fixture(scope="module")
def chat_checkpoint(tmp_path_factory):
    path = with_files(tmp_path_factory.mktemp("checkpoint") / "chat")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_a_chat_prints_the_answer_alone_streamed_or_not(run_generate, chat_checkpoint):
    words = [*EXACT, "--ignore_eos", "--chat", "--prompt", "Hi", "--system", "Be <|eot_id|> brief"]
    run = partial(run_generate, *words, path=chat_checkpoint)
    streamed, document = run(), run("--json").document
    assert (streamed.code, streamed.stdout) == (0, document["texts"][0] + "\n")
    assert "Hi" not in streamed.stdout
    tokenizer = open_tokenizer(chat_checkpoint)
    chat = [("system", "Be <|eot_id|> brief"), ("user", "Hi")]
    ids = tokenizer.encode_chat([{"role": r, "content": c} for r, c in chat])
    assert document["prompt_len"] == len(ids)
    assert "--chat --system" in streamed.row.repro


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
         "no text within 5 s and half a gigabyte of memory"),
        ("{{ raise_exception('one role only') }}", "TemplateError: one role only"),
        ("{{ ''.__class__.__base__ }}", "SecurityError: "),
    ],
)  # fmt: skip
def test_a_template_that_gives_no_text_is_one_line_and_2(template, cause, run_generate, tmp_path):
    path = with_files(tmp_path / "model", **{"tokenizer_config.json": {"chat_template": template}})
    run = run_generate("--chat", path=path)
    assert (run.code, run.stdout, run.stderr) == (2, "", run.error + "\n")
    assert run.error.startswith(f"error: {path}/tokenizer_config.json: chat template: {cause}")
    assert run_generate(*EXACT, path=path).code == 0  # a text needs no template


def test_special_text_in_a_prompt_runs_and_stops_nothing(run_generate):
    prompt = "what is <|endoftext|> and <|eot_id|>?"
    run = run_generate(*EXACT, "--prompt", prompt)
    assert run.code == 0
    assert run.stdout.startswith(prompt)
    assert run.row.prompt_len > len(prompt) / 2


def test_special_text_that_is_parsed_is_one_token_each_and_stops_nothing(run_generate):
    prompt = "what is <|end_of_text|> and <|eot_id|>?"
    run = run_generate(*EXACT, "--prompt", prompt, "--parse_special")
    assert run.code == 0
    assert run.stdout.startswith("what is  and ?")
    assert run.row.prompt_len == 1 + len("what is  and ?") + 2
    assert "--parse_special" in run.row.repro


def chain(*ids):
    """Weights of which each of these ids is followed by the next, and the last by itself.

    The blocks add nothing, so an id's row of the embedding alone picks the next row of the head.
    """
    weights = random_weights(TINY)
    for name, weight in weights.items():
        if name.endswith(
            ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "head.weight")
        ):
            weights[name] = torch.zeros_like(weight)
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    for channel, (token_id, following) in enumerate(zip(ids, [*ids[1:], ids[-1]], strict=True)):
        weights["model.embed_tokens.weight"][token_id, channel] = 1
        weights["lm_head.weight"][following, channel] = 1
    return weights


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_with_stop_ids_5_and_9_and_9_at_step_4_there_are_4_tokens(file, run_generate, tmp_path):
    path = with_files(tmp_path / "model", weights=chain(ord("x"), 66, 67, 68, 9))
    run = partial(run_generate, *EXACT, "--prompt", "x", path=path)
    assert run().row.new_tokens == 20
    values = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**values, "eos_token_id": [5, 9]}))
    stopped = run()
    assert stopped.row.new_tokens == 4
    assert stopped.stdout == "xBCD\t\n"
    assert stopped.stderr.count("stop ids: 5, 9, ") == 1


def test_no_text_of_a_special_token_is_in_the_output(run_generate, checkpoint, tmp_path):
    control = open_tokenizer(checkpoint).control_ids
    ids = [control["<|start_header_id|>"], 66, control["<|eot_id|>"]]
    path = with_files(tmp_path / "model", weights=chain(ord("x"), *ids))
    run = run_generate(*EXACT, "--prompt", "x", path=path)
    assert (run.stdout, run.row.new_tokens) == ("xB\n", 3)
    ignored = run_generate(*EXACT, "--prompt", "x", "--ignore_eos", path=path)
    assert (ignored.stdout, ignored.row.new_tokens) == ("xB\n", 20)


def test_with_eos_ignored_every_sample_has_exactly_200_tokens(run_generate, tmp_path):
    end_ids = {"generation_config.json": {"eos_token_id": list(range(160))}}
    path = with_files(tmp_path / "model", **end_ids)
    flags = ["--max_new_tokens", 200, "--num_samples", 2]
    row = run_generate(*flags, "--ignore_eos", path=path).row
    assert (row.new_tokens, row.ignore_eos, row.num_samples) == (200, True, 2)
    assert "ragged" not in row.flags
    assert run_generate(*flags, path=path).row.new_tokens < 200


def test_a_small_cache_of_a_long_context_has_the_bytes_of_its_slots(run_generate):
    run = run_generate("--cache_size", 512, "--max_new_tokens", 100, path="random:tiny")
    # 2 layers, 2 KV heads, K and V, 64 values of 2 bytes; the context is 2^21
    assert run.row.cache_len == 512
    assert run.row.kv_cache_gb == pytest.approx(512 * 2 * 2 * 2 * 64 * 2 / 1e9, abs=5e-5)
    needed = run_generate("--prompt_tokens", 30, "--max_new_tokens", 100, path="random:tiny")
    assert needed.row.cache_len == 256  # 130, in steps of 128
    assert "[1, 2, 256, 64]" in needed.stderr


def test_a_cache_of_131072_slots_takes_its_own_bytes_and_no_mask(run_generate):
    flags = ["--prompt_tokens", 300, "--max_new_tokens", 2]
    sizes = {}
    for slots in (1024, 65536, 131072):
        row = run_generate(*flags, "--cache_size", slots, path="random:tiny").row
        sizes[slots] = (row.kv_cache_gb, row.peak_mem_gb)
    base_cache, base_peak = sizes[1024]
    for cache, peak in sizes.values():  # a mask of 131072 x 131072 has 17 GB
        assert peak - base_peak < cache - base_cache + 0.03


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_ids_that_the_tokenizer_lacks_are_never_generated(temperature, run_generate, tmp_path):
    path = with_files(tmp_path / "model", weights=chain(ord("x"), *range(319, 299, -1)))
    spec = json.loads((path / "tokenizer.json").read_text())
    spec["model"]["vocab"] = {t: i for t, i in spec["model"]["vocab"].items() if i < 300}
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < 300]
    (path / "tokenizer.json").write_text(json.dumps(spec))
    assert open_tokenizer(path).vocab_size == 300 < TINY.vocab_size
    words = [*EXACT, "--temperature", temperature, "--ignore_eos", "--prompt", "x"]
    run = run_generate(*words, path=path)
    assert (run.code, run.row.new_tokens) == (0, 20)
    assert "20 ids of the vocabulary are not the tokenizer's: never generated" in run.stderr


def test_a_streamed_text_ends_its_line_before_the_check_says_anything(run_generate):
    words = [*EXACT, "--prompt", "Hi", "--kv_cache_quantization", "--check_tokens", 8]
    together = run_generate(*words, prepare=one_stream).stderr
    assert "\nchecking: 8 tok\n" in together
