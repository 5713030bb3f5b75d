"""Folders that appear complete or not at all, whatever fails in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lilicorr.folder import ASIDE, new_folder
from lilicorr.provenance import write_atomic


def test_a_folder_replaces_the_former_one_as_a_whole(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with new_folder(tmp_path / "made") as aside:
            (aside / text).write_text(text)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["second"]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_an_error_leaves_the_former_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "made") as aside:
        (aside / "first").write_text("1")
    with pytest.raises(RuntimeError, match="full disk"), new_folder(tmp_path / "made") as aside:
        (aside / "second").write_text("2")
        raise RuntimeError("full disk")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["first"]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_failing_rename_puts_the_former_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_folder(tmp_path / "made") as aside:
        (aside / "first").write_text("1")
    rename = Path.rename

    def refuse_the_new_one(self: Path, target: Path) -> Path:
        if (self / "second").exists():
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(OSError, match="no"), new_folder(tmp_path / "made") as aside:
        (aside / "second").write_text("2")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["first"]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_the_mark_of_unfinished_work_stands_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`provenance`, which imports nothing, has its own; it is the same."""
    root = Path(__file__).parents[1]
    sources = [path for name in ("lilicorr", "pipelines", "benches") for path in (root / name).rglob("*.py")]
    spelled = {path.name for path in sources if f'"{ASIDE}' in path.read_text(encoding="utf-8")}
    assert spelled == {"folder.py", "provenance.py"}
    replaced: list[str] = []
    monkeypatch.setattr(os, "replace", lambda source, _: replaced.append(Path(source).name))
    write_atomic(tmp_path / "file", b"")
    assert replaced[0].startswith(ASIDE)
