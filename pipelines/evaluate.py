"""Measure the trained draft models: acceptance length and speed on prompt sets, against autoregression.

Place in the flow: reads `prepare/held_out.parquet` and `train/<run>/final`, writes `evaluate/results.json` after
every set, the same for every seed of sampled decoding, and the plots. A killed run goes on with the first set that
is not done. Where the profile trains on GPUs (`train.gpus_per_worker`) one task of the cluster does it, with as many:
the driver may be on a node without any.

    python pipelines/evaluate.py --profile demo
    python pipelines/evaluate.py --profile demo --set 'evaluate.sets=[held_out, math500=/data/math500.jsonl]'
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lilicorr.acceptance import over_seeds
from lilicorr.benchmarks import benchmark_facts, load_benchmark
from lilicorr.chat import render_prompt
from lilicorr.checkpoint import load_draft_model
from lilicorr.config import EvaluateConfig, PipelineConfig, fingerprint, from_dict, to_dict
from lilicorr.draft_model import DraftModel
from lilicorr.drafter import captured_layer_ids
from lilicorr.evaluate import AUTOREGRESSIVE, MakeSystem, Prompt, System, run_sets
from lilicorr.plots import draw_plots
from lilicorr.prompts import read_conversations
from lilicorr.provenance import provenance, sha256_tree, write_json
from lilicorr.results import stale
from lilicorr.target import Target, load_target
from lilicorr.throughput import measure_throughput
from pipelines import local
from pipelines.errors import sent_home
from pipelines.inputs import HELD_OUT, set_entries
from pipelines.resources import check_resources
from pipelines.stage import VERSIONS

logger = logging.getLogger(__name__)


def run(config: PipelineConfig) -> dict[str, Any]:
    """`measure`, on a GPU of the cluster if the profile trains on GPUs, else in this process."""
    num_gpus = config.train.gpus_per_worker
    return measure_on_cluster(config, num_gpus) if num_gpus else measure(config)


def measure_on_cluster(config: PipelineConfig, num_gpus: float) -> dict[str, Any]:
    """`measure` in one task; it reads and writes the run directory, so that after a kill another one goes on.

    Raises ValueError if the cluster has no such node, and what `measure` raises.
    """
    config = replace(config, run_dir=str(Path(config.run_dir).resolve()))
    local.connect(config.directory)
    import ray

    resources = {"CPU": 1.0} | ({"GPU": num_gpus} if num_gpus else {})
    check_resources(1, "evaluation", resources, "train.gpus_per_worker")
    logger.info("one task with %s", resources)
    task = ray.remote(num_cpus=1, num_gpus=num_gpus)(measure_in_task)
    return ray.get(task.remote(to_dict(config), sys.argv))


def measure_in_task(settings: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """What Ray runs: `measure`, its progress on the driver's terminal; `argv` is the command that results name."""
    sys.argv = argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    with sent_home():
        return measure(from_dict(PipelineConfig, settings))


def measure(config: PipelineConfig, make_system: MakeSystem = System) -> dict[str, Any]:
    """Evaluate every system of the profile on every set; returns tau by system and set.

    With `evaluate.sampled_seeds` all systems are decoded once more for each seed, at `sampled_temperature`:
    `sampled_<seed>.json`, and in `sampled.json` means and deviations over the seeds. With `evaluate.concurrencies`
    they are decoded once more greedily for each, so many requests at once (`lilicorr.throughput`).

    Raises ValueError for a set or system that does not exist, and as `lilicorr.evaluate.run_sets` does.
    """
    with all_cores():
        return measure_systems(config, make_system)


@contextmanager
def all_cores() -> Iterator[None]:
    """Compute with a thread on every core: a Ray job's driver is given one, though nothing runs beside it here."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_systems(config: PipelineConfig, make_system: MakeSystem) -> dict[str, Any]:
    """Load prompts and models, measure greedily and for every seed, write and draw; `run` says what."""
    folder, settings = config.directory / "evaluate", config.evaluate
    prompts, facts = load_sets(config)
    described = json.loads((config.directory / "prepare" / "target.json").read_text(encoding="utf-8"))
    target = load_evaluation_target(config, described["num_layers"])
    draft_models, identity = load_systems(config, target)
    identity["target"] = described["files_hash"] or f"{described['source']}@{described['revision']}"
    identity |= {"device": target.device.type, "dtype": config.target.dtype}
    identity |= {"template_kwargs": config.target.template_kwargs, "version": VERSIONS["evaluate"]}
    render = functools.partial(render_prompt, target.tokenizer, template_kwargs=config.target.template_kwargs)

    def measure(name: str, settings: EvaluateConfig) -> dict[str, Any]:
        path = folder / name
        regime = "sampled" if settings.temperature > 0 else "greedy"
        models = {
            system: model for system, model in draft_models.items() if settings.systems[system].only in (None, regime)
        }

        def save(results: dict[str, Any]) -> None:
            sets = {name: values | {"data": facts[name]} for name, values in results["sets"].items()}
            record = provenance(replace(config, evaluate=settings))
            checkpoints = {system: identity[system] for system in models}
            write_json(path, {**results, "sets": sets, "checkpoints": checkpoints, "provenance": record})

        previous = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        others = draft_models.keys() - models.keys()
        own = {key: value for key, value in identity.items() if key not in others}
        found = run_sets(target, models, prompts, settings, render, own, previous, save, make_system)
        if regime == "sampled":
            return found
        return measure_throughput(target, models, prompts, settings, render, found, save)

    results = measure("results.json", settings)
    sampled = [
        measure(f"sampled_{seed}.json", replace(settings, temperature=settings.sampled_temperature, seed=seed))
        for seed in settings.sampled_seeds
    ]
    checkpoints = {system: identity[system] for system in draft_models}
    write_sampled(folder / "sampled.json", results, sampled, checkpoints, config)
    for plot in draw_plots(folder, config.directory / "train", config.train.runs):
        logger.info("drew %s", plot)
    return {"tau": {name: {s: v["tau"] for s, v in by_set.items()} for name, by_set in results["systems"].items()}}


def write_sampled(
    path: Path,
    greedy: dict[str, Any],
    sampled: list[dict[str, Any]],
    checkpoints: dict[str, Any],
    config: PipelineConfig,
) -> None:
    """Write figures over the seeds, marked with the results they were made from and the greedy ones they belong to.

    Without seeds nothing is written, and figures that belong to other greedy results are removed.
    """
    if sampled:
        sets = {
            name: {
                "fingerprint": fingerprint([result["sets"][name]["fingerprint"] for result in sampled]),
                "greedy_fingerprint": values["fingerprint"],
            }
            for name, values in greedy["sets"].items()
        }
        figures = {"seeds": list(config.evaluate.sampled_seeds), "systems": over_seeds(sampled), "sets": sets}
        write_json(path, {**figures, "checkpoints": checkpoints, "provenance": provenance(config)})
    elif path.is_file() and (problem := stale(json.loads(path.read_text(encoding="utf-8")), greedy)):
        logger.info("removed %s: %s", path, problem)
        path.unlink()


def load_sets(config: PipelineConfig) -> tuple[dict[str, list[Prompt]], dict[str, dict[str, Any]]]:
    """The prompts of every set, and what they are. An entry is a set's name or `name=file`."""
    prompts: dict[str, list[Prompt]] = {}
    facts: dict[str, dict[str, Any]] = {}
    limit = config.evaluate.max_prompts
    for name, file in set_entries(config.evaluate.sets).items():
        if name == HELD_OUT:
            # prompts.max_held_out says how many there are; every one of them has to match autoregression
            held_out = read_conversations(config.directory / "prepare" / "held_out.parquet")
            prompts[name] = [Prompt(conversation.cid, conversation.messages) for conversation in held_out]
            facts[name] = {"name": name, "source": config.prompts.source, "prompts": len(held_out)}
        else:
            prompts[name] = [
                Prompt(prompt.id, [{"role": "user", "content": text} for text in prompt.turns], prompt.category)
                for prompt in load_benchmark(name, file, limit)
            ]
            facts[name] = benchmark_facts(name, file)
    return prompts, facts


def load_evaluation_target(config: PipelineConfig, num_layers: int) -> Target:
    """The target on the accelerator, if there is one, capturing the layers that the runs were trained on."""
    layer_ids = captured_layer_ids(config.train.drafter, num_layers)
    return load_target(config.target, "cuda" if torch.cuda.is_available() else "cpu", layer_ids)


def load_systems(config: PipelineConfig, target: Target) -> tuple[dict[str, DraftModel], dict[str, str]]:
    """The draft model of every system but autoregression, and the hash of its checkpoint."""
    draft_models, identity = {}, {}
    for name, system in config.evaluate.systems.items():
        if (system.run is None) != (name == AUTOREGRESSIVE):
            raise ValueError(
                f"evaluate.systems.{name}.run is {system.run!r}: only {AUTOREGRESSIVE!r}, which is always measured, "
                f"has none; the trained runs are {', '.join(config.train.runs)}"
            )
        if system.run is not None:
            folder = config.directory / "train" / system.run / "final"
            yarn = config.evaluate.yarn if system.yarn else None
            draft_models[name] = load_draft_model(folder, target, system.head, system.head_config, yarn=yarn)
            identity[name] = sha256_tree(folder)
    return draft_models, identity


if __name__ == "__main__":
    from pipelines.stage import main

    main(run, "evaluate")
