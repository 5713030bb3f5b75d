"""Regenerate every assistant turn of the prompts with the target, restartable at any point.

Place in the flow: second stage. Ray Data keeps a pool of actors, each with its own engine, which take the missing
shards from one queue. An actor begins its next shard as soon as the one before leaves a place free in its engine,
and commits its shards itself, so a killed driver or actor costs the open shards and nothing else. At the end, an actor
without work makes again what others still have. A second run does nothing. Paper: section 4.1.

    python pipelines/regenerate.py --profile demo
    python pipelines/regenerate.py --profile demo --status       # from the manifests, no cluster needed
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lilicorr.config import PipelineConfig
from lilicorr.provenance import write_json
from pipelines import local, shards, stage
from pipelines.attempts import Attempt, begin
from pipelines.errors import one_line_errors, sent_home
from pipelines.inputs import engine_label
from pipelines.resources import check_resources
from pipelines.shard_queue import RemoteQueue, ShardQueue
from pipelines.shards import Plan, Run, Shard
from pipelines.tally import Progress, Tally, describe

if TYPE_CHECKING:  # they need torch, which the driver and --status do without
    from transformers import PreTrainedTokenizerBase

    from lilicorr.generator import Completion, ConversationResult, Generator
    from lilicorr.prompts import Conversation

logger = logging.getLogger(__name__)

MakeGenerator = Callable[[PipelineConfig], "tuple[PreTrainedTokenizerBase, Generator]"]


class EngineError(RuntimeError):
    """The engine failed; only a new process can be trusted with a new one."""


@dataclass(frozen=True)
class Work:
    """Everything an actor needs to make shards."""

    config: PipelineConfig
    run: Run
    prompts: Path
    shards: tuple[Shard, ...]
    attempts: Path  # of a shard by this driver: a folder for each that was begun
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
    left = shards.missing(current, replace(plan, shards=tuple(todo)))
    if left:
        raise RuntimeError(f"{len(left)} shards are still not done, the first is {left[0].id}; run again")
    numbers = Tally(folder, plan).complete()
    for line in describe(numbers):
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
        "target": target,
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

    from lilicorr.generator import TransformersGenerator
    from lilicorr.target import load_target

    target = load_target(config.target, "cuda" if torch.cuda.is_available() else "cpu")
    settings = config.regenerate
    return target.tokenizer, TransformersGenerator(target, settings.batch_size, settings.max_model_len)


def run_on_ray(work: Work) -> None:
    """Make the shards of `work` with a pool of actors; returns when every one has been committed.

    No worker ends before that. When the first one does, the others make again what is done, or hang: they are killed.

    Raises ValueError at once if the cluster can never have the resources asked for.
    """
    import ray.data
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        local.connect(work.config.directory)
    settings = work.config.regenerate
    num_actors = min(settings.num_actors, len(work.shards))
    each = {"CPU": settings.cpus_per_actor, "GPU": settings.gpus_per_actor}
    options = ", ".join(f"regenerate.{key}" for key in ("num_actors", "cpus_per_actor", "gpus_per_actor"))
    check_resources(num_actors, "actors", each, options)
    work.attempts.mkdir(parents=True)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = ray.remote(ShardQueue).options(num_cpus=0, scheduling_strategy=here).remote(len(work.shards))
    # One row is one worker for the whole run; Ray Data gives it to another actor where its own has died.
    workers = ray.data.from_items([{"worker": i} for i in range(num_actors)], override_num_blocks=num_actors)
    done = workers.map_batches(
        GeneratorActor,
        fn_constructor_args=(work, RemoteQueue(queue)),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=num_actors, max_tasks_in_flight_per_actor=1),
        num_cpus=settings.cpus_per_actor,
        num_gpus=settings.gpus_per_actor,
    )
    done.context.enable_progress_bars = False
    done.context.execution_no_progress_timeout_s = -1  # a worker may take longer than the default half hour
    done.context.max_consecutive_actor_init_deaths = settings.max_attempts
    # Not `take`, which asks ahead: the last worker's row may never come. Closing the iterator kills the actors.
    with contextlib.closing(iter(done.iter_batches(batch_size=None, prefetch_batches=0))) as ended:
        next(ended)


class GeneratorActor:
    """One engine, and the shards that its worker takes from the queue."""

    def __init__(self, work: Work, queue: ShardQueue | RemoteQueue) -> None:
        from lilicorr.generator import DialogueSettings

        self.work, self.queue = work, queue
        self.settings = DialogueSettings(work.config.target.template_kwargs, work.config.regenerate.max_new_tokens)
        with sent_home():
            tokenizer, generator = work.make_generator(work.config)
        self.tokenizer, self.generator = tokenizer, Watched(generator)
        self.begun: dict[int, tuple[Attempt, float]] = {}  # open shards by number: attempt, and when it began

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Make and commit shards until all are finished, as the worker named in `batch`."""
        with sent_home():
            self.work_off(int(batch["worker"][0]))
        return {"done": batch["worker"]}

    def work_off(self, worker: int) -> None:
        """Make and commit shards until every one is finished, the next beginning before the last one has ended.

        A shard that was begun before is made alone: if its engine dies again, it takes no other shard with it. The
        process ends where its engine fails: Ray starts another one, and its worker takes the shards again.
        """
        from lilicorr.generator import regenerate_groups

        self.queue.start(worker)
        try:
            while (taken := self.queue.take(worker)) is not None:
                again: list[tuple[int, frozenset[int]]] = []
                groups = self._new_shards(worker, taken, again)
                for number, results in regenerate_groups(groups, self.tokenizer, self.generator, self.settings):
                    self._commit(worker, number, results)
                if again:
                    self._make_again(worker, *again.pop())
        except EngineError as error:
            self._die(error)

    def _new_shards(
        self, worker: int, taken: tuple[int, frozenset[int]] | None, again: list[tuple[int, frozenset[int]]]
    ) -> Iterator[tuple[int, list[Conversation]]]:
        """`taken` and more from the queue, until it gives none or one that was begun before, which goes to `again`."""
        while taken is not None:
            number, others = taken
            shard = self.work.shards[number]
            if others or (self.work.attempts / shard.id).is_dir():
                again.append(taken)
                return
            self.begun[number] = begin(self.work.attempts / shard.id, worker, others), time.monotonic()
            yield number, shards.read_shard(self.work.prompts, shard)
            taken = self.queue.take(worker)

    def _commit(self, worker: int, number: int, results: list[ConversationResult]) -> None:
        """Write a shard's files, unless another worker has or does."""
        attempt, start = self.begun.pop(number)
        if self.queue.claim(worker, number):
            shard = self.work.shards[number]
            shards.commit(self.work.run, shard, results, attempt.number, time.monotonic() - start)
            self.queue.finish(number)

    def _die(self, error: EngineError) -> None:
        """Leave the error with the open shards and end the process: Ray starts another one."""
        for attempt, _ in self.begun.values():
            attempt.note("error", str(error))
        attempts = ", ".join(f"{self.work.shards[n].id} attempt {a.number}" for n, (a, _) in self.begun.items())
        logger.exception("the engine died in %s", attempts)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)

    def _make_again(self, worker: int, number: int, others: frozenset[int]) -> None:
        """Make and commit one shard that was begun before and that `others` may still be at."""
        shard = self.work.shards[number]
        if shards.is_done(self.work.run, shard):  # by a worker that ended before it could say so
            self.queue.finish(number)
            return
        attempt = begin(self.work.attempts / shard.id, worker, others)
        self.begun[number] = attempt, time.monotonic()
        self._commit(worker, number, self._answer(attempt, shards.read_shard(self.work.prompts, shard)))

    def _answer(self, attempt: Attempt, conversations: list[Conversation]) -> list[ConversationResult]:
        """The results of a shard by what its earlier attempts have left.

        When its engine has died `max_attempts` times, the conversations that were open then are made one after the
        other behind the rest, and one that was alone with its engine when that died is dead. When the engine has died
        more than twice as often, the shard is given up.
        """
        from lilicorr.generator import ConversationResult, DeadRecord

        limit = self.work.config.regenerate.max_attempts
        text = f"{attempt.deaths} attempts: {attempt.error or 'the process was killed'}"
        if attempt.deaths > 2 * limit:
            death = DeadRecord(0, shards.ENGINE_DIED, text)
            return [ConversationResult(conversation, [], death) for conversation in conversations]
        if attempt.deaths < limit:
            return list(self._ask(attempt, "begun", conversations))
        death = DeadRecord(0, shards.KILLED_ENGINE, text)
        results, suspected, others = [], [], []
        for conversation in conversations:
            if conversation.cid in attempt.guilty:
                results.append(ConversationResult(conversation, [], death))
            elif attempt.suspects is None or conversation.cid in attempt.suspects:
                suspected.append(conversation)
            else:
                others.append(conversation)
        results += self._ask(attempt, "begun", others)
        return results + [result for one in suspected for result in self._ask(attempt, "alone", [one])]

    def _ask(self, attempt: Attempt, how: str, conversations: list[Conversation]) -> Iterator[ConversationResult]:
        """Answer conversations, each noted as `how` before the engine has it and as done when it is."""
        from lilicorr.generator import regenerate_conversations

        def noted() -> Iterator[Conversation]:
            for conversation in conversations:
                attempt.note(how, conversation.cid)
                yield conversation

        for result in regenerate_conversations(noted(), self.tokenizer, self.generator, self.settings):
            attempt.note("done", result.conversation.cid)
            yield result


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


def print_status(config: PipelineConfig) -> None:
    """Print how far the run is, from its plan and manifests."""
    folder = config.directory / "regenerate"
    for line in describe(Tally(folder, shards.read_plan(folder)).summary()):
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
