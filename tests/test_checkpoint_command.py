"""`python -m lilicorr.checkpoint`: what its commands print and write, and what they take from a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lilicorr.checkpoint import read_checkpoint, write_checkpoint
from lilicorr.checkpoint.__main__ import main, weight_type
from lilicorr.checkpoint.format import NATIVE, SPECULATORS
from lilicorr.config import TargetConfig
from lilicorr.target import Target, load_target
from lilicorr.tiny import NUM_ROWS, byte_tokenizer, tiny_target_folder
from test_convert import assert_same, make


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    return target_factory(dtype=torch.float32)


def command(*arguments: str | Path) -> None:
    main([str(argument) for argument in arguments])


def test_convert_and_inspect_on_the_command_line(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = make(target, NATIVE, "lilicorr")
    write_checkpoint(tmp_path / "own", written)
    command("convert", tmp_path / "own", tmp_path / "vllm", "--to", "vllm")
    assert_same(read_checkpoint(tmp_path / "vllm"), written)
    assert "layout" not in json.loads((tmp_path / "vllm" / "config.json").read_text())["dflash_config"]
    command("convert", tmp_path / "vllm", tmp_path / "back", "--to", "native")
    for path in (tmp_path / "own").iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    said = [f"{tmp_path / form} is a copy in the format {to}" for form, to in (("vllm", "vllm"), ("back", "native"))]
    assert capsys.readouterr().out.splitlines() == said

    command("inspect", tmp_path / "own")
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["head"].startswith("lilicorr") and "'logit_scale': 8.0" in shown["head"]
    assert shown["blocks"] == "in_place, block size 5, drafted width 4"
    command("inspect", tmp_path / "vllm")
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("as it stands")).endswith("sglang, vllm, tensorrt_llm")
    with pytest.raises(SystemExit, match="error: .*back exists"):
        command("convert", tmp_path / "own", tmp_path / "back", "--to", "vllm")
    with pytest.raises(SystemExit, match="error: zlab has no checkpoints of the head lilicorr"):
        command("convert", tmp_path / "own", tmp_path / "zlab", "--to", "zlab")
    with pytest.raises(SystemExit, match="error: .*nowhere is not a draft model: config.json is missing"):
        command("inspect", tmp_path / "nowhere")


def test_convert_takes_from_the_target_what_the_source_lacks(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lilicorr.checkpoint.__main__.load_target", lambda config: target)
    specforge = make(target, "specforge", "dspark")
    write_checkpoint(tmp_path / "specforge", specforge, "specforge")
    with pytest.raises(SystemExit, match="deepspec holds copies of the target's tables"):
        command("convert", tmp_path / "specforge", tmp_path / "no", "--to", "deepspec")
    for form, message in (
        ("gguf", "format must be one of native, .* got 'gguf'"),
        ("zlab", "no checkpoints of the head"),
    ):
        with pytest.raises(SystemExit, match=message):
            command("convert", tmp_path / "specforge", tmp_path / "no", "--to", form, "--target", "some/model")
    command("convert", tmp_path / "specforge", tmp_path / "deepspec", "--to", "deepspec", "--target", "some/model")
    assert_same(read_checkpoint(tmp_path / "deepspec", target), specforge)
    assert torch.equal(load_file(tmp_path / "deepspec" / "model.safetensors")["lm_head.weight"], target.lm_head)
    command("convert", tmp_path / "deepspec", tmp_path / "spec", "--to", "speculators", "--target", "some/model")
    verifier = json.loads((tmp_path / "spec" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "some/model"
    assert_same(read_checkpoint(tmp_path / "spec", target), specforge)


def test_convert_takes_no_half_of_another_target(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revision and hashes belong to the name: under another one, or another revision, they are the given target's."""
    target.tokenizer = byte_tokenizer()
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(
        "lilicorr.checkpoint.__main__.load_target",
        lambda config: asked.append((config.source, config.revision)) or target,
    )
    before = {"source": "a/target", "revision": "abc", "tokenizer_hash": "beef", "template_hash": "f00d"}
    write_checkpoint(tmp_path / "own", replace(make(target, NATIVE, "argmax"), info={"target": before}))

    def named(*options: str) -> dict[str, Any]:
        folder = tmp_path / "-".join(["to", *options]).replace("/", "-")
        command("convert", tmp_path / "own", folder, "--to", "zlab", "--target", *options)
        return json.loads((folder / "lilicorr.json").read_text())["target"]

    kept, other, newer = (
        named("a/target"),
        named("b/target", "--revision", "def"),
        named("a/target", "--revision", "def"),
    )
    assert kept == before and named("a/target", "--revision", "abc") == before
    assert other == newer | {"source": "b/target"} and newer["source"] == "a/target"
    assert newer["revision"] == "def" and newer["model_type"] == "qwen3"
    assert all(len(newer[f"{name}_hash"]) == 64 for name in ("tokenizer", "template"))
    assert named("b/target")["revision"] is None
    # tables of the revision that it was trained for, unless another one is asked for
    names, revisions = ["a/target", "b/target", "a/target", "a/target", "b/target"], ["abc", "def", "def", "abc", None]
    assert asked == list(zip(names, revisions, strict=True))


@pytest.mark.parametrize(("option", "other"), [("--revision", "--target"), ("--system", "--results")])
def test_an_option_of_another_one_is_not_passed_over(
    option: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command("convert", tmp_path, tmp_path / "no", "--to", "vllm", option, "x")
    assert f"{option} is of {other}, which is not given" in capsys.readouterr().err


def test_the_mask_token_of_the_checkpoint_settles_the_targets(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that fills every embedding row leaves none to be found."""
    full = tiny_target_folder(tmp_path / "target")
    monkeypatch.setattr("lilicorr.target.num_token_ids", lambda _tokenizer: NUM_ROWS)
    with pytest.raises(ValueError, match="embedding rows are all taken and its tokenizer has no mask token"):
        load_target(TargetConfig(str(full)))
    own = load_target(TargetConfig(str(full), mask_token_id=NUM_ROWS - 2), layer_ids=(1, 3))
    for form in (NATIVE, SPECULATORS):
        write_checkpoint(tmp_path / form, make(own, form, "argmax"), form)
        command("inspect", tmp_path / form, "--target", str(full))
        assert f"mask token       {NUM_ROWS - 2}" in capsys.readouterr().out
    command("convert", tmp_path / NATIVE, tmp_path / "turned", "--to", SPECULATORS, "--target", str(full))
    assert_same(read_checkpoint(tmp_path / "turned", own), make(own, NATIVE, "argmax"))


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_target_is_loaded_in_the_type_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    for fields, dtype in (({name: "bfloat16"}, "bfloat16"), ({name: "float16"}, "float16"), ({}, "float32")):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert weight_type(tmp_path) == dtype


def test_what_a_template_took_for_true_is_read_back(target: Target, tmp_path: Path) -> None:
    info = {"template_kwargs": {"enable_thinking": 1}}
    write_checkpoint(tmp_path / "own", replace(make(target, NATIVE, "argmax"), info=info))
    assert read_checkpoint(tmp_path / "own", target).info["template_kwargs"] == info["template_kwargs"]


def test_a_text_in_place_of_a_figure_is_refused(target: Target, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "own", replace(make(target, NATIVE, "argmax"), info={}))
    (tmp_path / "own" / "lilicorr.json").write_text(json.dumps({"loss": "low"}))
    with pytest.raises(ValueError, match="field loss must be a number of at least 0, got 'low'"):
        read_checkpoint(tmp_path / "own", target)
