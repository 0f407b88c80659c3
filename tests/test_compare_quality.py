"""The price of another engine's caches, without the engine: a stand-in speaks its protocol."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_kinds import tiny

from config import UserError
from kv_cache import bytes_per_token as own_bytes_per_token
from scripts import compare_quality
from scripts.compare_quality import (
    CACHES,
    REFERENCE,
    Cache,
    CompareQualityConfig,
    bytes_per_token,
    main,
    measure,
    scorer,
)
from scripts.tiny_checkpoint import TINY

VOCAB = 8
# The next id is the last one plus one, by 2 nats with K in f16 and by 1 with a quantised one.
STAND_IN = f"""
import array, json, sys
request = json.loads(sys.stdin.readline())
for line in sys.stdin:
    ids = json.loads(line)
    for token_id in ids[request["context"] : -1]:
        logits = [0.0] * {VOCAB}
        logits[(token_id + 1) % {VOCAB}] = 2.0 if request["k_type"] == "f16" else 1.0
        sys.stdout.buffer.write(array.array("f", logits).tobytes())
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts a script in the place of the peer's."""

    def put(code=STAND_IN):
        script = tmp_path / "peer.py"
        script.write_text(code)
        monkeypatch.setattr(compare_quality, "SCRIPT", script)

    return put


def config_of(path="any.gguf", **values):
    return CompareQualityConfig(checkpoint=Path(path), peer_python=Path(sys.executable), **values)


def test_the_scored_ids_are_those_behind_the_context_and_each_but_the_last_has_logits(stand_in):
    stand_in()
    with scorer(config_of(context=3, scored=2), REFERENCE) as peer:
        for _ in range(2):
            logits = peer.logits(torch.tensor([1, 5, 0, 6, 7, 3]), VOCAB)
            assert logits.argmax(-1).tolist() == [7, 0]


def test_a_cache_is_compared_with_the_reference(stand_in):
    stand_in()
    windows = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([5, 6, 7, 0, 1])]
    found = measure(config_of(context=2, scored=2), windows, VOCAB)
    p, q = (math.exp(x) / (math.exp(x) + VOCAB - 1) for x in (2, 1))
    others = (1 - p) * math.log((1 - p) / (1 - q))
    assert found["q8_0"].kl_mean == pytest.approx(p * math.log(p / q) + others)
    assert found["q8_0"].ln_ppl_ratio == pytest.approx(math.log(p / q))
    assert found["f16, no flash attention"].kl_mean == 0
    assert set(found) == set(CACHES)


def test_a_peer_that_ends_early_is_told(stand_in):
    stand_in("import sys; sys.exit(3)")
    with pytest.raises(UserError, match=r"peer.py: ended with exit code 3; the head of"):
        measure(config_of(context=2, scored=2), [torch.tensor([1, 2, 3, 4, 5])], VOCAB)


def test_a_missing_interpreter_is_named():
    config = CompareQualityConfig(checkpoint=Path("a"), peer_python=Path("/nowhere/python"))
    missing = pytest.raises(UserError, match="--peer_python /nowhere/python: No such file")
    with missing, scorer(config, REFERENCE):
        pass


def test_other_checkpoints_than_gguf_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="llama.cpp opens the GGUF format only"):
        main(config_of(tiny("hf", tmp_path)))


def test_bytes_are_those_of_the_blocks_of_32():
    assert bytes_per_token(TINY, REFERENCE) == own_bytes_per_token(TINY, ("fp16", "fp16"))
    blocks = TINY.num_layers * TINY.num_kv_heads * TINY.head_dim // 32
    assert bytes_per_token(TINY, Cache(k_type="q8_0", v_type="q4_0")) == blocks * (34 + 18)


def test_windows_are_those_of_eval_and_one_table_is_printed(stand_in, tmp_path, capsys):
    path = tiny("gguf", tmp_path)
    stand_in(STAND_IN.replace(f"* {VOCAB}", f"* {TINY.vocab_size}").replace(f"% {VOCAB}", "% 64"))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(400))))
    main(config_of(path, text=str(text), context=16, scored=8, windows=2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in CACHES]
    assert len({line.count("|") for line in lines}) == 1


def test_the_scripts_request_has_the_fields_that_are_sent():
    source = (Path(compare_quality.__file__).parent / "peers" / "score_llama_cpp.py").read_text()
    fields = json.dumps({**vars(REFERENCE), "checkpoint": 0, "context": 0, "cache_len": 0})
    for name in [*json.loads(fields), "threads"]:
        assert f"    {name}: " in source
