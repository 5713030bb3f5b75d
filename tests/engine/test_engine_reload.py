"""Weights that change while requests are decoded: every request goes on, and drafts are the new weights' own."""

from __future__ import annotations

import pytest
import toys

from lilicorr.checkpoint import checkpoint_tensors, write_weights
from lilicorr.decode import SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.engine.request import TokenChunk

OLD, NEW = 5, 9  # seeds of weights


def reload(engine: Engine, new: DraftModel) -> list[TokenChunk]:
    return engine.reload(lambda: write_weights(engine.draft_model, checkpoint_tensors(new)), "new")


@pytest.mark.parametrize("steps_behind", [0, 1])
@pytest.mark.parametrize("head", ["argmax", "lilicorr", "domino", "dspark"])
def test_requests_in_hand_go_on_and_later_ones_are_drafted_by_the_new_weights(head: str, steps_behind: int) -> None:
    """Rows in prefill, rows that decode and requests that wait; prompts that the old weights' pages would fit."""
    target = toys.toy_target()
    old, new = (toys.toy_draft_model(target, head, seed=seed) for seed in (OLD, NEW))
    requests = toys.requests_of(toys.random_prompts(14), lambda _: SamplingParams(40))
    texts = {id: sum(runs, []) for id, runs in toys.reference_runs(target, None, requests).items()}
    wanted = toys.reference_runs(target, new, requests)
    assert wanted != toys.reference_runs(target, old, requests)

    engine = toys.toy_engine(target, old, steps_behind=steps_behind, prefill_tokens=64, idle_prefill_tokens=256)
    chunks: dict[str, list[TokenChunk]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    found = [chunk for _ in range(6) for chunk in engine.step()]
    scheduler = engine.scheduler
    assert scheduler.waiting and scheduler.decoding and len(scheduler.running) > len(scheduler.decoding)
    found += reload(engine, new)
    assert engine.pool.num_free == engine.pool.num_pages and not scheduler.running
    while engine.busy:
        found += engine.step()
    for chunk in found:
        chunks[chunk.request_id].append(chunk)
    assert {id: toys.answer_of(parts) for id, parts in chunks.items()} == texts

    again = toys.run_all(engine, requests)
    assert {id: toys.runs_of(parts) for id, parts in again.items()} == wanted
    assert sum(parts[0].num_cached for parts in again.values()) > 0  # the pages of the new weights are known


def test_an_idle_engine_forgets_what_it_knew() -> None:
    target = toys.toy_target()
    old, new = (toys.toy_draft_model(target, "lilicorr", seed=seed) for seed in (OLD, NEW))
    (request,) = toys.requests_of([[token % toys.VOCAB for token in range(150)]], lambda _: SamplingParams(30))
    engine = toys.toy_engine(target, old)
    toys.run_all(engine, [request])
    assert toys.run_all(engine, [request])["0"][0].num_cached >= 128
    assert reload(engine, new) == []
    chunks = toys.run_all(engine, [request])["0"]
    assert chunks[0].num_cached == 0
    assert toys.runs_of(chunks) == toys.reference_runs(target, new, [request])["0"]


def test_seeded_answers_of_a_point_mass_do_not_change() -> None:
    """What is committed are draws of the target, whoever drafts."""
    target = toys.toy_target()
    old, new = (toys.toy_draft_model(target, "lilicorr", seed=seed) for seed in (OLD, NEW))
    requests = toys.requests_of(toys.random_prompts(5), lambda index: SamplingParams(40, 1.0, seed=index))
    wanted = {id: toys.answer_of(parts) for id, parts in toys.run_all(toys.toy_engine(target, old), requests).items()}
    engine = toys.toy_engine(target, toys.toy_draft_model(target, "lilicorr", seed=OLD))
    num_steps = 0

    def now_and_then(chunks: dict[str, list[TokenChunk]]) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (3, 5, 9):
            for chunk in reload(engine, new):
                chunks[chunk.request_id].append(chunk)

    got = toys.run_all(engine, requests, before_step=now_and_then)
    assert {id: toys.answer_of(parts) for id, parts in got.items()} == wanted
