"""Text that goes through generate.py: chat, special tokens, stop ids, padded vocabularies."""

import json
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


def always(token_id, weights=None):
    """Weights of which every greedy token is this one: its row of the head answers the bias."""
    weights = weights or random_weights(TINY)
    weights["model.embed_tokens.weight"] = torch.ones_like(weights["model.embed_tokens.weight"])
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weight)
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    weights["lm_head.weight"][token_id] = 1
    return weights


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_every_stop_id_of_every_file_stops(file, run_generate, tmp_path):
    path = with_files(tmp_path / "model", weights=always(65))
    assert run_generate(*EXACT, path=path).row.new_tokens == 20
    values = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**values, "eos_token_id": [5, 65]}))
    run = run_generate(*EXACT, path=path)
    assert run.row.new_tokens == 1
    assert run.stderr.count("stop ids: ") == 1
    assert " 65, " in run.stderr.partition("stop ids: ")[2].partition("\n")[0] + ", "
    ignored = run_generate(*EXACT, "--ignore_eos", path=path)
    assert (ignored.row.new_tokens, ignored.row.ignore_eos) == (20, True)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_ids_that_the_tokenizer_lacks_are_never_generated(temperature, run_generate, tmp_path):
    path = with_files(tmp_path / "model", weights=always(319))
    spec = json.loads((path / "tokenizer.json").read_text())
    spec["model"]["vocab"] = {t: i for t, i in spec["model"]["vocab"].items() if i < 300}
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < 300]
    (path / "tokenizer.json").write_text(json.dumps(spec))
    assert open_tokenizer(path).vocab_size == 300 < TINY.vocab_size
    run = run_generate(*EXACT, "--temperature", temperature, "--ignore_eos", path=path)
    assert (run.code, run.row.new_tokens) == (0, 20)
    assert "20 ids of the vocabulary are not the tokenizer's: never generated" in run.stderr
