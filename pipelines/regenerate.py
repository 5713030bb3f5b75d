"""Regenerate every assistant turn of the prompts with the target, restartable at any point.

Place in the flow: second stage. Ray Data spreads the shards that are still missing over a pool of actors,
each with its own engine; an actor commits its shards itself, so a killed driver or actor costs the open
shards and nothing else. A second run does nothing. Paper: section 4.1.

    python pipelines/regenerate.py --profile demo
    python pipelines/regenerate.py --profile demo --status       # from the manifests, no cluster needed
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import PreTrainedTokenizerBase

from lilicorr.config import PipelineConfig
from lilicorr.generator import (
    Completion,
    ConversationResult,
    DeadRecord,
    DialogueSettings,
    Generator,
    TransformersGenerator,
    regenerate_conversations,
)
from lilicorr.provenance import write_json
from pipelines import local, shards, stage
from pipelines.errors import one_line_errors, sent_home
from pipelines.inputs import engine_label
from pipelines.shards import Plan, Run, Shard

logger = logging.getLogger(__name__)

PROGRESS_S = 30.0
MakeGenerator = Callable[[PipelineConfig], tuple[PreTrainedTokenizerBase, Generator]]


class EngineError(RuntimeError):
    """The engine failed; only a new process can be trusted with a new one."""


@dataclass(frozen=True)
class Work:
    """Everything an actor needs to make shards."""

    config: PipelineConfig
    run: Run
    prompts: Path
    shards: tuple[Shard, ...]
    attempts: Path  # one file per started attempt of a shard by this driver
    make_generator: MakeGenerator


def run(config: PipelineConfig, make_generator: MakeGenerator | None = None) -> dict[str, Any]:
    """Regenerate what is missing in `<run directory>/regenerate` and return the accounting.

    Shards that an earlier call gave up because their engine died count as missing.

    Raises ValueError if the prompts or settings are not those the run was started with, or if the cluster
    lacks the resources; RuntimeError if more than `max_dead_fraction` of the conversations are dead.
    """
    folder = (config.directory / "regenerate").resolve()
    prompts = (config.directory / "prepare" / "prompts.parquet").resolve()
    engine = engine_label(config.regenerate.engine)
    plan = shards.open_plan(folder, prompts, config.regenerate.shard_size)
    current = shards.open_run(folder, engine, fingerprint_parts(config, plan))
    if reopened := shards.reopen(current, plan):
        logger.info("%d shards were given up before because their engine died; they are tried again", reopened)
    todo = shards.missing(current, plan)
    logger.info("%d of %d shards to make, run %s, engine %s", len(todo), len(plan.shards), current.fingerprint, engine)
    if todo:
        attempts = folder / ".attempts" / uuid.uuid4().hex[:8]
        work = Work(config, current, prompts, tuple(todo), attempts, make_generator or make_engine)
        with Progress(current, plan):
            run_on_ray(work)
        shutil.rmtree(folder / ".attempts", ignore_errors=True)
    left = shards.missing(current, plan)
    if left:
        raise RuntimeError(f"{len(left)} shards are still not done, the first is {left[0].id}; run again")
    numbers = shards.summary(folder, plan)
    for line in shards.describe(numbers):
        logger.info("%s", line)
    write_json(folder / "summary.json", numbers)
    check_dead(numbers, config.regenerate.max_dead_fraction, folder)
    return numbers


def check_dead(numbers: dict[str, Any], limit: float, folder: Path) -> None:
    """Raise RuntimeError if more than the share `limit` of the different conversations is dead."""
    share = numbers["dead"] / (numbers["ok"] + numbers["dead"])
    if share > limit:
        raise RuntimeError(
            f"{numbers['dead']} conversations are dead, {100 * share:.2f} % where "
            f"regenerate.max_dead_fraction allows {100 * limit:.2f} %: {numbers['dead_by_error']}; "
            f"the reasons are in {folder / 'dead_letter'}"
        )


def fingerprint_parts(config: PipelineConfig, plan: Plan) -> dict[str, Any]:
    """Everything that decides the tokens but the engine, by name."""
    target = json.loads((config.directory / "prepare" / "target.json").read_text(encoding="utf-8"))
    return {
        "prompts": plan.prompts,
        "target": {name: value for name, value in target.items() if name != "folder"},
        "target.dtype": config.target.dtype,
        "target.template_kwargs": config.target.template_kwargs,
        "regenerate.max_new_tokens": config.regenerate.max_new_tokens,
        "regenerate.max_model_len": config.regenerate.max_model_len,
        "sampling": "greedy",
        "version": stage.VERSIONS["regenerate"],
    }


def make_engine(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, Generator]:
    """The configured engine, on the GPU that Ray gave this process if there is one."""
    if config.regenerate.engine == "vllm":
        from pipelines.vllm_engine import make_vllm

        return make_vllm(config)
    import torch

    from lilicorr.target import load_target

    target = load_target(config.target, "cuda" if torch.cuda.is_available() else "cpu")
    settings = config.regenerate
    return target.tokenizer, TransformersGenerator(target, settings.batch_size, settings.max_model_len)


def run_on_ray(work: Work) -> None:
    """Make the shards of `work` with a pool of actors; returns when every one has been committed.

    Raises ValueError at once if the cluster can never have the resources asked for.
    """
    import ray.data

    if not ray.is_initialized():
        local.connect(work.config.directory)
    settings = work.config.regenerate
    num_actors = min(settings.num_actors, len(work.shards))
    each = {"CPU": settings.cpus_per_actor, "GPU": settings.gpus_per_actor}
    options = ", ".join(f"regenerate.{key}" for key in ("num_actors", "cpus_per_actor", "gpus_per_actor"))
    local.check_resources(num_actors, "actors", each, options)
    work.attempts.mkdir(parents=True)
    # One shard is one block: the unit in which Ray Data schedules, retries and reports.
    indices = ray.data.from_items([{"shard": i} for i in range(len(work.shards))], override_num_blocks=len(work.shards))
    done = indices.map_batches(
        GeneratorActor,
        fn_constructor_args=(work,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=num_actors, max_tasks_in_flight_per_actor=1),
        num_cpus=settings.cpus_per_actor,
        num_gpus=settings.gpus_per_actor,
    )
    done.context.enable_progress_bars = False
    done.context.execution_no_progress_timeout_s = -1  # a shard may take longer than the default half hour
    done.context.max_consecutive_actor_init_deaths = settings.max_attempts
    done.take_all()


class GeneratorActor:
    """One engine and the shards Ray Data hands to it, one per call."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.settings = DialogueSettings(work.config.target.template_kwargs, work.config.regenerate.max_new_tokens)
        with sent_home():
            tokenizer, generator = work.make_generator(work.config)
        self.tokenizer, self.generator = tokenizer, Watched(generator)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Make and commit the shard with the index in `batch`; returns its id."""
        shard = self.work.shards[int(batch["shard"][0])]
        with sent_home():
            self.make(shard)
        return {"done": np.array([shard.id])}

    def make(self, shard: Shard) -> None:
        """Make and commit one shard, unless another worker has; give up on it after `max_attempts`.

        The process ends where its engine fails: Ray starts another one and hands it the same shard.
        """
        run, limit = self.work.run, self.work.config.regenerate.max_attempts
        if shards.is_done(run, shard):
            return
        attempt, errors = begin_attempt(self.work.attempts, shard)
        conversations = shards.read_shard(self.work.prompts, shard)
        start = time.monotonic()
        if attempt > limit:
            death = DeadRecord(0, shards.ENGINE_DIED, f"{limit} attempts: {errors or 'the process was killed'}")
            results = [ConversationResult(conversation, [], death) for conversation in conversations]
            shards.commit(run, shard, results, limit, time.monotonic() - start)
            return
        try:
            results = list(regenerate_conversations(conversations, self.tokenizer, self.generator, self.settings))
        except EngineError as error:
            (self.work.attempts / f"{shard.id}-{attempt}").write_text(str(error), encoding="utf-8")
            logger.exception("the engine died in shard %s, attempt %d of %d", shard.id, attempt, limit)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        shards.commit(run, shard, results, attempt, time.monotonic() - start)


def begin_attempt(folder: Path, shard: Shard) -> tuple[int, str]:
    """Mark the start of an attempt, before anything can go wrong; returns its number and the last error."""
    started = sorted(folder.glob(f"{shard.id}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    (folder / f"{shard.id}-{len(started) + 1}").touch()
    errors = [text for path in started if (text := path.read_text(encoding="utf-8"))]
    return len(started) + 1, errors[-1] if errors else ""


class Watched:
    """A generator whose every failure is an EngineError."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.name, self.max_model_len = generator.name, generator.max_model_len
        self.max_in_flight = generator.max_in_flight

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """See Generator."""
        try:
            self.generator.submit(key, prompt_ids, max_new_tokens)
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    def poll(self) -> list[tuple[int, Completion]]:
        """See Generator."""
        try:
            return self.generator.poll()
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error


class Progress:
    """Logs a line every PROGRESS_S seconds while shards are made, from their manifests."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.start = time.monotonic()
        self.before = shards.summary(run.folder, plan)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._log, daemon=True, name="regeneration progress")

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _log(self) -> None:
        while not self._stopped.wait(PROGRESS_S):
            logger.info("%s", self.line(shards.summary(self.run.folder, self.plan), time.monotonic() - self.start))

    def line(self, now: dict[str, Any], seconds: float) -> str:
        """Where the run stands after `seconds`; the time left follows from tokens per second, not from shards."""
        speed = (now["completion_tokens"] - self.before["completion_tokens"]) / seconds
        finished = now["ok"] + now["dead"]
        left = now["planned"] - now["duplicate"] - finished
        eta = "unknown"
        if speed > 0:
            eta = stage.duration(left * now["completion_tokens"] / finished / speed)
        turns_at_limit = sum(source["length"] for source in now["sources"].values())
        return (
            f"shards {now['shards_done']}/{now['shards']}, {finished} conversations ({now['dead']} dead), "
            f"{speed:.0f} tokens/s, answers p50 {now['answer_tokens_p50']} p99 {now['answer_tokens_p99']} tokens, "
            f"{turns_at_limit} of {now['turns']} at the length limit, time left {eta}"
        )


def print_status(config: PipelineConfig) -> None:
    """Print how far the run is, from its plan and manifests."""
    folder = config.directory / "regenerate"
    for line in shards.describe(shards.summary(folder, shards.read_plan(folder))):
        print(line)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the module's first lines."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--status" in arguments:
        options, _ = stage.argument_parser("How far a regeneration is.").parse_known_args(arguments)
        with one_line_errors():
            print_status(stage.resolve_config(options))
        return
    stage.main(run, "regenerate", arguments)


if __name__ == "__main__":
    main()
