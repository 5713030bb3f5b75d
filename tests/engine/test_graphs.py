"""Captured steps on a machine without a GPU: a stand-in for a graph runs the recorded call again.

As a graph's, its inputs are the tensors of the capture, whatever they hold by then, and it writes over its results.
What only a device can show (that the step can be captured, what its kernels do) is `test_step`'s on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import toys
from test_trim import costs_of

from lilicorr.decode import SamplingParams
from lilicorr.engine.engine import Engine
from lilicorr.engine.graphs import GraphDecode, decode_runner
from lilicorr.engine.request import Request
from lilicorr.engine.step import USUAL_MIXES, Mix, Outcome

SIZES = [1, 2, 3]
ASKED = ({}, dict(temperature=1.0), dict(temperature=0.8, top_p=0.9), dict(frequency_penalty=0.5, num_logprobs=2))


class Graph:
    """What `torch.cuda.CUDAGraph` is to `GraphDecode`."""

    call: Callable[[], Outcome]
    output: Outcome

    def replay(self) -> None:
        for name, result in vars(self.call()).items():
            if result is not None:
                getattr(self.output, name).copy_(result)


class Stream:
    """A stream that does everything at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Stream) -> None:
        pass


class Copied:
    """The engine on a CPU keeps a step's result as it is; on a GPU it copies it before the next replay."""

    def __init__(self, graphs: GraphDecode) -> None:
        self.graphs = graphs

    def __call__(self, *arguments: Any) -> Outcome:
        parts = vars(self.graphs(*arguments)).items()
        return Outcome(**{name: part if part is None else part.clone() for name, part in parts})

    def warm_up(self) -> None:
        self.graphs.warm_up()


def captured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> GraphDecode:
    """Make the engine decode by graphs."""
    step, under_way = engine._step, []
    decode = step.decode

    def recorded(*arguments: Any) -> Outcome:
        output = decode(*arguments)
        for graph in under_way:
            graph.call, graph.output = lambda: decode(*arguments), output
        return output

    @contextlib.contextmanager
    def capture(graph: Graph, pool: str, capture_error_mode: str) -> Iterator[None]:
        assert pool == "pool" and capture_error_mode == "thread_local"
        under_way.append(graph)
        yield
        under_way.remove(graph)

    step.decode = recorded
    fakes = dict(graph_pool_handle=lambda: "pool", CUDAGraph=Graph, graph=capture, Stream=Stream)
    fakes |= dict(current_stream=Stream, stream=lambda _: contextlib.nullcontext())
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    widths = engine._planner.widths if engine._planner is not None else {}
    graphs = GraphDecode(step, SIZES, widths)
    engine._decode = Copied(graphs)
    return graphs


def requests_of() -> list[Request]:
    """Six requests of all kinds of sampling."""
    prompts = [prompt[:90] for prompt in toys.random_prompts(6, vocab=60)]
    return toys.requests_of(prompts, lambda i: SamplingParams(30, seed=i, **ASKED[i % len(ASKED)]))


@pytest.mark.parametrize("head", [None, "argmax", "lilicorr"])
def test_replays_decode_what_the_reference_decodes(head: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, requests = toys.toy_target(vocab=67), requests_of()
    draft_model = toys.toy_draft_model(target, head) if head else None
    expected = toys.reference_runs(target, draft_model, requests)
    engine = toys.toy_engine(target, draft_model, max_running=3, steps_behind=1)
    graphs = captured(engine, monkeypatch)
    engine.warm_up()
    usual = {(size, mix, None) for size in SIZES for mix in USUAL_MIXES}
    assert set(graphs._graphs) == usual
    for _ in range(2):
        kept = dict(graphs._graphs)
        found = {name: toys.runs_of(chunks) for name, chunks in toys.run_all(engine, requests).items()}
        assert found == expected
        assert all(graphs._graphs[key] is graph for key, graph in kept.items())
    later = set(kept) - usual  # captured when somebody asked
    assert later and all(mix.processed or mix.logprobs for _, mix, _ in later)


def test_replays_of_blocks_that_are_verified_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    target, requests = toys.toy_target(), requests_of()
    draft_model = toys.toy_draft_model(target, "argmax")
    requests = [Request(r.id, [token % 12 for token in r.prompt_ids], r.params) for r in requests]
    expected = toys.reference_runs(target, None, requests)
    costs = costs_of(draft_model.spec.num_slots + 1, 2)
    engine = toys.toy_engine(target, draft_model, max_running=3, verify_costs=costs, steps_behind=1)
    graphs = captured(engine, monkeypatch)
    graphs.warm_up()
    assert {(size, width) for size, _, width in graphs._graphs} == {
        *((size, None) for size in SIZES),
        *((size, width) for size in SIZES[1:] for width in (2, 3)),
    }
    chunks = toys.run_all(engine, requests)
    assert {name: toys.answer_of(of_one) for name, of_one in chunks.items()} == {
        name: sum(runs, []) for name, runs in expected.items()
    }


def test_a_result_is_written_over_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a step's result is copied before the next one is started."""
    target = toys.toy_target(vocab=67)
    engine = toys.toy_engine(target, None, max_running=3)
    for request in requests_of()[:3]:
        engine.submit(request)
    engine.step()
    graphs = captured(engine, monkeypatch)
    first = graphs([0, 1], 1, Mix())
    before = first.runs.clone()
    assert graphs([1, 0], 1, Mix()) is first and not torch.equal(first.runs, before)
    assert not isinstance(decode_runner(engine._step, 3, False, {}), GraphDecode)
