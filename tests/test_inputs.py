"""A dry run: what of the inputs is missing, for every stage, and that it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from lilicorr.config import PipelineConfig, from_dict
from pipelines import inputs
from pipelines.full import main


def dry(tmp_path: Path, *options: str) -> None:
    main(["--profile", "tiny", "--run-dir", str(tmp_path / "runs"), "--dry-run", *options])


def test_a_sound_profile_would_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("runs: not done yet") == 5 and "would fail" not in printed
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named_under_its_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = f"[held_out, humanevil, math500, math500={tmp_path}/none.jsonl]"
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
    starts = ["target.dtype", "unknown benchmark 'humanevil'", "no package has 'math500'", "file of the set 'math500'"]
    starts += ["evaluate.systems.other.run 'y' is no run"]
    assert [problem[: len(start)] for problem, start in zip(found["evaluate"], starts, strict=True)] == starts
    assert list(tmp_path.iterdir()) == []


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
