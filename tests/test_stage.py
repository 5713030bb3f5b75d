"""Stage markers: when a stage is skipped, why it runs, what it depends on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lilicorr.config import PipelineConfig, PromptConfig, TrainConfig, with_overrides
from lilicorr.provenance import write_json
from pipelines import full
from pipelines.stage import (
    MARKER,
    VERSIONS,
    Stage,
    argument_parser,
    decide,
    drive,
    duration,
    list_outputs,
    plan,
    read_marker,
    relevant,
    resolve_config,
    run_stage,
    select,
)


def writer(name: str, content: str = "1") -> Stage:
    """A stage that writes one file."""

    def run(config: PipelineConfig) -> dict[str, Any]:
        (config.directory / name / "out.txt").write_text(content)
        return {"length": len(content)}

    fields, inputs = {"prepare": (("prompts",), ()), "train": (("train",), ("prepare",))}[name]
    return Stage(name, run, fields, inputs, ignored=("train.num_workers",) if name == "train" else ())


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    return PipelineConfig(profile="p", run_dir=str(tmp_path))


@pytest.fixture
def done(config: PipelineConfig) -> tuple[Stage, Stage]:
    """Two stages that have run."""
    stages = (writer("prepare"), writer("train"))
    assert [decision.reason for decision in drive(stages, config)] == ["not done yet", "not done yet"]
    return stages


def reasons(stages: tuple[Stage, ...], config: PipelineConfig) -> list[str]:
    return [decision.reason if decision.runs else "skipped" for decision in plan(stages, config)]


def test_a_second_run_does_nothing(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    before = {path: path.stat().st_mtime_ns for path in config.directory.rglob("*/*")}
    decisions = drive(done, config)
    assert not any(decision.runs for decision in decisions)
    assert all(decision.reason.startswith("same hash ") for decision in decisions)
    assert {path: path.stat().st_mtime_ns for path in config.directory.rglob("*/*")} == before


def test_the_marker_says_what_was_made_of_what(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    marker = read_marker(config, "train")
    assert marker is not None
    assert marker["outputs"][0]["path"] == "out.txt" and marker["outputs"][0]["size"] == 1
    assert marker["metrics"] == {"length": 1}
    assert marker["upstream"] == {"prepare": read_marker(config, "prepare")["content"]}
    assert marker["config"]["train.batch_size"] == 64 and "train.num_workers" not in marker["config"]
    assert marker["started"] <= marker["finished"] and marker["provenance"]["command"]


def test_only_a_stage_that_reads_the_changed_key_runs(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    changed = with_overrides(config, ["train.batch_size=32", "train.seed=1"])
    assert reasons(done, changed) == ["skipped", "config changed: train.batch_size 64 -> 32, train.seed 0 -> 1"]
    assert reasons(done, with_overrides(config, ["train.num_workers=8", "deploy.port=1"])) == ["skipped", "skipped"]


def test_the_target_is_the_commit_that_prepare_found(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    """A branch may move between the stages; the marker keeps what the user wrote, so that nothing runs again."""
    write_json(config.directory / "prepare" / "target.json", {"revision": "0123abc"})
    seen = []
    train = replace(done[1], fields=("target",), run=lambda given: {"seen": seen.append(given.target.revision)})
    branch = with_overrides(config, ["target.revision=main"])
    run_stage(train, branch, forced=False)
    assert seen == ["0123abc"] and read_marker(config, "train")["config"]["target.revision"] == "main"
    assert not decide(train, branch).runs


def test_a_stage_behind_one_that_runs_waits_for_its_result(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    changed = replace(config, prompts=PromptConfig(max_chars=10))
    assert reasons(done, changed) == [
        "config changed: prompts.max_chars None -> 10",
        "unless prepare makes the same as before",
    ]
    assert [decision.runs for decision in drive(done, changed)] == [True, False]  # it made the same file again
    other = (writer("prepare", "2"), done[1])
    ran = drive(other, config)
    assert [decision.runs for decision in ran] == [True, True] and ran[1].reason == "upstream changed: prepare"


def test_other_reasons_to_run(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    output = config.directory / "train" / "out.txt"
    output.write_text("12")
    assert reasons(done, config)[1] == "output changed: out.txt has 2 bytes instead of 1"
    output.unlink()
    assert reasons(done, config)[1] == "output missing: out.txt"
    output.write_text("1")
    assert reasons(done, config)[1] == "skipped"
    newer = (done[0], replace(done[1], version=2))
    assert reasons(newer, config)[1] == "the stage's code changed: version 1 -> 2"
    dead = (done[0], replace(done[1], problem=lambda _: "nobody answers"))
    assert reasons(dead, config)[1] == "nobody answers"
    (config.directory / "train" / MARKER).unlink()
    assert reasons(done, config)[1] == "goes on from unfinished work"


def test_an_output_of_the_same_size_is_compared_by_content(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    output = config.directory / "train" / "out.txt"
    output.touch()
    assert reasons(done, config) == ["skipped", "skipped"]
    output.write_text("2")
    os.utime(output, ns=(0, 0))
    assert reasons(done, config)[1] == "output changed: out.txt has another content of the same size"


def test_a_changed_source_makes_its_stage_run_again(config: PipelineConfig) -> None:
    folder = config.directory.parent / "prompts"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text("text")

    def sources(_: PipelineConfig) -> dict[str, Path]:
        return {str(path): path for path in sorted(folder.iterdir())} if folder.exists() else {}

    stages = (replace(writer("prepare"), sources=sources), writer("train"))
    drive(stages, config)
    (folder / "a").touch()
    assert reasons(stages, config) == ["skipped", "skipped"]
    (folder / "a").write_text("next")
    os.utime(folder / "a", ns=(0, 0))
    expected = f"source changed: {folder / 'a'} has another content of the same size"
    assert reasons(stages, config) == [expected, "unless prepare makes the same as before"]
    assert [decision.runs for decision in drive(stages, config)] == [True, False]
    (folder / "b").write_text("longer text")
    assert reasons(stages, config)[0] == f"source changed: {folder / 'b'} has 11 bytes instead of 4"
    (folder / "b").rename(folder / "c")
    assert reasons(stages, config)[0] == f"source changed: {folder / 'c'} was not there or not recorded"
    (folder / "c").unlink()
    assert reasons(stages, config)[0] == f"source changed: {folder / 'b'} is gone"
    (folder / "a").unlink()
    folder.rmdir()  # nothing could be made of it again
    assert reasons(stages, config) == ["skipped", "skipped"]


def test_force_starts_over_and_keeps_the_former_outputs(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    (config.directory / "train" / "precious").write_text("60 GPU hours")
    (decision,) = drive([done[1]], config, forced=["train"])
    assert decision.runs and decision.reason == "forced"
    assert not (config.directory / "train" / "precious").exists()
    (kept,) = (config.directory / "_replaced").glob("train-*/precious")
    assert kept.read_text() == "60 GPU hours"


def test_a_stage_without_its_inputs_is_an_error(config: PipelineConfig) -> None:
    with pytest.raises(ValueError, match="train needs prepare, not finished in "):
        drive([writer("train")], config)


def test_a_failed_stage_leaves_no_marker(config: PipelineConfig, done: tuple[Stage, Stage]) -> None:
    def fail(_: PipelineConfig) -> dict[str, Any]:
        raise OSError("disk full")

    changed = with_overrides(config, ["train.batch_size=32"])
    with pytest.raises(OSError, match="disk full"):
        drive([replace(done[1], run=fail)], changed)
    assert read_marker(config, "train") is None
    assert reasons(done, config)[1] == "goes on from unfinished work"


def test_outputs_leave_out_what_comes_and_goes(tmp_path: Path) -> None:
    for name in ("a.txt", "run/final/w", "run/checkpoints/step_1/w", "set.tmp-12/x", ".tmp-1", "dir/.hidden", MARKER):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [output["path"] for output in list_outputs(tmp_path)] == ["a.txt", "run/final/w"]


def test_the_real_stages_depend_on_each_other_in_order() -> None:
    names = [stage.name for stage in full.STAGES]
    assert names == ["prepare", "regenerate", "train", "evaluate", "deploy"]
    for index, stage in enumerate(full.STAGES):
        assert set(stage.inputs) <= set(names[:index]) and stage.version == VERSIONS[stage.name]
        values = relevant(stage, PipelineConfig(train=TrainConfig()))
        for field in (*stage.fields, *stage.ignored):
            assert with_a_field(field), field
        assert values and not any(path.startswith(("run_dir", "profile")) for path in values)


def with_a_field(path: str) -> bool:
    """Whether the pipeline's config has the dotted `path`."""
    node: Any = PipelineConfig()
    for key in path.split("."):
        if not hasattr(node, key):
            return False
        node = getattr(node, key)
    return True


def test_select_ranges_and_unknown_names() -> None:
    stages = full.STAGES
    assert [stage.name for stage in select(stages, "train", None)] == ["train", "evaluate", "deploy"]
    assert [stage.name for stage in select(stages, None, "regenerate")] == ["prepare", "regenerate"]
    with pytest.raises(ValueError, match="unknown stage 'trian'; the stages are prepare, "):
        select(stages, "trian", None)
    with pytest.raises(ValueError, match="prepare comes first"):
        select(stages, "train", "prepare")


def test_options_become_a_config_with_absolute_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = argument_parser("x").parse_args(["--profile", "tiny", "--set", "train.seed=7", "--run-dir", "out"])
    config = resolve_config(parsed)
    assert config.train.seed == 7 and config.directory == tmp_path / "out" / "tiny"
    own = tmp_path / "mine.yaml"
    own.write_text("target: {source: random}\n")
    config = resolve_config(argument_parser("x").parse_args(["--profile", str(own)]))
    assert config.profile == "mine" and config.directory == tmp_path / "runs" / "mine"


def test_paths_are_relative_to_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has another current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    changes = ["target.source=./model", "prompts.source=a.jsonl", "prompts.data_dir=data", "deploy.api_key_file=key"]
    changes += ["evaluate.sets=[held_out, math500=m.jsonl]", "train.runs.lilicorr.start_from=./start"]
    options = [word for change in changes for word in ("--set", change)]
    config = resolve_config(argument_parser("x").parse_args(["--profile", "tiny", *options]))
    monkeypatch.chdir("/")
    assert config.target.path == tmp_path / "model" and config.deploy.api_key_file == str(tmp_path / "key")
    assert (config.prompts.source, config.prompts.data_dir) == (str(tmp_path / "a.jsonl"), str(tmp_path / "data"))
    assert config.evaluate.sets == ("held_out", f"math500={tmp_path}/m.jsonl")
    starts = {name: run.start_from for name, run in config.train.runs.items()}
    assert starts == {"trunk": None, "dflash": "trunk", "lilicorr": str(tmp_path / "start")}


def test_run_stage_and_decide_agree_on_the_hash(config: PipelineConfig) -> None:
    stage = writer("prepare")
    marker = run_stage(stage, config, forced=False)
    assert marker["hash"] in decide(stage, config).reason
    assert run_stage(stage, with_overrides(config, ["prompts.max_chars=1"]), False)["hash"] != marker["hash"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (185, "3 min 05 s"), (7440, "2 h 04 min")]
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words
