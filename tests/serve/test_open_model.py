"""`served_model.open_model`: which checkpoints a replica can serve, and what it calls the weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from models import HEAD, load, save_random_checkpoint

from lilicorr.checkpoint import captured_layers
from lilicorr.checkpoint.__main__ import convert
from lilicorr.provenance import sha256_tree
from lilicorr.target import default_layer_ids
from lilicorr.tiny import tiny_target_folder
from serve_app.args import AppArgs
from serve_app.served_model import ServedModel, open_model

CASES = [
    ("speculators", "argmax", {}),
    ("deepspec", "dspark", {"markov_rank": 8}),
    ("native", "lilicorr", HEAD),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("models") / "target")


def opened(checkpoint: Path, target: Path, **fields: Any) -> ServedModel:
    engine = {"max_running": 2, "num_pages": 12}
    return open_model(AppArgs(checkpoint=str(checkpoint), target=str(target), engine=engine, **fields))[0]


@pytest.mark.parametrize("form, head, settings", CASES)
def test_every_format_that_the_library_reads_is_served(
    target: Path, tmp_path: Path, form: str, head: str, settings: dict[str, Any]
) -> None:
    """speculators calls the layers by another name and counts from one; deepspec has no dflash_config."""
    save_random_checkpoint(tmp_path / "own", target, 0, head, settings)
    checkpoint = tmp_path / form
    convert(tmp_path / "own", checkpoint, form, load(target), "t")
    assert captured_layers(checkpoint) == default_layer_ids(6, 2)
    assert opened(checkpoint, target).num_slots in (3, 4)


def test_a_folder_that_is_no_draft_model_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a draft model: config.json is missing"):
        opened(tmp_path, target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="field target_layer_ids is missing"):
        opened(tmp_path, target)


def test_the_mask_token_that_training_was_given_is_the_targets(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that fills every embedding row settles none, and the arguments need not repeat it."""
    loaded = load(target)
    save_random_checkpoint(tmp_path / "own", target, 0)
    monkeypatch.setattr("lilicorr.target.num_token_ids", lambda _tokenizer: loaded.embed.shape[0])
    with pytest.raises(ValueError, match="embedding rows are all taken and its tokenizer has no mask token"):
        load(target)
    assert opened(tmp_path / "own", target).num_slots == 3


def test_without_a_version_the_fingerprint_is_that_of_the_weights(target: Path, tmp_path: Path) -> None:
    save_random_checkpoint(tmp_path / "a", target, seed=0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    save_random_checkpoint(tmp_path / "c", target, seed=1)
    prints = [opened(tmp_path / name, target).fingerprint for name in "abc"]
    assert prints[0] == prints[1] == sha256_tree(tmp_path / "a")[:16] != prints[2]
    assert opened(tmp_path / "a", target, version="v1").fingerprint == "v1"


def test_weights_of_another_target_are_refused_before_any_are_loaded(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the application's builder too, which Serve asks before it stops a replica."""
    from serve_app.app import build_app

    def never(*_arguments: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("serve_app.served_model.load_target", never)
    save_random_checkpoint(tmp_path / "own", target, 0)
    other = tiny_target_folder(tmp_path / "other", num_layers=8)
    args = AppArgs(checkpoint=str(tmp_path / "own"), target=str(target))
    assert build_app(args)._bound_deployment.name == "Endpoint"
    for changes, message in (
        ({"target": str(other)}, "num_target_layers is 6, the target has 8"),
        ({"mask_token_id": 260}, "mask_token_id is 259, the target's is set to 260"),
        ({"checkpoint": str(tmp_path)}, "is not a draft model"),
    ):
        wrong = args.model_copy(update=changes)
        for take in (build_app, open_model):
            with pytest.raises(ValueError, match=message):
                take(wrong)
