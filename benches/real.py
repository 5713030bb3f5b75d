"""A real run of the method on one GPU, in minutes and without a cluster: regenerate, train, measure.

    python -m benches.real --out FOLDER [--work FOLDER] [--pack FOLDER] [--dry]

SmolLM2-135M-Instruct (`real.yaml` has the settings) answers prompts through the engine, 512 at once, for
`--regenerate-s` seconds; from the same drafter, that of the target's last layers, DFlash, LiLiCorr and, where
`--total-s` leaves the time, Domino train on these answers for `--train-s` seconds each; then held-out prompts are
decoded by all of them and by the target alone, one after the other for tau and speed with their intervals, and at 1, 8
and 32 at once. A run's number of steps follows from the pace of its first ones, so that its schedule ends where its
time does. The first shards of a GPU's regeneration include compilation; `tokens_per_s` has the slowest of them too.

Every part keeps its outputs in `--work` (default: OUT/work), which is a run directory of the pipeline without its
markers: what is finished there is not done again. `--pack` names the parts of `benches.pack` on a machine without a
network. `--dry` is the same at a toy size (`real_dry.yaml`), on any machine.

Place in the flow: `benches/gpu.sh real OUT` runs it; the stages are those of `pipelines/`, called without Ray. OUT gets
`real.jsonl` (rows with provenance), `results.json` and the pictures. Paper: sections 4.1 and 4.2.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import logging
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benches.decode import Setup, first_turn, spread
from benches.decode import measure as measure_decoding
from benches.pack import real_config, unpack
from benches.timing import device_name
from lilicorr import smollm2
from lilicorr.chat import render_prompt
from lilicorr.config import EngineConfig, PipelineConfig, RunConfig, SystemConfig, fingerprint
from lilicorr.corpus import TrainingSet, build_training_set
from lilicorr.decode import SamplingParams
from lilicorr.drafter import captured_layer_ids
from lilicorr.engine.engine import Engine
from lilicorr.evaluate import AUTOREGRESSIVE, EngineSystem
from lilicorr.generator import DialogueSettings, EngineGenerator, regenerate_conversations
from lilicorr.prompts import read_conversations
from lilicorr.provenance import provenance, write_atomic, write_json
from lilicorr.target import load_target
from lilicorr.training import Trainer, run_fingerprint
from pipelines import evaluate, prepare, regenerate, shards, train
from pipelines.stage import VERSIONS
from pipelines.tally import Tally

logger = logging.getLogger(__name__)

ENGINE = "lilicorr engine"  # what the shards say they were made with
SURE = ("dflash", "lilicorr")  # runs that are trained whatever the time; more only where it lasts
RESERVE_S = 75.0  # for what comes after training
PACE_WARM_UP, PACE_STEPS = 4, 8
PREFILL_TOKENS = 2048  # beside decoding rows: at 512 of them new prompts come in every step
CONCURRENCIES, DRY_CONCURRENCIES = (1, 8, 32), (1, 2)
ROUNDS = 3
SECONDS = {"regenerate_s": 60.0, "train_s": 60.0, "total_s": 395.0}
DRY_SECONDS = {"regenerate_s": 0.5, "train_s": 0.5, "total_s": math.inf}
Row = dict[str, Any]


class Run:
    """One real run: its settings, what is finished of it, and the clock."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.began = time.perf_counter()
        self.arguments = arguments
        self.work = (arguments.work or arguments.out / "work").resolve()
        self.dry = arguments.dry
        self.config = real_config(self.work, self.dry)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rows: list[Row] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the process had its modules."""
        return time.perf_counter() - self.began

    def part(self, name: str, make: Callable[[], list[Row]]) -> list[Row]:
        """The rows of one part: those that were kept, or made and kept now. They all go to `real.jsonl`."""
        path = self.work / "parts" / f"{name}.json"
        if path.is_file():
            rows = json.loads(path.read_text(encoding="utf-8"))
        else:
            print(f"{self.elapsed:5.0f} s  {name}", flush=True)
            began = time.perf_counter()
            rows = make()
            took = {"part_s": time.perf_counter() - began, "device": device_name()}
            record = provenance(self.config)
            rows = [{**row, **took, "provenance": record} for row in rows]
            write_json(path, rows)
        self.rows += rows
        write_atomic(self.arguments.out / "real.jsonl", "".join(json.dumps(row) + "\n" for row in self.rows).encode())
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return rows

    def set_runs(self, runs: dict[str, RunConfig]) -> None:
        """Take these training runs instead of the profile's."""
        self.config = dataclasses.replace(self.config, train=dataclasses.replace(self.config.train, runs=runs))


def prepared(run: Run) -> PipelineConfig:
    """The run's config with a target that is there, after prompts and target have been made or unpacked."""
    folder, config = run.config.directory / "prepare", run.config
    if run.arguments.pack is not None:
        pack = unpack(run.arguments.pack, run.work / "pack")
        sys.path.append(str(pack / "site"))  # `gguf`, where it is not installed
        source = smollm2.smollm2_folder(run.work / "cache", pack / "packages")
        config = dataclasses.replace(config, target=dataclasses.replace(config.target, source=str(source)))
        shutil.copytree(pack / "prepare", folder, dirs_exist_ok=True)
    elif not (folder / "counts.json").is_file():
        prepare.run(config)
    return config


def regenerated(run: Run, seconds: float) -> list[Row]:
    """Answers of the target, shard by shard until the time is over; at least one shard."""
    config, folder = run.config, run.config.directory / "regenerate"
    settings, prompts = config.regenerate, config.directory / "prepare" / "prompts.parquet"
    plan = shards.open_plan(folder, prompts, settings.shard_size)
    shard_run = shards.open_run(folder, ENGINE, regenerate.fingerprint_parts(config, plan))
    target = load_target(config.target, run.device)
    engine_config = EngineConfig(
        settings.batch_size,
        settings.max_model_len,
        prefill_tokens=PREFILL_TOKENS,
        idle_prefill_tokens=2 * PREFILL_TOKENS,
        prefix_cache=False,
    )
    generator = EngineGenerator(Engine(target, None, engine_config))
    dialogue = DialogueSettings(config.target.template_kwargs, settings.max_new_tokens)
    began, speeds = time.perf_counter(), []
    for shard in shards.missing(shard_run, plan):
        if speeds and time.perf_counter() - began > seconds:
            break
        started = time.perf_counter()
        asked = shards.read_shard(prompts, shard)
        results = list(regenerate_conversations(asked, target.tokenizer, generator, dialogue))
        took = time.perf_counter() - started
        shards.commit(shard_run, shard, results, 1, took)
        speeds.append(sum(len(turn.completion_ids) for result in results for turn in result.turns) / took)
    numbers = Tally(folder, plan).summary()
    regenerate.check_dead(numbers, settings.max_dead_fraction, folder)
    kept = ("ok", "dead", "turns", "completion_tokens", "answer_tokens_p50", "shards_done", "shards")
    row = {"kind": "regenerate", "rows": settings.batch_size, **{name: numbers[name] for name in kept}}
    return [{**row, "seconds": time.perf_counter() - began, "tokens_per_s": spread(speeds)}]


def laid_out(run: Run) -> list[Row]:
    """The training set of the shards that are done."""
    folder, settings = run.config.directory / "regenerate", run.config.train
    done = [(s, m) for s in shards.read_plan(folder).shards if (m := shards.read_manifest(folder, s)) is not None]
    source = train.training_set_source([manifest["sha256"] for _, manifest in done], settings)
    paths = [shards.data_path(folder, shard) for shard, _ in done]
    path = run.config.directory / "train" / train.TRAINING_SET
    return [{"kind": "training_set", **build_training_set(paths, path, settings.max_length, settings.layout, source)}]


def paces(run: Run, seconds: float) -> list[Row]:
    """How many steps each training run makes in its time."""
    config = run.config.train
    target = load_target(run.config.target, run.device, layer_ids(run.config))
    training_set = TrainingSet.open(run.config.directory / "train" / train.TRAINING_SET)
    rows = []
    for name, wanted in config.runs.items():
        settings = dataclasses.replace(wanted, steps=PACE_WARM_UP + PACE_STEPS)
        draft_model = train.new_draft_model(config, settings, target, training_set)
        trainer = Trainer(target, training_set, config, settings, draft_model)
        times = [trainer.step(step)["seconds"] for step in range(settings.steps)][PACE_WARM_UP:]
        steps = max(1, round(seconds / statistics.mean(times)))
        rows.append({"kind": "pace", "run": name, "seconds_per_step": spread(times), "steps": steps})
        del trainer
    return rows


def layer_ids(config: PipelineConfig) -> tuple[int, ...]:
    """The captured layers of the run's target."""
    return captured_layer_ids(config.train.drafter, train.read_description(config)["num_layers"])


def trained(run: Run, name: str) -> list[Row]:
    """One training run, from its newest state to its end."""
    config = run.config
    training_set = TrainingSet.open(config.directory / "train" / train.TRAINING_SET)
    more = (train.read_description(config), config.target.dtype, None, VERSIONS["train"])
    identity = run_fingerprint(config.train, config.train.runs[name], training_set, *more)
    job = train.Job(config, name, identity)
    if train.finished(job) is None:
        train.set_aside(job)
        train.train_run(job, run.device, lambda _: None)
    metrics = [json.loads(text) for text in (job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [entry for entry in metrics if "loss" in entry]
    per_step = statistics.mean(entry["seconds"] for entry in steps)
    result = train.finished(job)
    sizes = {"steps": result["steps"], "blocks": result["num_blocks"], "seconds": per_step * result["steps"]}
    speed = statistics.mean(entry["tokens"] / entry["seconds"] for entry in steps)
    return [{"kind": "train", "run": name, **sizes, "loss": result["loss"], "tokens_per_s": speed}]


def measured(run: Run) -> list[Row]:
    """Held-out tau and speed of every system with intervals, one prompt after the other through the engine."""
    evaluate.measure(run.config, EngineSystem)
    results = json.loads((run.config.directory / "evaluate" / "results.json").read_text(encoding="utf-8"))
    fields = ("tau", "tokens_per_s", "speedup", "tau_gain_over_dflash")
    names = [name for field in fields for name in (field, f"{field}_ci95")]
    sizes = ("num_prompts", "num_blocks", "num_tokens", "matches_autoregressive")
    rows = []
    for system, by_set in results["systems"].items():
        found = by_set[evaluate.HELD_OUT]
        rows.append({"kind": "held_out", "system": system, **{name: found.get(name) for name in (*names, *sizes)}})
    return rows


def raced(run: Run) -> list[Row]:
    """Tokens per second of every system with several held-out prompts at once."""
    config, concurrencies = run.config, DRY_CONCURRENCIES if run.dry else CONCURRENCIES
    target = evaluate.load_evaluation_target(config, train.read_description(config)["num_layers"])
    draft_models, _ = evaluate.load_systems(config, target)
    held_out = read_conversations(config.directory / "prepare" / "held_out.parquet")[: max(concurrencies)]
    render = functools.partial(render_prompt, target.tokenizer, template_kwargs=config.target.template_kwargs)
    prompts = [render(first_turn(conversation.messages)) for conversation in held_out]
    params = SamplingParams(config.evaluate.max_new_tokens, stop_ids=target.eos_ids)
    setup = Setup(target, draft_models, prompts, params, concurrencies, ROUNDS, one_wave=True)
    return [{**row, "profile": config.profile, "geometry": None} for row in measure_decoding(setup)]


def execute(run: Run) -> None:
    """All parts in their order."""
    run.config = prepared(run)
    arguments = run.arguments
    run.part("regenerate", lambda: regenerated(run, arguments.regenerate_s))
    run.part("training_set", lambda: laid_out(run))
    steps = {row["run"]: row["steps"] for row in run.part("pace", lambda: paces(run, arguments.train_s))}
    wanted = {
        name: dataclasses.replace(settings, steps=steps[name]) for name, settings in run.config.train.runs.items()
    }
    done: dict[str, RunConfig] = {}
    for name, settings in wanted.items():
        kept = (run.work / "parts" / f"train_{name}.json").is_file()
        if name not in SURE and not kept and run.elapsed + arguments.train_s + RESERVE_S > arguments.total_s:
            print(f"{run.elapsed:5.0f} s  no time left for {name}", flush=True)
            continue
        done[name] = settings
        run.set_runs(done)
        run.part(f"train_{name}", lambda name=name: trained(run, name))
    systems = {AUTOREGRESSIVE: SystemConfig(), **{name: SystemConfig(run=name) for name in done}}
    run.config = dataclasses.replace(run.config, evaluate=dataclasses.replace(run.config.evaluate, systems=systems))
    mark = fingerprint(list(done))  # another run in the table means another table
    run.part(f"held_out_{mark}", lambda: measured(run))
    folder = run.config.directory / "evaluate"
    for path in (folder / "results.json", *folder.glob("*.png")):
        shutil.copy(path, arguments.out / path.name)
    run.part(f"decode_{mark}", lambda: raced(run))
    print(f"{run.elapsed:5.0f} s  done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where finished parts are kept; default: OUT/work")
    parser.add_argument("--pack", type=Path, help="parts of benches.pack, for a machine without a network")
    parser.add_argument("--regenerate-s", type=float, help="default: 60")
    parser.add_argument("--train-s", type=float, help="of each training run; default: 60")
    parser.add_argument("--total-s", type=float, help="Domino trains only where this leaves the time; default: 395")
    parser.add_argument("--dry", action="store_true", help="a toy size, on any machine")
    arguments = parser.parse_args()
    for name, seconds in (DRY_SECONDS if arguments.dry else SECONDS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, seconds)
    if not torch.cuda.is_available() and not arguments.dry:
        parser.error("no GPU here: the run is made for one; --dry runs it anywhere at a toy size")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    execute(Run(arguments))


if __name__ == "__main__":
    main()
