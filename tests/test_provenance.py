"""Provenance works in and out of a checkout; a file is written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lilicorr.config import TargetConfig
from lilicorr.provenance import (
    command_line,
    provenance,
    sha256_file,
    sha256_tree,
    source_version,
    write_atomic,
    write_json,
)


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_provenance_names_code_machine_and_config() -> None:
    record = provenance(TargetConfig(source="random"), seed=3)
    assert record["config"]["source"] == "random" and record["seed"] == 3
    assert record["versions"]["torch"] and record["machine"]["cores"] >= 1 and record["machine"]["memory_gib"] > 0
    assert record["command"] and record["date"].endswith("+00:00")
    assert "config" not in provenance()
    json.dumps(record, allow_nan=False)


def test_the_command_has_no_path_of_this_machine(tmp_path: Path) -> None:
    code = "from lilicorr.provenance import provenance\nprint(provenance()['command'])\n"
    (tmp_path / "tool").mkdir()
    for name in ("one.py", "__init__.py", "__main__.py"):
        (tmp_path / "tool" / name).write_text("" if name == "__init__.py" else code)
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}

    def command(*arguments: str) -> str:
        words = [sys.executable, *arguments, "--name", "a b"]
        return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert command("-m", "tool.one") == "python -m tool.one --name 'a b'"
    assert command("-m", "tool") == "python -m tool --name 'a b'"
    assert command(str(tmp_path / "tool" / "one.py")) == "python one.py --name 'a b'"


def test_a_script_of_the_checkout_stands_relative_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(Path(__file__).resolve()), "--dry"])
    assert command_line() == "python tests/test_provenance.py --dry"


def test_source_version_of_a_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source_version(tmp_path) == (commit, False)
    (tmp_path / "untracked.txt").write_text("2")
    assert source_version(tmp_path) == (commit, False)
    (tmp_path / "a.txt").write_text("2")
    assert source_version(tmp_path) == (commit, True)


def test_source_version_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILICORR_COMMIT", raising=False)
    assert source_version(tmp_path) == (None, None)
    monkeypatch.setenv("LILICORR_COMMIT", "abc123+dirty")
    assert source_version(tmp_path) == ("abc123", True)
    monkeypatch.setenv("LILICORR_COMMIT", "abc123")
    assert source_version(tmp_path) == ("abc123", False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert source_version(tmp_path) == ("abc123", False)


def test_the_repository_around_an_installation_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILICORR_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    installed = tmp_path / "site-packages"
    installed.mkdir()
    assert source_version(installed) == (None, None)


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_write_json_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"tau": float("nan")})
    assert not (tmp_path / "x.json").exists()
    write_json(tmp_path / "x.json", {"tau": 1.5, "name": "ä"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"tau": 1.5, "name": "ä"}


def test_hashes_follow_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (3 << 20))
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"x" * (3 << 20)).hexdigest()
    first = sha256_tree(tmp_path)
    (tmp_path / ".hidden").write_text("ignored")
    assert sha256_tree(tmp_path) == first
    (tmp_path / "a").rename(tmp_path / "b")
    assert sha256_tree(tmp_path) != first
    with pytest.raises(ValueError, match="not a folder"):
        sha256_tree(tmp_path / "b")
