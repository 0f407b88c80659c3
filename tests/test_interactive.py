"""A conversation over one cache: each answer is that of a fresh run; no line ends the process."""

import io
import sys
from functools import partial

import pytest
import torch
from checkpoint_kinds import TOKENIZER

from checkpoint import open_checkpoint
from config import UserError
from engine import Engine, Sampling, generate, load_model
from generate_config import GenerateConfig
from interactive import FORGET, Session
from kv_cache import make_caches
from measure import Runner
from request import Request
from scripts.tiny_checkpoint import TINY, random_weights, write_hf
from tokenizer import open_tokenizer

pytest_plugins = ["generate_process"]

SLOTS, LONG = 128, 512
NEW = 12
GREEDY = ("--dtype", "float32", "--temperature", 0, "--ignore_eos", "--max_new_tokens", NEW)
TURN = "{{ m.role }}<|start_header_id|>{{ m.content }}<|eot_id|>"
TURNS = "{{ bos_token }}{% for m in messages %}" + TURN + "{% endfor %}"
RENUMBERED = "{{ bos_token }}{{ messages | length }}" + TURNS


def folder_with(folder, template):
    path = write_hf(folder, TINY, random_weights(TINY), files=TOKENIZER.hf_files)
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def chat_checkpoint(tmp_path_factory):
    return folder_with(tmp_path_factory.mktemp("checkpoint") / "chat", TURNS)


@pytest.fixture(params=[TURNS, RENUMBERED], ids=["grows", "is written anew"])
def path(request, tmp_path):
    return folder_with(tmp_path / "chat", request.param)


def runner_of(path, formats=("fp32", "fp32"), slots=SLOTS):
    model = load_model(open_checkpoint(path), torch.device("cpu"), torch.float32)
    engine = Engine(model, make_caches(model.config, formats, 1, slots), compile=False)
    request = Request(
        depth_ids=(),
        prompt_ids=(1,),
        new_tokens=NEW,
        cache_len=slots,
        formats=formats,
        prefill_chunk=2048,
        longest_prompt=slots,
    )
    return Runner(
        engine=engine, request=request, sampling=Sampling(TINY.vocab_size, 0), stop_ids=()
    )


def session_of(path, **kwargs):
    config = GenerateConfig(interactive=True, chat=True, max_new_tokens=NEW, temperature=0)
    return Session(config, runner_of(path, **kwargs), open_tokenizer(path))


def fresh_answer(path, messages):
    """The greedy text of a conversation in a cache of its own."""
    tokenizer, runner = open_tokenizer(path), runner_of(path, slots=LONG)
    prompt = torch.tensor([tokenizer.encode_chat(messages)])
    ids = [int(i) for i in generate(runner.engine, prompt, NEW, runner.sampling)]
    stream = tokenizer.stream(prompt[0].tolist())
    return "".join(map(stream.push, ids)) + stream.flush()


def feed(data):
    sys.stdin = None if data is None else io.TextIOWrapper(io.BytesIO(data))


def test_each_turn_of_a_chat_is_answered_as_in_a_fresh_process(path, capsys):
    session = session_of(path, slots=LONG)
    for turn, text in enumerate(["ab", "a longer question", "ab"]):
        session.answer(text)
        *before, asked, answer = session.messages
        assert (len(before), asked["content"]) == (2 * turn, text)
        assert answer["content"] == fresh_answer(path, [*before, asked])
        assert capsys.readouterr().out == answer["content"] + "\n"


def test_what_the_cache_holds_is_not_prefilled_again(chat_checkpoint, monkeypatch):
    session = session_of(chat_checkpoint)
    lengths = []
    prefill = session.runner.engine.prefill

    def noted(tokens, start=0, advance=None):
        lengths.append((start, tokens.shape[1]))
        return prefill(tokens, start)

    monkeypatch.setattr(session.runner.engine, "prefill", noted)
    session.answer("a question of some length")
    session.answer("b")
    (first_start, first), (start, second) = lengths
    assert first_start == 0
    assert start >= first - 1
    assert start + second == len(session.tokenizer.encode_chat(session.messages[:3]))


def test_a_turn_that_does_not_fit_changes_nothing(chat_checkpoint):
    session = session_of(chat_checkpoint)
    session.answer("ab")
    before = list(session.messages)
    with pytest.raises(UserError, match=r"\d+ tokens leave no room in 128 slots"):
        session.answer("x" * SLOTS)
    assert session.messages == before
    session.answer("c")
    *before, answer = session.messages
    assert answer["content"] == fresh_answer(chat_checkpoint, before)


def test_three_long_turns_in_a_small_cache_end_in_a_message_and_a_new_prompt(
    run_generate, chat_checkpoint
):
    lines = ["a" * 40, "b" * 70, "c" * 90, FORGET, "d" * 40]
    prepare = partial(feed, "\n".join(lines).encode())
    words = ("--interactive", "--chat", "--cache_size", SLOTS, *GREEDY)
    run = run_generate(*words, path=chat_checkpoint, prepare=prepare)
    assert run.code == 0
    assert len(run.errors) >= 1
    assert all("/clear begins a new conversation, --cache_size gives" in e for e in run.errors)
    answered = [line for line in run.stderr.splitlines() if " of 128 slots" in line]
    answered = [line for line in answered if "TTFT" in line]
    assert len(answered) + len(run.errors) == 4
    # The last line is answered: it stands behind a new beginning.
    assert run.stderr.splitlines()[-1] == answered[-1]


def test_without_chat_each_line_is_answered_as_if_it_were_alone(run_generate):
    prompts = ["Hello", "a much longer prompt than the one before", "Hello"]
    lines = "\r\n\n".join(prompts).encode()
    words = (*GREEDY, "--kv_cache_quantization")
    run = run_generate("--interactive", *words, prepare=partial(feed, lines))
    alone = [run_generate(*words, "--prompt", text).stdout for text in prompts]
    texts = [whole.removeprefix(text) for whole, text in zip(alone, prompts, strict=True)]
    assert run.code == 0
    assert run.stdout == "".join(texts)


def test_a_line_that_is_no_text_is_told_and_the_next_one_answered(run_generate):
    words = ("--interactive", *GREEDY)
    run = run_generate(*words, prepare=partial(feed, b"\xff\xfe\nHello\n"))
    assert run.code == 0
    assert "character 0 is no valid text" in run.error
    assert run.stdout == run_generate(*words, prepare=partial(feed, b"Hello")).stdout != ""


@pytest.mark.parametrize("data", [None, b"", b"\n\n"])
def test_a_closed_or_empty_stdin_is_a_clean_end(run_generate, data):
    run = run_generate("--interactive", *GREEDY, prepare=partial(feed, data))
    assert (run.code, run.stdout, run.errors) == (0, "", [])


def test_the_cache_has_the_slots_asked_for_or_the_context(run_generate):
    run = run_generate("--interactive", *GREEDY, prepare=partial(feed, b""))
    assert f"[1, 2, {TINY.max_seq_len}, " in run.stderr
    run = run_generate("--interactive", *GREEDY, "--cache_size", 1, prepare=partial(feed, b""))
    assert run.code == 2
    assert "--cache_size 1: no room for a prompt of" in run.error
