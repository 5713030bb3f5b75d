"""Folders that appear complete or not at all, whatever fails in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from lilicorr.folder import new_folder


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
