"""The comparison with other engines, without any of them: a stand-in speaks the peers' protocol."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_kinds import tiny

from config import UserError, parse
from scripts.compare_peers import (
    PEERS,
    SCRIPTS,
    CompareConfig,
    Comparison,
    Result,
    answer,
    main,
    measure,
    table,
)

# The greedy next id is the last one plus one; a step takes 10 ms.
COUNTING_PEER = """
import time
from harness import serve

class CountingDecoder:
    def __init__(self, request):
        self.request = request

    def prefill(self, ids):
        return ids[-1] + 1

    def decode(self, token_id, start_pos, steps):
        assert start_pos == len(self.request.prompt_ids)
        time.sleep(0.01 * steps)
        return [token_id + 1 + step for step in range(steps)]

serve(CountingDecoder, ["pytest"])
"""
REQUEST = {
    "checkpoint": "any",
    "kv_format": "bf16",
    "prompt_ids": [5, 6, 7],
    "new_tokens": 6,
    "num_samples": 3,
    "threads": 1,
}


@pytest.fixture
def write_script(tmp_path):
    """Writes a script; gives the command that runs it."""

    def write(code: str) -> list[str]:
        (tmp_path / "side.py").write_text(code)
        return [sys.executable, str(tmp_path / "side.py")]

    return write


@pytest.fixture
def counting_config(tmp_path, write_script, monkeypatch):
    """A comparison of a tiny model with the stand-in in the place of transformers."""
    python, script = write_script(COUNTING_PEER)
    peer = replace(PEERS["transformers"], script=script)
    monkeypatch.setitem(PEERS, "transformers", peer)
    return CompareConfig(
        peer="transformers",
        checkpoint=tiny("hf", tmp_path),
        peer_python=Path(python),
        peer_source=SCRIPTS,
        depth=20,
        new_tokens=6,
    )


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_a_script_that_serves(name):
    assert "serve(" in (SCRIPTS / PEERS[name].script).read_text()


def test_a_peer_answers_with_its_rate_all_new_ids_and_versions(write_script):
    document = answer(write_script(COUNTING_PEER), json.dumps(REQUEST), SCRIPTS)
    assert 0 < document["tok_s"] <= 100
    assert document["ids"] == [8, 9, 10, 11, 12, 13]
    assert document["versions"] == {"pytest": pytest.__version__}


def test_a_peer_gets_the_prompt_of_generate_and_its_ids_become_text(counting_config):
    comparison = Comparison(counting_config)
    prompt_ids = comparison.work.depth_ids + comparison.work.prompt_ids
    assert len(prompt_ids) == 20
    result = comparison.theirs("bf16")
    new_ids = range(prompt_ids[-1] + 1, prompt_ids[-1] + 7)
    assert result.text == comparison.tokenizer.decode(new_ids)
    assert len(result.text) > 0


def test_only_the_last_line_of_a_side_is_its_answer(write_script):
    assert answer(write_script("print('loading'); print('{\"tok_s\": 2}')")) == {"tok_s": 2}


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import transformers_of_tomorrow", "No module named 'transformers_of_tomorrow'"),
        ("import os; os.kill(os.getpid(), 4)", "exit code -4"),
        ("import sys; sys.exit('first\\nerror: the last line')", "error: the last line"),
    ],
)
def test_a_side_that_fails_is_named_with_its_last_line(write_script, code, cause):
    with pytest.raises(UserError) as caught:
        answer(write_script(code))
    message = str(caught.value)
    assert message.startswith("side.py: ")
    assert cause in message
    assert "\n" not in message


def test_a_missing_interpreter_is_named():
    with pytest.raises(UserError, match="--peer_python /nowhere/python: No such file"):
        answer(["/nowhere/python", "side.py"])


def test_an_unknown_peer_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="peer vllm: must be one of transformers, gpt-fast"):
        parse(CompareConfig, ["vllm", "folder"])


@pytest.mark.parametrize(
    ("peer", "kind"), [("transformers", "gguf"), ("gpt-fast", "hf"), ("llama.cpp", "meta")]
)
def test_a_checkpoint_in_another_format_than_the_peers_is_refused(tmp_path, peer, kind):
    checkpoint = tiny(kind, tmp_path)
    with pytest.raises(UserError, match=f"{peer} opens the .* format only; .*--source writes it"):
        Comparison(CompareConfig(peer=peer, checkpoint=checkpoint))


def test_more_tokens_than_the_context_holds_are_refused(tmp_path):
    config = CompareConfig(peer="transformers", checkpoint=tiny("hf", tmp_path), depth=2048)
    with pytest.raises(UserError, match="2048 tokens leave no room"):
        Comparison(config)


def test_rounds_alternate_in_direction():
    order = []

    def side(name):
        return lambda: order.append(name) or Result(1.0, "", {})

    results = measure({"A": side("A"), "B": side("B")}, rounds=3)
    assert order == ["A", "B", "B", "A", "A", "B"]
    assert {name: len(runs) for name, runs in results.items()} == {"A": 3, "B": 3}


def test_the_table_holds_medians_ratios_to_the_best_of_the_peer_and_shared_text():
    config = CompareConfig(peer="llama.cpp", checkpoint=Path("folder/model.gguf"), depth=7900)
    rates = {
        "llama.cpp f16": [10.0, 12.0, 11.0],
        "llama.cpp q8_0-flash": [20.0, 20.0, 20.0],
        "kv-fast bf16": [25.0, 31.0, 30.0],
        "kv-fast int8": [50.0, 49.0, 52.5],
    }
    texts = ["Hello all", "Hello you", "Hello, you", "Hello, you"]
    results = {
        name: [Result(rate, text, {"commit" if "kv-fast" in name else "llama": "1"}) for rate in r]
        for (name, r), text in zip(rates.items(), texts, strict=True)
    }
    assert table(config, results).splitlines() == [
        "| depth 7900 | tok/s | lowest to highest | ratio | same text |",
        "|---|---|---|---|---|",
        "| llama.cpp f16 | 11.00 | 10.00 to 12.00 | 0.55x | 5 of 10 |",
        "| llama.cpp q8_0-flash | 20.00 | 20.00 to 20.00 | 1.00x | 5 of 10 |",
        "| kv-fast bf16 | 30.00 | 25.00 to 31.00 | 1.50x | 10 of 10 |",
        "| kv-fast int8 | 50.00 | 49.00 to 52.50 | 2.50x | 10 of 10 |",
        "",
        "model.gguf, 128 new tokens, 2 threads, 2 rounds; llama 1, commit 1",
    ]


def test_a_comparison_prints_one_table_with_all_sides(counting_config, monkeypatch, capsys):
    monkeypatch.setattr(Comparison, "ours", lambda self, kv: Result(1.0, "a text", {"kv": kv}))
    main(counting_config)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == [
        "| transformers bf16",
        "| kv-fast bf16",
        "| kv-fast int8",
    ]
