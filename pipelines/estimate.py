"""What the runs of a profile take, before a cluster is asked for anything: memory of a worker, hours of them all.

    python pipelines/train.py --estimate --profile paper_8b [--rows N --length T] [--utilisation 0.4]

Memory is that of a worker's rows of a step, all as long as a row may be, counted by `lilicorr/budget.py` on tensors
without values: it needs neither a GPU nor weights. Operations are counted in the same way on rows of mean length. Rows
and their mean length are those of the training set where there is one; before that they are stated, by the options or
for the paper's corpus here. Hours follow from the share of the card's bf16 arithmetic that is used, which is stated
too: `benches/train_step.py` measures it. Rows differ, so workers wait for the busiest one of every step; how long is
simulated, with the code that deals the rows.

Place in the flow: beside the stages; writes nothing. Paper: section 4.1, Table 4.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, Qwen3Config

from lilicorr.budget import step_budget
from lilicorr.config import PipelineConfig, TargetConfig, TrainConfig
from lilicorr.corpus import Sampler
from lilicorr.deal import ANCHOR_COST, split_rows
from lilicorr.target import DTYPES, PUBLIC, model_config
from lilicorr.training import num_steps
from pipelines import stage
from pipelines.errors import one_line_errors

GB, TERA = 1e9, 1e12
H100_OPERATIONS = 989e12  # bf16 operations a second, of the maker's data sheet
UTILISATION = 0.4  # stated: of these, what public block-diffusion trainers reach on H100s and H200s
NEMOTRON_ROWS, NEMOTRON_LENGTH = 1_397_187, 1000  # stated: tokens of a row, as a public count of such answers suggests
ANSWER_SHARE = 0.75  # stated: of a row's tokens
LENGTH_SPREAD = 0.9  # stated: sigma of the logarithm of a row's tokens
SIMULATED_STEPS = 100
TOKENS_PER_S = 10_000  # stated: answers of an 8B target on one H100, with full batches


@dataclass(frozen=True)
class Corpus:
    """What is trained on."""

    num_rows: int
    mean_length: float  # tokens
    mean_answer: float  # supervised ones of them
    origin: str


def target_config(config: TargetConfig) -> PretrainedConfig:
    """The target's config of transformers; of the paper's targets without looking anywhere."""
    if config.source in PUBLIC:
        return Qwen3Config(**PUBLIC[config.source])
    return model_config(config)


def find_corpus(config: PipelineConfig, rows: int | None, length: float | None) -> Corpus:
    """The training set's size: as stated, else its own, else the paper's.

    Raises ValueError where nothing says how large it is.
    """
    path = config.directory / "train" / "training_set" / "meta.json"
    if rows is None and length is None and path.is_file():
        meta = json.loads(path.read_text(encoding="utf-8"))
        answers = meta["supervised_tokens"] / meta["rows"]
        return Corpus(meta["rows"], meta["tokens"] / meta["rows"], answers, f"measured, {path}")
    if rows is None and length is None and config.prompts.source == "nemotron_v2":
        return Corpus(NEMOTRON_ROWS, NEMOTRON_LENGTH, ANSWER_SHARE * NEMOTRON_LENGTH, "stated: the paper's corpus")
    if rows is None and length is None:
        raise ValueError(f"there is no training set in {path.parent} yet: give --rows and --length")
    if rows is None or length is None:
        raise ValueError(f"give --rows and --length, both or neither, got {rows} and {length}")
    if rows < 1 or not 2 <= length < math.inf:
        raise ValueError(f"--rows must be at least 1 and --length at least 2 and finite, got {rows} and {length:g}")
    return Corpus(rows, length, ANSWER_SHARE * length, "stated by the options")


def estimate(config: PipelineConfig, corpus: Corpus, utilisation: float) -> dict[str, Any]:
    """Bytes by part, operations of a mean row by part, steps and GPU-hours of every run; and of regeneration.

    Raises ValueError for a utilisation that is no share.
    """
    target, dtype, train = target_config(config.target), DTYPES[config.target.dtype], config.train
    if not 0 < utilisation <= 1:
        raise ValueError(f"--utilisation must be in (0, 1], got {utilisation}")
    runs = {}
    for name, run in train.runs.items():
        anchors = min(train.max_anchors, train.max_length - 1)
        fewest = replace(train, num_workers=train.min_workers or train.num_workers)
        most = step_budget(fewest, run, target, dtype, train.max_length, anchors, rows_per_worker(fewest))
        length = min(round(corpus.mean_length), train.max_length)
        num_blocks = max(1, min(train.max_anchors, round(corpus.mean_answer) - 1))
        mean = step_budget(train, run, target, dtype, length, num_blocks, rows_per_worker(train))
        sampler = Sampler(corpus.num_rows, train.batch_size, train.seed)
        steps = num_steps(run, sampler)
        rows = steps * corpus.num_rows / sampler.steps_per_epoch
        hours = rows * sum(mean["operations"].values()) / (H100_OPERATIONS * utilisation) / 3600
        runs[name] = {"bytes": most["bytes"], "operations": mean["operations"], "steps": steps, "gpu_hours": hours}
    tokens = corpus.num_rows * corpus.mean_answer
    regenerate = {"regenerate_gpu_hours": tokens / TOKENS_PER_S / 3600, "regenerate_tokens": tokens}
    return {"runs": runs, "busiest": busiest_share(train, corpus), **regenerate}


def rows_per_worker(config: TrainConfig) -> int:
    """The most rows of a step that a worker gets: those of an even deal, which `split_rows` keeps to."""
    return math.ceil(config.batch_size / config.num_workers)


def busiest_share(config: TrainConfig, corpus: Corpus) -> float:
    """The work of a step's busiest worker, for which all others wait, over an even share; a mean of simulated steps.

    Rows are lognormal around the corpus's mean length with `LENGTH_SPREAD`, cut as in training, and dealt as there.
    """
    draw, shares = np.random.default_rng(0), []
    middle = math.log(corpus.mean_length) - LENGTH_SPREAD**2 / 2
    for _ in range(SIMULATED_STEPS):
        lengths = draw.lognormal(middle, LENGTH_SPREAD, config.batch_size).clip(2, config.max_length)
        anchors = (lengths * corpus.mean_answer / corpus.mean_length - 1).clip(1, config.max_anchors)
        costs = (lengths + ANCHOR_COST * anchors).astype(int).tolist()
        loads = [sum(costs[row] for row in rows) for rows in split_rows(costs, config.num_workers)]
        shares.append(max(loads) * config.num_workers / sum(loads))
    return float(np.mean(shares))


def describe(config: PipelineConfig, corpus: Corpus, utilisation: float, found: dict[str, Any]) -> Iterator[str]:
    """The estimate in lines of text."""
    train = config.train
    fewest = replace(train, num_workers=train.min_workers or train.num_workers)
    at_once = rows_per_worker(fewest)
    yield f"{config.profile}: target {config.target.source}, {train.num_workers} workers, nothing was started"
    yield f"corpus: {corpus.num_rows} rows of {corpus.mean_length:.0f} tokens, {corpus.origin}"
    hours, tokens = found["regenerate_gpu_hours"], found["regenerate_tokens"]
    yield f"regenerate: {tokens / 1e9:.2f} billion tokens, {hours:.0f} GPU-hours at {TOKENS_PER_S} tokens/s (stated)"
    for name, run in found["runs"].items():
        yield (
            f"run {name}, {at_once} rows of {train.max_length} tokens with {train.max_anchors} anchors, "
            f"{min(train.micro_batch_size, at_once)} at a time:"
        )
        yield from (f"  {size / GB:8.2f} GB  {part}" for part, size in run["bytes"].items())
        yield f"  {sum(run['bytes'].values()) / GB:8.2f} GB  together, on every worker"
        parts = ", ".join(f"{part} {count / TERA:.1f}" for part, count in run["operations"].items())
        yield f"  {sum(run['operations'].values()) / TERA:.1f} TFLOP for a row of mean length: {parts}"
        hours, stated = run["gpu_hours"], f"{100 * utilisation:.0f} % of an H100's {H100_OPERATIONS / TERA:.0f} TFLOP/s"
        yield f"  {run['steps']} steps of {train.batch_size} rows, {hours:.0f} GPU-hours at {stated} (stated)"
        wait = found["busiest"]
        yield (
            f"  {hours * wait / train.num_workers:.1f} h on {train.num_workers} workers, of which a step's busiest has "
            f"{wait:.2f} times an even share (simulated)"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the module's first lines."""
    parser = stage.argument_parser("Memory and hours of the profile's training runs.")
    parser.add_argument("--estimate", action="store_true", help="what brings you here")
    parser.add_argument("--rows", type=int, help="of the training set")
    parser.add_argument("--length", type=float, help="mean tokens of a row")
    parser.add_argument("--utilisation", type=float, default=UTILISATION)
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if arguments.status or arguments.dry_run:
        parser.error("--estimate starts nothing and knows no --status and no --dry-run")
    with one_line_errors():
        config = stage.resolve_config(arguments)
        corpus = find_corpus(config, arguments.rows, arguments.length)
        with torch.random.fork_rng(devices=[]):
            found = estimate(config, corpus, arguments.utilisation)
    for line in describe(config, corpus, arguments.utilisation, found):
        print(line)
