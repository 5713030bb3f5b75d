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
from training_runs import RUNS, shape, with_train

from lilicorr.checkpoint import captured_layers, load_draft_model, read_checkpoint, read_info
from lilicorr.checkpoint.__main__ import convert
from lilicorr.config import EngineConfig, PipelineConfig, RunConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.engine.engine import Engine
from lilicorr.engine.request import Request
from lilicorr.provenance import sha256_tree
from lilicorr.target import load_target
from pipelines import train
from pipelines.errors import one_line_errors
from pipelines.evaluate import load_evaluation_target
from pipelines.local import descendants
from pipelines.resources import START_TIMEOUT
from test_checkpoint import edit_config, with_value


def entries(config: PipelineConfig, run: str) -> list[dict[str, Any]]:
    path = config.directory / "train" / run / "metrics.jsonl"
    whole, _, _ = path.read_text().rpartition("\n")  # a line that is being written is none yet
    return [json.loads(line) for line in whole.splitlines()]


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
    assert info["target"]["source"] == config.target.source  # which the description leaves out


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


def test_a_start_that_reads_other_layers_is_trained_and_served(
    config: PipelineConfig, in_process: list[str], tmp_path: Path
) -> None:
    """Made for another length too. What decodes it captures its layers: both decoders answer as the target does."""
    ids, first = (0, 2, 4), {"trunk": replace(RUNS["trunk"], steps=1)}
    set_up = with_train(config, drafter=shape(target_layer_ids=ids), drafter_lr=1e-12)
    train.run(with_train(set_up, runs=first))
    published = tmp_path / "published"
    convert(config.directory / "train" / "trunk" / "final", published, "zlab_old")
    edit_config(published, with_value("max_position_embeddings", 77))
    warm = with_train(set_up, runs={"warm": replace(RUNS["lilicorr"], start_from=str(published), steps=2)})
    train.run(warm)
    assert in_process == ["trunk", "warm"]
    final = config.directory / "train" / "warm" / "final"
    assert captured_layers(final) == ids
    trained, start = (read_checkpoint(folder).tensors for folder in (final, published))
    assert all(torch.allclose(trained[name], tensor, atol=1e-9) for name, tensor in start.items())
    target = load_evaluation_target(warm, 6)
    assert target.layer_ids == ids
    draft_model, prompt, params = load_draft_model(final, target), [3, 1, 4, 1, 5], SamplingParams(24)
    answer = Decoder(target, None).generate(prompt, params).token_ids
    blocks = list(Decoder(target, draft_model).stream(prompt, params))
    engine, chunks = Engine(target, draft_model, EngineConfig(max_running=2, num_pages=8)), []
    engine.submit(Request("a", prompt, params))
    while engine.busy:
        chunks += engine.step()
    assert [chunk.token_ids for chunk in chunks] == blocks
    assert [token_id for block in blocks for token_id in block] == answer


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


def test_what_is_damaged_is_made_again(config: PipelineConfig, in_process: list[str]) -> None:
    """From the run's newest state; the training set of the same size is told by its content."""
    first = train.run(config)
    folder = config.directory / "train"
    (folder / "lilicorr" / "final" / "model.safetensors").write_bytes(b"")
    tokens = folder / train.TRAINING_SET / "tokens.npy"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert train.run(config) == first
    assert in_process == [*RUNS, "lilicorr"] and tokens.read_bytes() == data
    assert [entry["step"] for entry in entries(config, "lilicorr")] == [1, 2, 3, 4, 4, 5, 6]


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


@pytest.mark.parametrize("harm", ["flipped", "cut", "missing", "empty", "header"])
@pytest.mark.parametrize("name", ["tokens.npy", "mask.npy", "offsets.npy", "vocab.npy", "meta.json"])
def test_a_damaged_training_set_is_built_again(config: PipelineConfig, name: str, harm: str) -> None:
    folder = config.directory / "train" / "training_set"
    meta = train.ensure_training_set(config).meta
    path, whole = folder / name, (folder / name).read_bytes()
    if harm == "flipped":
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    elif harm in ("cut", "empty"):
        path.write_bytes(whole[:-9] if harm == "cut" else b"")
    elif harm == "header":  # of another byte order, or type; of meta.json a key is lost
        path.write_bytes(whole.replace(b"<i", b">i").replace(b"|b1", b"|i1").replace(b'"rows"', b'"row"'))
    else:
        path.unlink()
    assert train.ensure_training_set(config).meta == meta and path.read_bytes() == whole


def command_line(pid: int) -> str:
    """Of a process; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_worker_when(ready: Callable[[], bool], killed: list[int], deadline_s: float = 600.0) -> None:
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
    config = with_train(config, runs=runs, checkpoint_steps=5, batch_size=4, keep_checkpoints=40)  # none goes
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


@pytest.mark.parametrize(("least", "asked", "needed"), [(None, 3, 3), (2, (2, 3), 2)])
def test_a_cluster_is_asked_for_as_many_workers_as_there_may_be(
    config: PipelineConfig,
    ray_environment: None,
    monkeypatch: pytest.MonkeyPatch,
    least: int | None,
    asked: int | tuple[int, int],
    needed: int,
) -> None:
    """And needs room for the fewest only. All of them are waited for as long as nodes take to boot."""
    import ray.train.torch

    seen: list[Any] = []

    class Recorder:
        def __init__(self, loop: Callable, scaling_config: ray.train.ScalingConfig, **_: Any) -> None:
            seen.append(scaling_config.num_workers)

        def fit(self) -> None:
            seen.append(os.environ.get(START_TIMEOUT))

    monkeypatch.setattr(train.local, "connect", lambda *_: None)
    monkeypatch.delenv(START_TIMEOUT, raising=False)
    monkeypatch.setattr(train, "check_resources", lambda count, *_: seen.append(count))
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", Recorder)
    train.fit(train.Job(with_train(config, num_workers=3, min_workers=least), "trunk", "identity"))
    assert seen == [needed, asked, None if least else "1800"]
    assert START_TIMEOUT not in os.environ  # another run of this process may have `min_workers`
