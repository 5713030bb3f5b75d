"""The training stage: what it refuses, what it leaves, what it skips, and that a killed worker changes nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_shards import turn, write_regeneration
from lilicorr.checkpoint import load_draft_model, read_checkpoint, read_info
from lilicorr.checkpoint.__main__ import convert
from lilicorr.config import DrafterConfig, PipelineConfig, RunConfig, TargetConfig, TrainConfig
from lilicorr.prompts import Conversation, write_conversations
from lilicorr.provenance import sha256_tree, write_json
from lilicorr.target import load_target
from lilicorr.tiny import tiny_target_folder
from pipelines import inputs as dry_run
from pipelines import train
from pipelines.errors import one_line_errors
from pipelines.local import descendants
from pipelines.prepare import describe_target

HEAD = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "factor_dim": 16}
RUNS = {
    "trunk": RunConfig(head="argmax", steps=5, schedule="constant"),
    "lilicorr": RunConfig(head="lilicorr", head_config=HEAD, start_from="trunk", steps=6),
}


def shape(**changes: Any) -> DrafterConfig:
    """The drafter of these tests, changed."""
    return DrafterConfig(**({"num_layers": 2, "block_size": 4, "num_candidates": 3} | changes))


def with_head(**changes: Any) -> dict[str, RunConfig]:
    """The runs of these tests, the head changed."""
    return RUNS | {"lilicorr": replace(RUNS["lilicorr"], head_config=HEAD | changes)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the outputs of the stages before: a random target and 12 conversations of random bytes."""
    folder = tmp_path_factory.mktemp("inputs") / "test"
    target = TargetConfig(source=str(tiny_target_folder(folder.parent / "target")))
    write_json(folder / "prepare" / "target.json", describe_target(target))
    messages = [{"role": "user", "content": "What is a lattice?"}]
    held_out = [Conversation(cid, messages, "test", "test", cid) for cid in ("a", "b")]
    write_conversations(folder / "prepare" / "held_out.parquet", held_out)
    ids = torch.randint(0, 256, (12, 30), generator=torch.Generator().manual_seed(0)).tolist()
    turns = [turn(f"c{i:02d}", 0, row[:8], row[8 : 14 + i]) for i, row in enumerate(ids)]
    write_regeneration(folder / "regenerate", turns, shard_size=5)
    return folder


@pytest.fixture
def config(inputs: Path, tmp_path: Path) -> PipelineConfig:
    """The config of those inputs, in a run directory of its own."""
    (tmp_path / "test").mkdir()
    for name in ("prepare", "regenerate"):
        (tmp_path / "test" / name).symlink_to(inputs / name)
    settings = TrainConfig(
        runs=RUNS,
        drafter=shape(),
        batch_size=4,
        micro_batch_size=2,
        max_length=64,
        max_anchors=8,
        precision="float32",
        checkpoint_steps=2,
        log_steps=1,
        gpus_per_worker=0.0,
    )
    target = TargetConfig(source=str(inputs.parent / "target"))
    return PipelineConfig(profile="test", run_dir=str(tmp_path), target=target, train=settings)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train in this process instead of on Ray; the names of the runs that were trained, in order."""
    trained: list[str] = []

    def fit(job: train.Job) -> None:
        trained.append(job.name)
        train.train_run(job, torch.device("cpu"), lambda metrics: None)

    monkeypatch.setattr(train, "fit", fit)
    return trained


def with_train(config: PipelineConfig, **changes: Any) -> PipelineConfig:
    return replace(config, train=replace(config.train, **changes))


def entries(config: PipelineConfig, run: str) -> list[dict[str, Any]]:
    path = config.directory / "train" / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_runs_are_trained_in_order_and_leave_what_evaluation_reads(
    config: PipelineConfig, in_process: list[str]
) -> None:
    config = with_train(config, eval_steps=3)
    result = train.run(config)
    assert in_process == ["trunk", "lilicorr"]
    assert result["training_set"]["rows"] == 12
    folder = config.directory / "train"
    trunk, lilicorr = result["runs"]["trunk"], result["runs"]["lilicorr"]
    assert (trunk["steps"], lilicorr["steps"]) == (5, 6)
    assert lilicorr["num_blocks"] > trunk["num_blocks"] > 0
    seen = sum(entry.get("blocks", 0) for entry in entries(config, "lilicorr"))
    assert lilicorr["num_blocks"] == trunk["num_blocks"] + seen
    assert [entry["step"] for entry in entries(config, "lilicorr")] == [1, 2, 3, 3, 4, 5, 6, 6]
    taus = {entry["step"]: entry["tau"] for entry in entries(config, "lilicorr") if "tau" in entry}
    assert taus.keys() == {3, 6} and all(1 <= tau <= 4 for tau in taus.values()) and lilicorr["tau"] == taus[6]
    assert sorted(path.name for path in (folder / "lilicorr" / "checkpoints").iterdir()) == ["step_2", "step_4"]
    target = load_target(config.target, layer_ids=(1, 3))
    draft_model = load_draft_model(folder / "lilicorr" / "final", target)
    assert draft_model.head_name == "lilicorr" and draft_model.spec.block_size == 4
    info = read_info(folder / "lilicorr" / "final")
    assert info["num_blocks"] == lilicorr["num_blocks"] and info["eos_token_id"] == 258
    assert info["identity"] == lilicorr["identity"] != trunk["identity"]


def test_the_drafter_starts_where_the_run_before_ended(config: PipelineConfig, in_process: list[str]) -> None:
    runs = RUNS | {"lilicorr": replace(RUNS["lilicorr"], steps=1)}
    config = with_train(config, runs=runs, drafter_lr=1e-12)
    train.run(config)
    target = load_target(config.target, layer_ids=(1, 3))
    folder = config.directory / "train"
    trunk, lilicorr = (load_draft_model(folder / name / "final", target) for name in RUNS)
    for name, tensor in trunk.drafter.state_dict().items():
        assert torch.allclose(lilicorr.drafter.state_dict()[name], tensor, atol=1e-9), name


def test_a_run_starts_from_the_folder_of_a_checkpoint(
    config: PipelineConfig, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to where the command was started; the same content elsewhere is the same run."""
    monkeypatch.chdir(tmp_path)
    folder, runs = config.directory / "train", {"trunk": replace(RUNS["trunk"], steps=1)}
    train.run(with_train(config, runs=runs, drafter_lr=1e-12))
    convert(folder / "trunk" / "final", Path("published"), "zlab_old")
    for start in ("./published", str(tmp_path / "moved")):
        warm = runs | {"warm": replace(RUNS["lilicorr"], start_from=start, steps=1)}
        train.run(with_train(config, runs=warm, drafter_lr=1e-12))
        if start == "./published":
            Path(start).rename("moved")
    trained, start = (read_checkpoint(f).tensors for f in (folder / "warm" / "final", tmp_path / "moved"))
    assert all(torch.allclose(trained[name], tensor, atol=1e-9) for name, tensor in start.items())
    assert "| continued from | published |" in (folder / "warm" / "final" / "README.md").read_text()
    assert in_process == ["trunk", "warm"]


def test_a_branch_goes_on_where_the_runs_before_it_stopped(
    config: PipelineConfig, in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps an epoch: the trunk ends in the second one, and the branch of a branch counts both."""
    runs = RUNS | {"twig": RunConfig(head="argmax", start_from="lilicorr", epochs=1.0)}
    result = train.run(with_train(config, runs=runs))
    training_set = train.ensure_training_set(config)
    assert [train.first_step(replace(config.train, runs=runs), name, training_set) for name in runs] == [0, 5, 11]
    assert [entry["epoch"] for entry in entries(config, "lilicorr")] == [1, 2, 2, 2, 3, 3]
    assert [entry["epoch"] for entry in entries(config, "twig")] == [3, 4, 4]
    monkeypatch.setattr(train, "first_step", lambda *_: 0)
    other = train.run(with_train(config, runs=runs))
    same = [name for name in runs if other["runs"][name]["identity"] == result["runs"][name]["identity"]]
    assert same == ["trunk"] and in_process == [*runs, "lilicorr", "twig"]


def test_finished_runs_are_skipped_and_changed_ones_replaced(config: PipelineConfig, in_process: list[str]) -> None:
    train.run(config)
    first = json.loads((config.directory / "train" / "lilicorr" / "result.json").read_text())
    assert train.run(with_train(config, num_workers=1, log_steps=5))["runs"]["lilicorr"] == first
    assert in_process == ["trunk", "lilicorr"]
    runs = RUNS | {"lilicorr": replace(RUNS["lilicorr"], steps=3)}
    assert train.run(with_train(config, runs=runs))["runs"]["lilicorr"]["steps"] == 3
    assert in_process == ["trunk", "lilicorr", "lilicorr"]
    replaced = config.directory / "train" / ".replaced" / f"lilicorr-{first['identity']}"
    assert json.loads((replaced / "result.json").read_text()) == first


def test_another_version_of_the_stage_starts_over(
    config: PipelineConfig, in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train.run(config)["runs"]
    monkeypatch.setitem(train.VERSIONS, "train", 99)
    second = train.run(config)["runs"]
    assert in_process == [*RUNS, *RUNS]
    assert all(first[name]["identity"] != second[name]["identity"] for name in RUNS)
    kept = [config.directory / "train" / ".replaced" / f"{name}-{first[name]['identity']}" for name in RUNS]
    assert all((folder / "result.json").is_file() for folder in kept)


def test_a_run_goes_on_from_its_newest_state(
    config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: list[str]
) -> None:
    train.run(config)
    whole = sha256_tree(config.directory / "train" / "lilicorr" / "final")
    again = replace(config, profile="killed")
    (tmp_path / "killed").mkdir()
    for name in ("prepare", "regenerate"):
        (tmp_path / "killed" / name).symlink_to(config.directory / name)
    original, steps = train.Trainer.step, []

    def step(trainer: train.Trainer, number: int) -> dict[str, float]:
        if len(steps) == 5 + 3:  # in the second run, behind the state of step 2
            raise KeyboardInterrupt
        steps.append(number)
        return original(trainer, number)

    monkeypatch.setattr(train.Trainer, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train.run(again)
    assert steps == [0, 1, 2, 3, 4, 0, 1, 2]
    monkeypatch.setattr(train.Trainer, "step", original)
    train.run(again)
    assert in_process == ["trunk", "lilicorr", "trunk", "lilicorr", "lilicorr"]
    log = [(entry["step"], entry.get("resumed", False)) for entry in entries(again, "lilicorr")]
    assert log == [(1, False), (2, False), (2, True), (3, False), (4, False), (5, False), (6, False)]
    assert sha256_tree(again.directory / "train" / "lilicorr" / "final") == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": {}}, "train.runs is empty"),
        (
            {"runs": {"a": RunConfig(head="medusa", steps=1)}},
            "train.runs.a.head must be one of argmax, domino, dspark, lilicorr",
        ),
        ({"runs": {"a": RunConfig()}}, "exactly one of epochs and steps"),
        ({"runs": {"a": RunConfig(head="argmax", steps=1, start_from="b")}}, "there is none.*got 'b'"),
        ({"runs": {"a": RunConfig(steps=1), "b": RunConfig(steps=1, start_from="b")}}, r"before it \(a\) or .*got 'b'"),
        ({"runs": {"a": RunConfig(steps=1, start_from="./no/where")}}, "a.start_from: .*no/where is not a checkpoint"),
        ({"runs": {"a": RunConfig(steps=1, head_config={"widht": 3})}}, "unknown key train.runs.a.head_config.widht"),
        ({"runs": {"training_set": RunConfig(steps=1)}}, "train.runs.training_set: a run's name"),
        ({"runs": {"../a": RunConfig(steps=1)}}, r"train.runs.\.\./a: a run's name"),
        ({"drafter": DrafterConfig(num_layers=6)}, "6 distinct layers cannot be captured"),
        ({"layout": "packed"}, "layout must be one of turn, conversation, got 'packed'"),
        ({"precision": "fp8"}, "train.precision must be one of bfloat16, float32, got 'fp8'"),
        ({"attention": "flash"}, "train.attention must be one of auto, flex, sdpa, parts, got 'flash'"),
        ({"attention": "flex"}, "train.attention flex has a backward pass on CUDA only, the workers are on cpu"),
        ({"sharding": "zero"}, "train.sharding must be one of none, fsdp2, got 'zero'"),
        ({"sharding": "fsdp2"}, "train.sharding fsdp2 spreads layers over at least 2 workers, there is 1"),
        ({"drafter": shape(num_heads=3)}, "train.runs.trunk: num_kv_heads must divide num_heads 3, got 2"),
        ({"drafter": shape(head_dim=-4)}, "train.runs.trunk: head_dim of a drafter must be at least 1, got -4"),
        ({"drafter": shape(num_candidates=0)}, "train.runs.trunk: num_candidates must be at least 1, got 0"),
        ({"drafter": shape(num_candidates=265)}, "train.runs.trunk: num_candidates must be at most the target's 264 "),
        ({"gpus_per_worker": 1.0}, "train.runs.trunk: num_candidates must be a power of two up to 32 on a GPU, got 3"),
        ({"drafter": shape(block_size=1)}, "train.runs.trunk: block_size must be at least 2 in_place, got 1"),
        ({"runs": with_head(hidden_size=17)}, "train.runs.lilicorr: num_heads must divide .* 17, got 2"),
        ({"runs": with_head(num_heads=0)}, "train.runs.lilicorr: num_heads must divide .* 16, got 0"),
        ({"runs": with_head(factor_dim=-1)}, "train.runs.lilicorr.head_config.factor_dim must not be negative, got -1"),
        ({"runs": with_head(hidden_size=0, token_scale=3.0)}, "train.runs.lilicorr: token_scale must .* hidden_size 0"),
        ({"runs": with_head(walk="long")}, "train.runs.lilicorr: walk must be one of "),
        (
            {"drafter": shape(init="target", intermediate_size=8)},
            r"train.runs.trunk cannot start from the target's layers \(train.drafter.init\): mlp.gate_proj.weight of ",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(
    config: PipelineConfig, in_process: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train.run(with_train(config, **changes))
    assert not in_process


def test_what_can_be_trained_passes_and_a_dry_run_says_what_cannot(config: PipelineConfig) -> None:
    described = train.read_description(config)
    for changes in (
        {},
        {"drafter": shape(init="target")},
        {"drafter": shape(num_candidates=4), "gpus_per_worker": 1.0},
    ):
        train.check_runs(with_train(config, **changes), described)
    assert dry_run.train(config) == []
    assert dry_run.train(with_train(config, precision="fp8"))[0].startswith("train.precision must be one of ")


def test_a_mask_token_outside_the_vocabulary_is_refused(config: PipelineConfig) -> None:
    described = train.read_description(config) | {"mask_token_id": 264}
    with pytest.raises(ValueError, match="mask token id 264 is outside the target's vocabulary of 264"):
        train.check_runs(config, described)


def test_shards_are_compared_with_their_manifests(config: PipelineConfig, in_process: list[str]) -> None:
    regenerated = config.directory / "regenerate"
    source = regenerated.resolve()
    regenerated.unlink()
    for path in source.rglob("*.*"):
        copy = regenerated / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    shard = regenerated / "shards" / "c05.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="c05.parquet is not the file that the manifest of shard c05 describes"):
        train.run(config)
    shard.unlink()
    with pytest.raises(ValueError, match="c05.parquet is missing"):
        train.run(config)
    (regenerated / "manifest" / "c05.json").unlink()
    with pytest.raises(ValueError, match="shard c05 has no manifest"):
        train.run(config)
    assert not in_process


def test_the_training_set_is_built_again_for_other_settings(config: PipelineConfig) -> None:
    first = train.ensure_training_set(config).meta
    path = config.directory / "train" / "training_set" / "meta.json"
    stamp = path.stat().st_mtime_ns
    assert train.ensure_training_set(config).meta == first and path.stat().st_mtime_ns == stamp
    second = train.ensure_training_set(with_train(config, max_length=20)).meta
    assert second["longest_row"] == 20 and second["content"] != first["content"]


def command_line(pid: int) -> str:
    """Of a process; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_worker_when(ready: Callable[[], bool], killed: list[int], deadline_s: float = 120.0) -> None:
    """Send SIGKILL to our own Ray Train worker as soon as `ready`."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and not killed:
        if ready():
            below = descendants(os.getpid())
            workers = [pid for pid in below if command_line(pid).startswith("ray::RayTrainWorker")]
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        time.sleep(0.02)


@pytest.mark.ray
def test_a_foreseen_error_in_a_worker_ends_in_one_line(
    config: PipelineConfig, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "check_runs", lambda *_: None)  # so that nothing finds it before
    config = with_train(config, precision="fp8", max_failures=0)
    message = r"^error: train\.precision must be one of bfloat16, float32, got 'fp8'$"
    with pytest.raises(SystemExit, match=message), one_line_errors():
        train.run(config)


@pytest.mark.ray
def test_a_killed_worker_changes_nothing(
    config: PipelineConfig, tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL between two checkpoints; the run ends with the weights of one that was left alone."""
    runs = {"lilicorr": replace(RUNS["lilicorr"], start_from=None, steps=40)}
    config = with_train(config, runs=runs, checkpoint_steps=5, batch_size=4)
    folder = config.directory / "train" / "lilicorr"
    killed: list[int] = []

    def ready() -> bool:
        return (folder / "checkpoints" / "step_5").is_dir() and len(entries(config, "lilicorr")) >= 8

    killer = threading.Thread(target=kill_worker_when, args=(ready, killed), daemon=True)
    killer.start()
    result = train.run(config)["runs"]["lilicorr"]
    killer.join()
    assert killed
    log = entries(config, "lilicorr")
    resumed = [entry["step"] for entry in log if "resumed" in entry]
    assert len(resumed) == 1 and resumed[0] >= 5 and resumed[0] % 5 == 0
    assert [entry["step"] for entry in log if "loss" in entry] == list(range(1, 41))
    assert result["steps"] == 40

    alone = replace(config, profile="alone")
    (tmp_path / "alone").mkdir()
    for name in ("prepare", "regenerate"):
        (tmp_path / "alone" / name).symlink_to(config.directory / name)

    def fit(job: train.Job) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        train.train_run(job, torch.device("cpu"), lambda metrics: None)
        torch.set_num_threads(1)

    monkeypatch.setattr(train, "fit", fit)
    assert train.run(alone)["runs"]["lilicorr"] == result
    assert sha256_tree(alone.directory / "train" / "lilicorr" / "final") == sha256_tree(folder / "final")
