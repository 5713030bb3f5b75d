"""Tokens per second and tau of the engine at 1 to 32 requests at once, with transformers' own decoding beside it.

    python -m benches.decode --profile demo [--run-dir runs] [--checkpoint FOLDER ...] [--output FILE] [--dry]
    python -m benches.decode --profile smollm2 --target-only     # prepared, not trained
    python -m benches.decode --geometry 8b [--output FILE] [--dry]

Systems: `transformers` (`generate`, one prompt after the other), `autoregressive` and every draft model through the
engine. Draft models are those of the profile's trained runs, or the given checkpoint folders, named after the run
where the folder is its `final`; with `--target-only` there are none. With `--dry` there is a random tiny target with
untrained heads, which shows that everything runs and nothing about speed. Prompts are the run's held-out ones; all
systems decode the same, greedily, up to the same number of new tokens, at no more at once than there are prompts.

With `--geometry` target and draft models have a real size and random weights in bf16, the systems are autoregression,
DFlash and LiLiCorr at 1, 8 and 32 requests, and as many random prompts of 256 tokens are decoded as there are requests
at once; their prefill counts. Nothing drafted by such weights is right but by chance: `blocks_per_s` is the figure,
which times a real tau gives tokens.

First every system's answers must equal those of `generate` (in fp32 and fp64; RuntimeError). Then, round by round, so
that a disturbance meets all alike, every system decodes all prompts at every concurrency. `tokens_per_s` is by the
clock, `tokens_per_cpu_s` by the process's CPU time, which other processes do not slow; each with median, lowest and
highest round. On a CPU a last round says what each stage of the step costs. `--threads` sets torch's threads.

Place in the flow: `decode.jsonl` has one row per measurement with provenance; docs/results.md quotes it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benches.geometry import SIZES, TOY, ModelSize, here, random_draft_model, random_target
from benches.options import positive
from benches.timing import RowFile, device_name
from lilicorr.chat import render_prompt
from lilicorr.checkpoint import captured_layers, load_draft_model
from lilicorr.config import EngineConfig, PipelineConfig, load_profile
from lilicorr.decode import SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.engine.pages import num_pages_for
from lilicorr.evaluate import AUTOREGRESSIVE, EXACT_DTYPES
from lilicorr.heads import HEADS
from lilicorr.prompts import read_conversations
from lilicorr.target import Target, load_target

PROFILES = Path(__file__).resolve().parents[1] / "pipelines" / "profiles"
TRANSFORMERS, FINAL = "transformers", "final"  # the latter is what training calls the folder of its result
CONCURRENCIES, DRY_CONCURRENCIES = (1, 2, 4, 8, 16, 32), (1, 2)
GEOMETRY_CONCURRENCIES, GEOMETRY_HEADS, GEOMETRY_ROUNDS = (1, 8, 32), ("argmax", "lilicorr"), 2
GEOMETRY_PROMPT, GEOMETRY_NEW = 256, 48  # tokens


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    target: Target
    draft_models: dict[str, DraftModel]
    prompts: list[list[int]]
    params: SamplingParams
    concurrencies: tuple[int, ...]
    rounds: int
    one_wave: bool = False  # as many prompts as requests at once, else all prompts always; then without `generate`

    def prompts_at(self, concurrency: int) -> list[list[int]]:
        """What a system decodes at this concurrency."""
        return self.prompts[:concurrency] if self.one_wave else self.prompts


@dataclass(frozen=True)
class Run:
    """All prompts decoded once."""

    answers: list[list[int]]
    seconds: float
    cpu_seconds: float
    tau: float | None
    num_blocks: int | None = None


def load_setup(arguments: argparse.Namespace) -> Setup:
    """Target, draft models and prompts of a profile.

    Raises ValueError where it has not been prepared or trained, and for draft models that cannot be measured together.
    """
    config = load_profile(arguments.profile, PROFILES, [f"run_dir={arguments.run_dir}"])
    prepared = config.directory / "prepare" / "held_out.parquet"
    if not prepared.is_file():
        raise ValueError(f"not prepared: {prepared} is missing; run pipelines/full.py with this profile and --run-dir")
    folders = {} if arguments.target_only else named(arguments.checkpoint) or trained(config)
    target = load_target(config.target, here()[0], captured_by(folders))
    draft_models = {name: load_draft_model(folder, target) for name, folder in folders.items()}
    conversations = read_conversations(prepared)[: arguments.prompts]
    template = config.target.template_kwargs
    prompts = [render_prompt(target.tokenizer, first_turn(c.messages), template) for c in conversations]
    params = SamplingParams(arguments.max_new_tokens, stop_ids=target.eos_ids)
    concurrencies = tuple(c for c in CONCURRENCIES if c <= len(prompts))
    return Setup(target, draft_models, prompts, params, concurrencies, arguments.rounds)


def named(folders: list[Path]) -> dict[str, Path]:
    """Checkpoint folders by name, a trained run's by that of the run; raises ValueError where two have the same."""
    found: dict[str, Path] = {}
    for folder in folders:
        path = folder.resolve()
        name = path.parent.name if path.name == FINAL else path.name
        if name in found or name in (TRANSFORMERS, AUTOREGRESSIVE):
            other = f"{found[name]} has it" if name in found else "a system of this bench has it"
            raise ValueError(f"--checkpoint {folder} would be measured as {name!r}, but {other}: copy or rename it")
        found[name] = folder
    return found


def captured_by(folders: dict[str, Path]) -> tuple[int, ...]:
    """The target's layers that all these draft models read; raises ValueError where they read different ones."""
    layers = {name: captured_layers(folder) for name, folder in folders.items()}
    if len(set(layers.values())) > 1:
        listed = ", ".join(f"{name} {list(ids)}" for name, ids in layers.items())
        raise ValueError(f"draft models that read the same layers of the target are measured together, got {listed}")
    return next(iter(layers.values()), ())


def trained(config: PipelineConfig) -> dict[str, Path]:
    """The checkpoint of every run that some system of the profile decodes as it was trained."""
    runs = sorted({s.run for s in config.evaluate.systems.values() if s.run and not s.head and not s.head_config})
    folders = {run: config.directory / "train" / run / FINAL for run in runs}
    missing = [str(folder) for folder in folders.values() if not folder.is_dir()]
    if missing:
        raise ValueError(f"not trained: {', '.join(missing)}; run pipelines/full.py, or name a --checkpoint")
    return folders


def first_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation up to its first user turn."""
    roles = [message["role"] for message in messages]
    return messages[: roles.index("user") + 1]


def dry_setup() -> Setup:
    """A random toy target in fp32 with an untrained draft model for every head."""
    target = random_target(TOY, here()[0], torch.float32)
    draft_models = {name: random_draft_model(TOY, target, name, torch.float32) for name in HEADS}
    rng = random.Random(0)
    prompts = [[rng.randrange(TOY.vocab_size) for _ in range(length)] for length in (3, 90, 17, 40)]
    return Setup(target, draft_models, prompts, SamplingParams(12, stop_ids=target.eos_ids), DRY_CONCURRENCIES, 2)


def geometry_setup(size: ModelSize) -> Setup:
    """A random target of a real size with fresh draft models, and random prompts that nothing stops."""
    device, dtype = here()
    target = random_target(size, device, dtype)
    draft_models = {head: random_draft_model(size, target, head, dtype) for head in GEOMETRY_HEADS}
    real = size is not TOY
    length, num_new = (GEOMETRY_PROMPT, GEOMETRY_NEW) if real else (20, 8)
    concurrencies = GEOMETRY_CONCURRENCIES if real else DRY_CONCURRENCIES
    rng = random.Random(0)
    prompts = [[rng.randrange(size.vocab_size) for _ in range(length)] for _ in range(concurrencies[-1])]
    return Setup(target, draft_models, prompts, SamplingParams(num_new), concurrencies, GEOMETRY_ROUNDS, one_wave=True)


def timed(decode: Callable[[], tuple[list[list[int]], float | None, int | None]]) -> Run:
    """Run and time."""
    began, cpu_began = time.perf_counter(), time.process_time()
    answers, tau, num_blocks = decode()
    return Run(answers, time.perf_counter() - began, time.process_time() - cpu_began, tau, num_blocks)


def by_transformers(setup: Setup) -> tuple[list[list[int]], None, None]:
    """`generate`, prompt after prompt; answers end with their stop token."""
    model, answers = setup.target.model, []
    for prompt in setup.prompts:
        ids = torch.tensor([prompt], device=setup.target.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=setup.params.max_new_tokens,
            do_sample=False,
            eos_token_id=list(setup.params.stop_ids),
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers, None, None


def by_engine(engine: Engine, setup: Setup) -> tuple[list[list[int]], float, int]:
    """The prompts through the engine, at most `max_running` at once."""
    decoded = engine.generate(setup.prompts_at(engine.config.max_running), setup.params)
    num_blocks = sum(d.num_blocks for d in decoded)
    tau = sum(d.num_block_tokens for d in decoded) / max(1, num_blocks)
    return [d.token_ids for d in decoded], tau, num_blocks


def make_engine(setup: Setup, draft_model: DraftModel | None, concurrency: int, **more: Any) -> Engine:
    """An engine with pages for these prompts. It caches none of them: every round does all the work.

    `more` are further fields of its config.
    """
    num_slots = draft_model.spec.num_slots if draft_model is not None else 0
    longest = max(map(len, setup.prompts)) + setup.params.max_new_tokens + num_slots
    num_pages = 2 * concurrency * num_pages_for(longest)
    config = EngineConfig(max_running=concurrency, num_pages=num_pages, prefix_cache=False, **more)
    engine = Engine(setup.target, draft_model, config)
    engine.warm_up()
    return engine


def systems(setup: Setup) -> dict[tuple[str, int], Callable[[], Run]]:
    """What to run, by system and concurrency."""
    runs: dict[tuple[str, int], Callable[[], Run]] = {}
    if not setup.one_wave:
        runs[TRANSFORMERS, 1] = lambda: timed(lambda: by_transformers(setup))
    for name, draft_model in {AUTOREGRESSIVE: None, **setup.draft_models}.items():
        for concurrency in setup.concurrencies:
            engine = make_engine(setup, draft_model, concurrency)
            runs[name, concurrency] = lambda engine=engine: timed(lambda: by_engine(engine, setup))
    return runs


def check(setup: Setup, runs: dict[tuple[str, int], Callable[[], Run]]) -> None:
    """Every system once: warms it up, and raises RuntimeError where its answers are not those of `generate`.

    With random weights of a real size the toy ones are compared instead, on the same device.
    """
    if setup.one_wave:
        toy = dry_setup()
        check(toy, systems(toy))
    exact = setup.target.embed.dtype in EXACT_DTYPES and not setup.one_wave
    expected = runs[TRANSFORMERS, 1]().answers if exact else []
    for (name, concurrency), run in runs.items():
        answers = run().answers
        if exact and answers != expected:
            index = next(i for i, pair in enumerate(zip(answers, expected)) if pair[0] != pair[1])
            raise RuntimeError(f"{name} at {concurrency} answers prompt {index} differently from generate")


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure(setup: Setup) -> list[dict[str, Any]]:
    """The rows of all systems."""
    runs = systems(setup)
    check(setup, runs)
    results: dict[tuple[str, int], list[Run]] = {key: [] for key in runs}
    for _ in range(setup.rounds):
        for key, run in runs.items():
            results[key].append(run())
    rows = []
    for (name, concurrency), of_one in results.items():
        num_tokens, blocks = sum(len(answer) for answer in of_one[0].answers), of_one[0].num_blocks
        rows.append(
            {
                "kind": "decode",
                "system": name,
                "concurrency": concurrency,
                "tokens_per_s": spread([num_tokens / run.seconds for run in of_one]),
                "tokens_per_cpu_s": spread([num_tokens / run.cpu_seconds for run in of_one]),
                "blocks_per_s": spread([run.num_blocks / run.seconds for run in of_one]) if blocks else None,
                "tau": of_one[0].tau,
                "num_prompts": len(of_one[0].answers),
                "num_tokens": num_tokens,
                "rounds": setup.rounds,
            }
        )
    return rows


class Stages:
    """CPU milliseconds of the parts of an engine's step; what is left over is the host's own work and `commit`."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, float] = {}
        step = engine._step
        parts = [("target", step.target, "forward"), ("target lm_head", step.target, "logits")]
        if step.drafter is not None:
            parts += [("drafter and lm_head", step.drafter, "draft"), ("head", step.drafter.head, "propose")]
            parts += [("context", step.drafter, "append")]
        for name, owner, method in parts:
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            result = call(*arguments, **named)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
            return result

        return run


def stage_rows(setup: Setup) -> list[dict[str, Any]]:
    """What each stage costs at 1 and 8 requests, in CPU milliseconds per step, prefills included."""
    rows = []
    for name, draft_model in {AUTOREGRESSIVE: None, **setup.draft_models}.items():
        for concurrency in [c for c in setup.concurrencies if c in (1, 8)]:
            engine = make_engine(setup, draft_model, concurrency)
            stages = Stages(engine)
            run = timed(lambda engine=engine: by_engine(engine, setup))
            stages.seconds["rest"] = run.cpu_seconds - sum(stages.seconds.values())
            per_step = {stage: 1000 * s / engine.counters.num_steps for stage, s in stages.seconds.items()}
            sizes = {"steps": engine.counters.num_steps, "tau": run.tau}
            rows.append({"kind": "stages", "system": name, "concurrency": concurrency, "cpu_ms": per_step, **sizes})
            for owner in (engine._step.drafter.head,) if draft_model is not None else ():
                del owner.propose  # the timer; heads outlive their engine
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table of each kind."""
    print(f"{'system':16}{'c':>4}{'tokens/s':>11}{'low':>9}{'high':>9}{'tokens/CPU s':>14}{'tau':>7}")
    for row in (row for row in rows if row["kind"] == "decode"):
        clock, cpu = row["tokens_per_s"], row["tokens_per_cpu_s"]
        tau = "-" if row["tau"] is None else f"{row['tau']:.2f}"
        speeds = f"{clock['median']:11.1f}{clock['low']:9.1f}{clock['high']:9.1f}{cpu['median']:14.1f}"
        print(f"{row['system']:16}{row['concurrency']:4}{speeds}{tau:>7}")
    for row in (row for row in rows if row["kind"] == "stages"):
        stages = ", ".join(f"{name} {value:.2f}" for name, value in row["cpu_ms"].items())
        print(f"{row['system']} at {row['concurrency']}, CPU ms per step: {stages}")


def add_sources(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured and where the rows go."""
    parser.add_argument("--profile", default="demo")
    parser.add_argument("--geometry", choices=SIZES, help="random weights of this size, whatever the profile")
    parser.add_argument("--run-dir", default="runs", help="where the profile was trained")
    parser.add_argument(
        "--checkpoint", type=Path, action="append", default=[], help="a draft model's folder; repeatable"
    )
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, help="of torch; default: its own choice")
    parser.add_argument("--dry", action="store_true", help="a random tiny target and untrained heads")
    parser.add_argument("--output", type=Path, help="a .jsonl file that the rows are appended to")


def choose_setup(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Setup, dict[str, Any]]:
    """The options, what the ones of `add_sources` ask for, and the fields of a row that say which it is.

    What was asked for and cannot be measured ends the process with one line.
    """
    arguments = parser.parse_args()
    if arguments.geometry and not arguments.dry and not torch.cuda.is_available():
        parser.error("no GPU here: models of a real size are timed on one; --dry decodes with a toy size anywhere")
    try:
        return arguments, *_setup_of(arguments)
    except ValueError as error:
        parser.error(str(error))


def _setup_of(arguments: argparse.Namespace) -> tuple[Setup, dict[str, Any]]:
    """The setup of the options and the fields of its rows."""
    if arguments.target_only and (arguments.checkpoint or arguments.geometry or arguments.dry):
        raise ValueError("--target-only measures a profile's target: not with --checkpoint, --geometry or --dry")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.geometry:
        size = TOY if arguments.dry else SIZES[arguments.geometry]
        return geometry_setup(size), {"profile": None, "geometry": size.name}
    if arguments.dry:
        return dry_setup(), {"profile": None, "geometry": None}
    return load_setup(arguments), {"profile": arguments.profile, "geometry": None}


def row_file(arguments: argparse.Namespace) -> RowFile:
    """Where the rows go, with the options as they were."""
    settings = vars(arguments) | {"output": None, "checkpoint": [str(path) for path in arguments.checkpoint]}
    return RowFile(arguments.output, settings, threads=torch.get_num_threads())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sources(parser)
    parser.add_argument("--target-only", action="store_true", help="no draft models, so no trained runs are needed")
    arguments, setup, where = choose_setup(parser)
    file = row_file(arguments)
    rows = measure(setup)
    if setup.target.device.type == "cpu" and not setup.one_wave:
        rows += stage_rows(setup)
    print_rows(rows)
    for row in rows:
        file.add({**where, "device": device_name(), **row})


if __name__ == "__main__":
    main()
