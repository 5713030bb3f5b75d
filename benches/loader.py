"""How fast training rows are drawn, beside how fast GPUs consume them.

    python -m benches.loader [--rows 200000] [--steps 200] [--micro-batch-size 1] [--folder DIR] [--output FILE]

Makes a training set of random tokens with the lengths of the paper's corpus (a mean near 1,000 tokens, cut at 3,072),
opens it as the trainer does, and draws steps of 64 rows from it in one process: from the step's number to micro-batches
with their anchors (`deal.deal_rows`, `TrainingSet.batch`, `choose_anchors`), everything in front of the target. One
process draws the whole batch here; in training every worker draws its share of it.

    cold    the files were put out of the page cache before, as far as the system does that when asked
    warm    the same steps once more

`consumed_rows_per_s` is what eight H100s would take by the stated GPU-hours of six epochs (`pipelines/train.py
--estimate`): of the paper's runs plain DFlash on the 4B target is the fastest. `times_consumed` is how many times that
the loader makes; 20 are asked for. `padding` is the share of a micro-batch's positions that are no token of a row.

Place in the flow: `loader.jsonl` has a row for each of cold and warm, with provenance; docs/scale.md quotes them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benches.corpus import ANSWER_SPREAD, ANSWER_TOKENS, NUM_ROWS
from benches.options import positive
from benches.timing import RowFile
from lilicorr.anchors import choose_anchors
from lilicorr.config import TrainConfig
from lilicorr.corpus import FORMAT, Sampler, TrainingSet
from lilicorr.deal import deal_rows, row_costs

GPU_HOURS = {"8b lilicorr": 718.0, "4b dflash": 358.0}  # six epochs by `--estimate`, docs/scale.md
EPOCHS, NUM_GPUS, ASKED = 6, 8, 20
PROMPT_TOKENS, PROMPT_SPREAD = 170, 0.9  # median and sigma of what stands before an answer
VOCAB_SIZE = 151_936
WRITE_ROWS = 20_000  # at once, while the set is made
STEPS = 200


def consumed_rows_per_s(run: str = "4b dflash") -> float:
    """Rows a second of eight H100s, by the run's stated GPU-hours."""
    return NUM_GPUS * EPOCHS * NUM_ROWS / (GPU_HOURS[run] * 3600)


def make_set(folder: Path, num_rows: int, max_length: int, seed: int = 0) -> TrainingSet:
    """A training set of random tokens in `folder`, as `corpus.build_training_set` lays one out."""
    draw = np.random.default_rng(seed)
    prompts = np.maximum(1, draw.lognormal(np.log(PROMPT_TOKENS), PROMPT_SPREAD, num_rows)).astype(np.int64)
    prompts = np.minimum(prompts, max_length - 2)  # the rest would have been dropped: no two tokens to learn from
    answers = np.maximum(2, draw.lognormal(np.log(ANSWER_TOKENS), ANSWER_SPREAD, num_rows)).astype(np.int64)
    lengths = np.minimum(prompts + answers, max_length)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"tokens": np.int32, "mask": np.bool_}
    files = {n: np.lib.format.open_memmap(folder / f"{n}.npy", "w+", kind, (total,)) for n, kind in sizes.items()}
    for first in range(0, num_rows, WRITE_ROWS):
        rows = slice(first, min(first + WRITE_ROWS, num_rows))
        start, stop = offsets[rows.start], offsets[rows.stop]
        files["tokens"][start:stop] = draw.integers(VOCAB_SIZE, size=stop - start, dtype=np.int32)
        place = np.arange(start, stop) - np.repeat(offsets[rows], lengths[rows])
        files["mask"][start:stop] = place >= np.repeat(prompts[rows], lengths[rows])
    for file in files.values():
        file.flush()
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "vocab.npy", np.arange(VOCAB_SIZE, dtype=np.int32))
    meta = {"format": FORMAT, "rows": num_rows, "tokens": total, "vocabulary": VOCAB_SIZE, "source": "", "content": ""}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return TrainingSet.open(folder)


def drop_cache(folder: Path) -> None:
    """Ask the system to put the files of `folder` out of its page cache."""
    for path in folder.glob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loader_rates(training_set: TrainingSet, config: TrainConfig, steps: int = STEPS) -> dict[str, float]:
    """Rows and tokens a second that one process draws, up to the anchors; the share of positions that are padding."""
    sampler = Sampler(len(training_set), config.batch_size, config.seed)
    num_rows = num_tokens = num_positions = 0
    began = time.monotonic()
    for step in range(min(steps, sampler.steps_per_epoch)):
        epoch, rows = sampler.rows(step)
        costs = row_costs(training_set, rows, config.max_anchors)
        for sample_ids, _ in deal_rows(rows, costs, config.micro_batch_size):
            batch = training_set.batch(sample_ids)
            choose_anchors(batch, config.seed, epoch, config.max_anchors)
            num_rows, num_tokens = num_rows + len(sample_ids), num_tokens + int(batch.lengths.sum())
            num_positions += batch.input_ids.numel()
    seconds = time.monotonic() - began
    rates = {"rows_per_s": round(num_rows / seconds, 1), "tokens_per_s": round(num_tokens / seconds, 1)}
    return rates | {"padding": round(1 - num_tokens / num_positions, 4)}


def bench(folder: Path, num_rows: int, steps: int, config: TrainConfig, file: RowFile) -> None:
    """A row for cold and for warm files; writes and prints it as it comes."""
    training_set = make_set(folder, num_rows, config.max_length)
    wanted, mean = consumed_rows_per_s(), float(training_set.lengths.mean())
    del training_set  # its mapping would keep the pages
    for cache in ("cold", "warm"):
        if cache == "cold":
            drop_cache(folder)
        rates = loader_rates(TrainingSet.open(folder), config, steps)
        what = {"kind": "loader", "cache": cache, "rows": num_rows, "mean_length": round(mean, 1), "steps": steps}
        what |= {"micro_batch_size": config.micro_batch_size, "consumed_rows_per_s": round(wanted, 1)}
        row = file.add(what | rates | {"times_consumed": round(rates["rows_per_s"] / wanted, 1)})
        print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    drawn = f"{row['rows_per_s']:.0f} rows/s, {row['tokens_per_s'] / 1e6:.1f} million tokens/s"
    beside = f"{row['times_consumed']:.0f} times the {row['consumed_rows_per_s']:.0f} rows/s of {NUM_GPUS} H100"
    return f"{row['cache']}: {drawn}, {row['padding']:.1%} padding, {beside} ({ASKED} are asked for)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive, default=200_000, help="of the training set; 5 KB of disk each")
    parser.add_argument("--steps", type=positive, default=STEPS)
    parser.add_argument("--micro-batch-size", type=positive, default=1)
    parser.add_argument("--folder", type=Path, help="where a folder for the set is made, and removed in the end")
    parser.add_argument("--output", type=Path, help="a .jsonl file that the rows are appended to")
    arguments = parser.parse_args()
    config = TrainConfig(micro_batch_size=arguments.micro_batch_size)
    if arguments.folder is not None and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is no folder")
    with tempfile.TemporaryDirectory(prefix="loader-", dir=arguments.folder) as folder:
        bench(Path(folder), arguments.rows, arguments.steps, config, RowFile(arguments.output))


if __name__ == "__main__":
    main()
