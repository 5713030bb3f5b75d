"""The folders of training runs: what another config left is kept and comes back, what a kill left goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lilicorr.config import PipelineConfig, RunConfig, TrainConfig
from lilicorr.provenance import sha256_tree, write_json
from pipelines import train


def job(tmp_path: Path, identity: str) -> train.Job:
    settings = TrainConfig(runs={"a": RunConfig(steps=1)})
    return train.Job(PipelineConfig(profile="p", run_dir=str(tmp_path), train=settings), "a", identity)


def finish(of: train.Job, folder: Path | None = None) -> None:
    """Leave what a finished run leaves."""
    folder = folder or of.folder
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "config.json").write_text("{}")
    write_json(folder / "result.json", {"identity": of.identity, "checkpoint": sha256_tree(folder / "final")})


def test_a_finished_run_comes_back_with_its_config(tmp_path: Path) -> None:
    first, second = job(tmp_path, "one"), job(tmp_path, "two")
    train.set_aside(first)
    finish(first)
    train.set_aside(second)
    assert train.finished(second) is None and not (second.folder / "final").exists()
    (second.folder / "checkpoints").mkdir()
    train.set_aside(first)
    assert train.finished(first)["identity"] == "one"
    train.set_aside(second)
    assert (second.folder / "checkpoints").is_dir() and not train.finished(second)
    train.set_aside(first)
    assert train.finished(first)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_run_whose_checkpoint_is_damaged_has_not_finished(tmp_path: Path, damage: str) -> None:
    first = job(tmp_path, "one")
    finish(first)
    file = first.folder / "final" / "config.json"
    file.unlink() if damage == "gone" else file.write_text("[]")
    assert train.finished(first) is None


def test_nothing_is_deleted_where_two_folders_have_one_identity(tmp_path: Path) -> None:
    """As an earlier version left them: the finished run set aside, and the same one begun again."""
    first, second = job(tmp_path, "one"), job(tmp_path, "two")
    train.set_aside(first)
    (first.folder / "begun again").mkdir()
    replaced = first.folder.parent / train.REPLACED
    finish(first, replaced / "a-one")
    train.set_aside(second)
    kept = sorted(path.name for path in replaced.iterdir())
    assert len(kept) == 2 and kept[0] == "a-one" and kept[1].startswith("a-one-")
    assert train.finished(first, replaced / "a-one") and (replaced / kept[1] / "begun again").is_dir()
    train.set_aside(first)
    assert train.finished(first)


def test_a_finished_run_replaces_its_own_unfinished_one(tmp_path: Path) -> None:
    first = job(tmp_path, "one")
    train.set_aside(first)
    replaced = first.folder.parent / train.REPLACED
    finish(first, replaced / "a-one")
    train.set_aside(first)
    assert train.finished(first) and [path.name[:6] for path in replaced.iterdir()] == ["a-one-"]


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(tmp_path, "one").config
    folder = config.directory / "train"
    left = [folder / name for name in ("training_set.tmp-1", "training_set.tmp-2-old", "a/final.tmp-3")]
    for path in [*left, folder / "a" / "final"]:
        path.mkdir(parents=True)

    def stop(_: PipelineConfig) -> None:
        raise RuntimeError("far enough")

    monkeypatch.setattr(train, "read_description", lambda _: {})
    monkeypatch.setattr(train, "check_runs", lambda *_: None)
    monkeypatch.setattr(train, "ensure_training_set", stop)
    with pytest.raises(RuntimeError, match="far enough"):
        train.run(config)
    assert not any(path.exists() for path in left) and (folder / "a" / "final").is_dir()
