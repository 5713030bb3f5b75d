"""How full regeneration keeps its engines: the pipeline's feed, and batches that wait for their last answer.

    python -m benches.feed [--engines 4] [--slots 64] [--shards 84] [--output FILE] [--plot FILE]

Engines are simulated: an answer of n tokens takes n steps of a place in an engine, the places of an engine step
together, and nothing else takes time (prompts, prefix cache and the scheduler's own work are left out alike). Answer
lengths are lognormal and cut at 4,096 tokens, conversations have one turn or more, both as in `benches/corpus.py`.
Shards are eight times the places of an engine, as 2,048 conversations are to 256 requests. Ways to feed them:

    feed        `lilicorr.generator.regenerate_groups` over shards from a queue: the pipeline's own code (but for shards
                that are made twice at the end, which would hide how empty the engines get)
    shards      the same shard by shard, an engine running empty before its next one
    processor   batches of an eighth of the places (of 32 rows at 256), each returned as a whole, eight at once in an
                engine, and one pass a turn: how the ready-made Ray Data LLM processor works by default
    processor2  the same with sixteen batches at once, so that rows wait at the engine while others are decoded

`busy` is the share of the engines' places in use until 98 % of the turns are finished, `busy_all` until the last one;
`steps` is the whole time. The picture shows the share over time.

Place in the flow: `feed.jsonl` has a row per way with provenance; docs/scale.md explains them.
"""

from __future__ import annotations

import argparse
import heapq
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benches.corpus import ANSWER_SPREAD, ANSWER_TOKENS, MAX_TURNS, SPLITS
from benches.options import positive
from benches.timing import RowFile
from lilicorr.generator import Completion, DialogueSettings, regenerate_groups
from lilicorr.prompts import Conversation
from lilicorr.tiny import byte_tokenizer

MAX_TOKENS = 4096
PROCESSOR_BATCHES = 8  # of the places of an engine, and at once in it: the processor's defaults
PROCESSORS = {"processor": PROCESSOR_BATCHES, "processor2": 2 * PROCESSOR_BATCHES}  # batches at once
WAYS = ("feed", "shards", *PROCESSORS)
SHARD_PER_SLOT = 8
LAST = 0.02  # share of the turns that the tail is
BINS = 200


@dataclass
class Trace:
    """When places of the engines were taken and left, and turns finished, by step."""

    changes: list[tuple[int, int]] = field(default_factory=list)  # step, change of places in use
    finished: list[int] = field(default_factory=list)

    def add(self, start: int, end: int) -> None:
        """One turn in one place."""
        self.changes += [(start, 1), (end, -1)]
        self.finished.append(end)

    def busy(self, slots: int, until: int) -> float:
        """Share of `slots` places in use before step `until`."""
        in_use = sum(change * (until - step) for step, change in self.changes if step < until)
        return in_use / (slots * until)

    def shares(self, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Ends of equal spans of time, and the share of the places in use within each."""
        edges = np.linspace(0, max(self.finished), BINS + 1)
        steps, changes = np.array(sorted(self.changes)).T
        area = [float((changes * np.clip(edge - steps, 0, None)).sum()) for edge in edges]
        return edges[1:], np.diff(area) / (slots * np.diff(edges))


def make_turns(number: int, seed: int = 0) -> list[list[int]]:
    """Answer lengths of the turns of `number` conversations, in tokens."""
    draw = np.random.default_rng(seed)
    total = sum(split.num_rows for split in SPLITS.values())
    shares = [split.num_rows / total for split in SPLITS.values()]
    more = np.array([split.more_turns for split in SPLITS.values()])[draw.choice(len(shares), number, p=shares)]
    turns = np.minimum(draw.geometric(1 - more), MAX_TURNS)
    lengths = np.exp(draw.normal(np.log(ANSWER_TOKENS), ANSWER_SPREAD, turns.sum())).astype(int).clip(1, MAX_TOKENS)
    return [part.tolist() for part in np.split(lengths, np.cumsum(turns)[:-1])]


class Order:
    """Lets one of several engines run at a time, each in a thread: always the one whose next answer is due first."""

    def __init__(self, number: int) -> None:
        self._running = number
        self._due: dict[SimulatedEngine, int] = {}  # of those that wait
        self._changed = threading.Condition()

    def wait(self, engine: SimulatedEngine, due: int) -> None:
        """Return when every engine waits or has ended and none is due before this one."""
        with self._changed:
            self._running -= 1
            self._due[engine] = due
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running and self._first() is engine)
            del self._due[engine]
            self._running += 1

    def _first(self) -> SimulatedEngine:
        return min(self._due, key=lambda engine: (self._due[engine], engine.number))

    def leave(self) -> None:
        """An engine has ended."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


class SimulatedEngine:
    """A Generator whose answers take as many steps as they have tokens, on a clock of its own."""

    name, max_model_len = "simulated", 1 << 30

    def __init__(
        self, slots: int, turns: list[list[int]], trace: Trace, order: Order | None = None, number: int = 0
    ) -> None:
        self.max_in_flight, self.turns, self.trace, self.order, self.number = slots, turns, trace, order, number
        self.clock = 0
        self._open: list[tuple[int, int, int]] = []  # step at which it is finished, key, step at which it began

    def submit(self, key: int, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Take a place; see Generator. The prompt names its conversation, and its turn by the marks in it."""
        text = bytes(index for index in prompt_ids if index < 256).decode()
        number, turn = int(text.partition("#")[2].partition("#")[0]), text.count("?") - 1
        heapq.heappush(self._open, (self.clock + self.turns[number][turn], key, self.clock))
        assert len(self._open) <= self.max_in_flight

    def poll(self) -> list[tuple[int, Completion]]:
        """Go on to the next answer that is finished, when no other engine has an earlier one; see Generator."""
        finished = []
        if self._open and self.order:
            self.order.wait(self, self._open[0][0])
        while self._open and (not finished or self._open[0][0] == self.clock):
            self.clock, key, start = heapq.heappop(self._open)
            self.trace.add(start, self.clock)
            finished.append((key, Completion([ord("a")], "stop")))
        return finished


def conversation(number: int, turns: list[int]) -> Conversation:
    """A conversation that its engine knows again."""
    messages = [{"role": "user", "content": f"#{number}#?" if not turn else "?"} for turn in range(len(turns))]
    return Conversation(f"{number:032x}", messages, "", "", "")


def run_engines(turns: list[list[int]], num_engines: int, slots: int, overlap: bool) -> Trace:
    """All conversations in shards, over engines that take the next shard when they have room for it.

    Without `overlap` an engine has room when its shard is finished. A shard goes to the engine that asks first by its
    clock.
    """
    size, trace = SHARD_PER_SLOT * slots, Trace()
    starts = iter(range(0, len(turns), size))
    tokenizer, settings = byte_tokenizer(), DialogueSettings({}, MAX_TOKENS)

    def groups(single: bool) -> Iterator[tuple[int, list[Conversation]]]:
        for start in starts:
            stop = min(start + size, len(turns))
            yield start, [conversation(number, turns[number]) for number in range(start, stop)]
            if single:
                return

    if overlap:
        order = Order(num_engines)
        engines = [SimulatedEngine(slots, turns, trace, order, number) for number in range(num_engines)]
        run_together(order, engines, lambda engine: regenerate_groups(groups(False), tokenizer, engine, settings))
        return trace
    engines = [SimulatedEngine(slots, turns, trace) for _ in range(num_engines)]
    waiting = [(0, index) for index in range(num_engines)]
    while waiting:
        clock, index = heapq.heappop(waiting)
        done = list(regenerate_groups(groups(True), tokenizer, engines[index], settings))
        if done:
            heapq.heappush(waiting, (engines[index].clock, index))
    return trace


def run_together(
    order: Order, engines: list[SimulatedEngine], make_run: Callable[[SimulatedEngine], Iterator[Any]]
) -> None:
    """Exhaust the runs of all engines, which take shards and finish answers in the order of their clocks."""

    def exhaust(engine: SimulatedEngine) -> None:
        try:
            order.wait(engine, 0)
            for _ in make_run(engine):
                pass
        finally:
            order.leave()

    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(exhaust, engines))


def run_processor(turns: list[list[int]], num_engines: int, slots: int, at_once: int) -> Trace:
    """Batches that end with their last answer, so many at once in an engine; next turns are another pass.

    The rows of an engine take its places in the order they came.
    """
    trace, clock, size = Trace(), 0, slots // PROCESSOR_BATCHES
    for turn in range(max(map(len, turns))):
        rows = [lengths[turn] for lengths in turns if len(lengths) > turn]
        places = [[clock] * slots for _ in range(num_engines)]  # when each is free
        batches = [(clock, engine) for _ in range(at_once) for engine in range(num_engines)]  # when each may begin
        for first in range(0, len(rows), size):
            begin, engine = heapq.heappop(batches)
            ends = []
            for length in rows[first : first + size]:
                start = max(begin, heapq.heappop(places[engine]))
                ends.append(start + length)
                trace.add(start, ends[-1])
                heapq.heappush(places[engine], ends[-1])
            heapq.heappush(batches, (max(ends), engine))
        clock = max(trace.finished)
    return trace


def simulate(way: str, turns: list[list[int]], num_engines: int, slots: int) -> tuple[dict[str, Any], Trace]:
    """One way to feed the engines: its row and its trace."""
    if way in PROCESSORS:
        trace = run_processor(turns, num_engines, slots, PROCESSORS[way])
    else:
        trace = run_engines(turns, num_engines, slots, overlap=way == "feed")
    assert len(trace.finished) == sum(map(len, turns)), "a turn is missing"
    ends = sorted(trace.finished)
    tail = ends[int((1 - LAST) * len(ends)) - 1]
    places = num_engines * slots
    row = {"kind": "feed", "way": way, "engines": num_engines, "slots": slots, "conversations": len(turns)}
    row |= {"turns": len(ends), "busy": round(trace.busy(places, tail), 4), "busy_all": trace.busy(places, ends[-1])}
    return row | {"steps": ends[-1], "tail_steps": ends[-1] - tail}, trace


def draw(traces: dict[str, Trace], places: int, path: Path) -> None:
    """The share of the places in use over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for way, trace in traces.items():
        axes.plot(*trace.shares(places), label=way)
    axes.set(xlabel="decoding steps", ylabel="share of the engines' places in use", ylim=(0, 1.05))
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=positive, default=4)
    parser.add_argument("--slots", type=positive, default=64, help="requests that an engine decodes at once")
    parser.add_argument("--shards", type=positive, default=84, help="of eight conversations for each slot")
    parser.add_argument("--output", type=Path, help="a .jsonl file that the rows are appended to")
    parser.add_argument("--plot", type=Path, help="a picture")
    arguments = parser.parse_args()
    if arguments.slots % PROCESSOR_BATCHES:
        parser.error(f"--slots must be a multiple of {PROCESSOR_BATCHES}, got {arguments.slots}")
    turns = make_turns(arguments.shards * SHARD_PER_SLOT * arguments.slots)
    file, traces = RowFile(arguments.output), {}
    for way in WAYS:
        row, traces[way] = simulate(way, turns, arguments.engines, arguments.slots)
        file.add(row)
        print(
            f"{way:<10} busy {row['busy']:.1%}, to the last turn {row['busy_all']:.1%}, {row['steps']} steps",
            flush=True,
        )
    if arguments.plot:
        draw(traces, arguments.engines * arguments.slots, arguments.plot)


if __name__ == "__main__":
    main()
