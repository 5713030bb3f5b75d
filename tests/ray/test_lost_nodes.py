"""A node or a worker is lost in the middle of a stage: the rest ends as if it had not been.

`tests/serve/test_lost_node.py` has the endpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_regenerate
import torch
from safetensors.torch import load_file
from test_regenerate import change, expected, folder_of, found, make_slow
from test_regenerate import config as corpus  # noqa: F401
from training_runs import config as recipe  # noqa: F401
from training_runs import with_train

import fake_generator
from lilicorr.config import EvaluateConfig, PipelineConfig, SystemConfig
from lilicorr.prompts import Conversation, write_conversations
from lilicorr.provenance import sha256_tree
from nodes import Nodes, node_cluster
from pipelines import evaluate, regenerate, train

STEPS, NEAR = 1200, 160  # of the run whose workers come and go, and of the one that is left alone

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def nodes(ray_environment: None) -> Iterator[Nodes]:
    with node_cluster() as made:
        yield made


@pytest.fixture
def two_nodes(ray_environment: None) -> Iterator[Nodes]:
    with node_cluster(2) as made:
        yield made


@pytest.fixture
def shipped(nodes: Nodes) -> Iterator[None]:
    """Let workers have what is defined in the tests, whose folder they do not know."""
    import ray

    modules = (test_regenerate, fake_generator, sys.modules[__name__])
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


def once(happened: Callable[[], bool], act: Callable[[], None]) -> threading.Event:
    """Do something in a thread as soon as something has happened; the event is set behind it."""
    done = threading.Event()

    def watch() -> None:
        while not happened():
            if done.wait(0.05):
                return
        act()
        done.set()

    threading.Thread(target=watch, daemon=True).start()
    return done


def log_of(config: PipelineConfig) -> list[dict[str, Any]]:
    """What the run `trunk` has logged."""
    path = config.directory / "train" / "trunk" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def twin_of(config: PipelineConfig, profile: str) -> PipelineConfig:
    """The same config and inputs in a run directory of its own."""
    twin = replace(config, profile=profile)
    shutil.copytree(config.directory, twin.directory, symlinks=True)
    return twin


def test_regeneration_ends_without_the_node(nodes: Nodes, corpus: PipelineConfig, shipped: None) -> None:  # noqa: F811
    """Nobody replaces it: the actors of the other nodes make its shards as well."""
    corpus = change(corpus, num_actors=3)
    manifests = folder_of(corpus) / "manifest"
    lost = once(lambda: len(list(manifests.glob("*.json"))) >= 1, nodes.lose)
    numbers = regenerate.run(corpus, make_slow)
    assert lost.is_set()
    assert found(corpus) == expected(corpus) and numbers["ok"] == 22


def test_training_goes_on_where_another_node_takes_over(nodes: Nodes, recipe: PipelineConfig) -> None:  # noqa: F811
    """Two workers on two of three nodes; the run ends with the bytes of one that was left alone."""
    runs = {"trunk": replace(recipe.train.runs["trunk"], steps=600)}
    recipe = with_train(recipe, runs=runs, num_workers=2, checkpoint_steps=20, log_steps=20, max_failures=3)
    whole = twin_of(recipe, "whole")
    train.run(whole)
    states = recipe.directory / "train" / "trunk" / "checkpoints"

    lost = once(lambda: len(list(states.glob("step_*"))) >= 2, nodes.lose)
    result = train.run(recipe)
    assert lost.is_set() and result["runs"]["trunk"]["steps"] == 600
    assert sum(entry.get("resumed", False) for entry in log_of(recipe)) == 1
    ends = [sha256_tree(run.directory / "train" / "trunk" / "final") for run in (recipe, whole)]
    assert ends[0] == ends[1]


def weights_after(config: PipelineConfig, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of the run `trunk` in a state that it has left."""
    folder = config.directory / "train" / "trunk" / "checkpoints" / f"step_{step}"
    return load_file(folder / "state.safetensors")


def test_training_goes_on_with_fewer_workers_and_with_more_again(
    two_nodes: Nodes,
    recipe: PipelineConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two nodes one is lost and nobody replaces it for a while: every step is done once, on the same rows.

    Its states are those of a run that was left alone: to the byte with as many workers, else nearly, until roundings
    have grown.
    """
    import ray.train

    elastic = partial(ray.train.ScalingConfig, elastic_resize_monitor_interval_s=5.0)
    monkeypatch.setattr(ray.train, "ScalingConfig", elastic)
    runs = {"trunk": replace(recipe.train.runs["trunk"], steps=STEPS, warmup_fraction=0.0)}
    pace = {"checkpoint_steps": 20, "keep_checkpoints": STEPS, "log_steps": 20}
    recipe = with_train(recipe, runs=runs, num_workers=2, min_workers=1, **pace)
    whole = twin_of(recipe, "whole")
    whole = with_train(whole, runs={"trunk": replace(runs["trunk"], steps=NEAR)}, min_workers=None)
    train.run(whole)

    states = recipe.directory / "train" / "trunk" / "checkpoints"
    lost = once(lambda: len(list(states.glob("step_*"))) >= 2, two_nodes.lose)
    back = once(lambda: lost.is_set() and any(entry.get("workers") == 1 for entry in log_of(recipe)), two_nodes.add)
    result = train.run(recipe)
    assert lost.is_set() and back.is_set() and result["runs"]["trunk"]["steps"] == STEPS
    log = log_of(recipe)
    assert [entry["step"] for entry in log if "loss" in entry] == list(range(20, STEPS + 1, 20))
    resumed = [(entry["step"], entry["workers"]) for entry in log if "resumed" in entry]
    assert [workers for _, workers in resumed] == [1, 2]
    changed = resumed[0][0]
    for step in range(20, NEAR, 20):
        found, expected = weights_after(recipe, step), weights_after(whole, step)
        for name, tensor in expected.items():
            if step <= changed:
                assert torch.equal(found[name], tensor), (step, name)
            else:
                assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-5), (step, name)
    assert changed + 40 < NEAR


def leaving_loop(settings: dict[str, Any]) -> None:
    """`train.worker_loop`, but rank 1 ends in front of its second report, once, where rank 0 waits for it."""
    import ray.train

    from pipelines import train

    report, config = ray.train.report, settings["config"]
    gone = Path(config["run_dir"]) / "gone"
    state = Path(config["run_dir"]) / config["profile"] / "train" / settings["name"] / "checkpoints" / "step_4"
    reports: list[dict[str, Any]] = []

    def leave(metrics: dict[str, Any]) -> None:
        if ray.train.get_context().get_world_rank() == 1 and len(reports) == 1 and not gone.exists():
            while not state.is_dir():
                time.sleep(0.05)
            gone.touch()
            os._exit(1)
        reports.append(metrics)
        report(metrics)

    ray.train.report = leave
    train.worker_loop(settings)


def test_a_rank_that_ends_between_two_reports_is_not_waited_for(
    nodes: Nodes,
    recipe: PipelineConfig,  # noqa: F811
    shipped: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A report is a barrier of all ranks: the run starts again from its newest state instead of hanging there."""
    runs = {"trunk": replace(recipe.train.runs["trunk"], steps=8)}
    recipe = with_train(recipe, runs=runs, num_workers=2, checkpoint_steps=2, log_steps=1, max_failures=1)
    whole = twin_of(recipe, "whole")
    train.run(whole)
    monkeypatch.setattr(train, "worker_loop", leaving_loop)
    result = train.run(recipe)
    assert (Path(recipe.run_dir) / "gone").is_file() and result["runs"]["trunk"]["steps"] == 8
    assert [entry["step"] for entry in log_of(recipe) if "resumed" in entry] == [4]
    assert [entry["step"] for entry in log_of(recipe) if "loss" in entry] == list(range(1, 9))
    ends = [sha256_tree(run.directory / "train" / "trunk" / "final") for run in (recipe, whole)]
    assert ends[0] == ends[1]


def test_evaluation_goes_on_with_what_is_not_measured_yet(nodes: Nodes, recipe: PipelineConfig) -> None:  # noqa: F811
    """Its task starts again on another node: greedy results are there already, sampled ones are not."""
    messages = [{"role": "user", "content": "What is a lattice?"}]
    held_out = [Conversation(cid, messages, "test", "test", cid) for cid in "abcdefgh"]
    folder = recipe.directory / "prepare"
    described = (folder / "target.json").read_bytes()
    folder.unlink()  # a link to what other tests read too
    folder.mkdir()
    write_conversations(folder / "held_out.parquet", held_out)
    (folder / "target.json").write_bytes(described)
    systems = {"autoregressive": SystemConfig()}
    settings = EvaluateConfig(("held_out",), systems, max_new_tokens=200, bootstrap_samples=9, sampled_seeds=(1, 2, 3))
    recipe = replace(recipe, evaluate=settings)
    path = recipe.directory / "evaluate" / "results.json"
    before: list[dict[str, Any]] = []

    def lose() -> None:
        before.append(json.loads(path.read_text()))
        nodes.lose()

    lost = once(path.is_file, lose)
    result = evaluate.measure_on_cluster(recipe, 0.0)
    assert lost.is_set() and result == {"tau": {"autoregressive": {"held_out": 1.0}}}
    assert json.loads(path.read_text())["systems"] == before[0]["systems"]  # with their times
    for seed in settings.sampled_seeds:
        sampled = json.loads((path.parent / f"sampled_{seed}.json").read_text())
        assert sampled["systems"]["autoregressive"]["held_out"]["tau"] == 1.0
