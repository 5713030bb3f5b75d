"""What verifying blocks in part costs and gives: the table for `EngineConfig.verify_costs`, and whether it pays.

    python -m benches.verify_cost --profile demo [--run-dir runs] [--checkpoint FOLDER ...] [--output FILE] [--dry]
    python -m benches.verify_cost --geometry 8b [--output FILE] [--dry]

First whole steps with 8, 16 and 32 rows at one context are timed with every number of positions a row of `WIDTHS`, in
turns; their medians are the table, printed as it goes into a configuration. Then, for a profile, its held-out prompts
are decoded with the table and without it, in turns again, and both must give the same answers (RuntimeError). With
`--geometry` the weights are random: only the times mean something. `--dry` is a random toy on any machine.

Place in the flow: `verify_cost.jsonl` has a row per time and per comparison, with provenance; docs/serving.md says how
the engine uses the table.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benches import decode
from benches.decode import Setup, by_engine, make_engine, spread, timed
from benches.head_latency import GREEDY, Block
from benches.timing import RowFile, capture, device_name, device_times, host_times
from lilicorr.draft_model import DraftModel

Row = dict[str, Any]
Table = tuple[tuple[float, ...], ...]
WIDTHS = (2, 3, 4, 6, 8, 12)  # and whole blocks
CONCURRENCIES, DRY_CONCURRENCIES = (8, 16, 32), (2,)
CONTEXT, CPU_CONTEXT, DRY_CONTEXT, ROUNDS = 1500, 300, 70, 5


def widths_of(draft_model: DraftModel) -> list[int]:
    """The widths to time for blocks of this model, the whole block last."""
    whole = draft_model.spec.num_slots + 1
    return [*(width for width in WIDTHS if width < whole), whole]


@torch.no_grad()
def step_times(block: Block, widths: list[int], rounds: int) -> dict[int, list[float]]:
    """Milliseconds of a block of every row for each width, one after the other in every round."""
    block.step.trims = True
    runs = {}
    for width in widths:
        narrow = None if width == widths[-1] else width

        def run(narrow: int | None = narrow) -> torch.Tensor:
            return block.step.decode(block.rows, block.num_pages, GREEDY, narrow)

        runs[width] = capture(run)[0].replay if torch.cuda.is_available() else run
    times: dict[int, list[float]] = {width: [] for width in widths}
    clock = device_times if torch.cuda.is_available() else host_times
    for _ in range(rounds):
        for width, run in runs.items():
            times[width] += [micros / 1000 for micros in clock(run, 1, block.reset)]
    return times


def table_of(rows: list[Row]) -> Table:
    """The medians of one draft model as `EngineConfig.verify_costs` takes them."""
    return tuple((row["concurrency"], row["width"], round(row["milliseconds"]["median"], 3)) for row in rows)


def compare(setup: Setup, draft_model: DraftModel, concurrency: int, table: Table) -> Row:
    """All prompts with the table and without it; raises RuntimeError where an answer differs."""
    engines = {
        "whole": make_engine(setup, draft_model, concurrency),
        "trimmed": make_engine(setup, draft_model, concurrency, verify_costs=table),
    }
    results = {name: [timed(lambda e=engine: by_engine(e, setup))] for name, engine in engines.items()}
    for _ in range(setup.rounds):
        for name, engine in engines.items():
            results[name].append(timed(lambda e=engine: by_engine(e, setup)))
    first = results["whole"][0].answers
    if any(run.answers != first for runs in results.values() for run in runs):
        raise RuntimeError(f"answers at {concurrency} requests differ with and without verify_costs")
    num_tokens = sum(map(len, first))
    found = {}
    for name, runs in results.items():
        rates = spread([num_tokens / run.seconds for run in runs[1:]])
        counters = engines[name].counters
        drafted = counters.num_drafted / max(1, counters.num_blocks)
        found[name] = {"tokens_per_s": rates, "tau": runs[-1].tau, "mean_drafted": drafted}
    return found


def bench(setup: Setup, concurrencies: tuple[int, ...], context: int, where: Row, file: RowFile) -> None:
    """The rows of every draft model; writes and prints them as they come."""
    compares = not setup.one_wave
    for name, draft_model in setup.draft_models.items():
        rows = []
        for concurrency in concurrencies:
            times = step_times(Block(setup.target, draft_model, concurrency, context), widths_of(draft_model), ROUNDS)
            for width, values in times.items():
                row = {"kind": "verify_cost", "system": name, "concurrency": concurrency, "width": width}
                rows.append(file.add({**where, **row, "context": context, "milliseconds": spread(values)}))
        table = table_of(rows)
        print(f"{name}: verify_costs: {[list(entry) for entry in table]}", flush=True)
        for concurrency in concurrencies if compares else ():
            found = compare(setup, draft_model, concurrency, table)
            file.add({**where, "kind": "trimmed", "system": name, "concurrency": concurrency, **found})
            whole, trimmed = (found[kind]["tokens_per_s"]["median"] for kind in ("whole", "trimmed"))
            speeds = f"{whole:.1f} -> {trimmed:.1f} tokens/s ({trimmed / whole - 1:+.1%})"
            print(
                f"{name} c={concurrency}: {speeds}, {found['trimmed']['mean_drafted']:.2f} drafts a block", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    decode.add_sources(parser)
    parser.set_defaults(target_only=False)
    arguments, setup, where = decode.choose_setup(parser)
    concurrencies, context = CONCURRENCIES, CONTEXT if torch.cuda.is_available() else CPU_CONTEXT
    if arguments.dry:
        concurrencies, context = DRY_CONCURRENCIES, DRY_CONTEXT
    bench(setup, concurrencies, context, {**where, "device": device_name()}, decode.row_file(arguments))


if __name__ == "__main__":
    main()
