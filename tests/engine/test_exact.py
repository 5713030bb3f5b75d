"""Every answer of the engine is `decode.py`'s, block by block, in any company."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import toys

from lilicorr.decode import SamplingParams
from lilicorr.engine.request import Request, TokenChunk
from lilicorr.heads import HEADS
from lilicorr.target import Target

STOP = 10


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def mixed(request: pytest.FixtureRequest) -> tuple[Target, list[Request], dict[str, list[list[int]]]]:
    """A target, 200 requests and their autoregressive answers."""
    target, rng = toys.toy_target(request.param), random.Random(1)
    limits = 14 * [150] + [rng.choice([1, 2, 3, 8, 20]) for _ in range(186)]  # the first ones outgrow the pool
    requests = toys.requests_of(
        toys.random_prompts(200),
        lambda i: SamplingParams(limits[i], stop_ids=(STOP,) if i % 3 and i > 13 else (), seed=i),
    )
    return target, requests, toys.reference_runs(target, None, requests)


@pytest.mark.parametrize("head", [None, *HEADS])
def test_200_mixed_requests(mixed: tuple, head: str | None) -> None:
    target, requests, autoregressive = mixed
    draft_model = toys.toy_draft_model(target, head) if head else None
    expected = toys.reference_runs(target, draft_model, requests)
    for request in requests:
        assert sum(expected[request.id], []) == sum(autoregressive[request.id], [])
    engine = toys.toy_engine(target, draft_model, max_running=24, steps_behind=int(head is not None))
    rng, aborted = random.Random(7), set()

    def abort_some(chunks: dict[str, list[TokenChunk]]) -> None:
        if rng.random() < 0.2:
            alive = [id for id, progress in engine._requests.items() if 5 < progress.request.params.max_new_tokens < 50]
            for request_id in rng.sample(alive, min(1, len(alive))):
                engine.abort(request_id)
                aborted.add(request_id)

    chunks = toys.run_all(engine, requests, arrivals=rng, before_step=abort_some)
    for request in requests:
        got, wanted = chunks[request.id], expected[request.id]
        if request.id in aborted:
            assert toys.runs_of(got) == wanted[: len(got)] and not any(chunk.last for chunk in got)
        else:
            assert toys.runs_of(got) == wanted, request.id
            assert got[-1].finish_reason == ("stop" if wanted[-1][-1] in request.params.stop_ids else "length")
    assert len(aborted) > 10
    assert engine.scheduler.num_preemptions > 0 and engine.scheduler.num_cached_tokens > 1000
    assert engine.pool.num_free == 40 and engine.pool.num_used == 0
    check_counters(engine.counters, chunks)


def check_counters(counters, chunks: dict[str, list[TokenChunk]]) -> None:
    """The totals are those of the chunks."""
    blocks = [chunk for of_one in chunks.values() for chunk in of_one[1:]]
    assert counters.num_tokens == sum(len(toys.answer_of(of_one)) for of_one in chunks.values())
    assert counters.num_blocks == len(blocks)
    assert counters.num_block_tokens == sum(len(chunk.token_ids) for chunk in blocks)
    for slot, count in enumerate(counters.accepted_at):
        assert count == sum(chunk.num_accepted > slot for chunk in blocks)


def scripted_engine(target: Target, requests: list[Request], script, block_size: int = 16, **config):
    """An engine whose drafts follow the autoregressive answers."""
    expected = toys.reference_runs(target, None, requests)
    texts = {r.params.seed: r.prompt_ids + sum(expected[r.id], []) for r in requests}
    draft_model = toys.toy_draft_model(target, "argmax", block_size)
    draft_model.head = toys.ScriptedHead(texts, script)
    return toys.toy_engine(target, draft_model, **config), {id: sum(runs, []) for id, runs in expected.items()}


@pytest.fixture(scope="module")
def long_requests() -> tuple[Target, list[Request]]:
    """Four requests of 200 tokens."""
    target = toys.toy_target(vocab=67)
    return target, toys.requests_of(toys.random_prompts(4, vocab=60), lambda i: SamplingParams(200, seed=i))


@pytest.mark.parametrize("wrong_slot", range(1, 16))
def test_drafts_that_are_wrong_at_one_slot(long_requests: tuple, wrong_slot: int) -> None:
    """The drafts behind it are right again, and must not count."""
    target, requests = long_requests
    drafted = Counter[int]()  # slots of each request so far, 15 a block

    def script(seed: int, position: int, token: int) -> int:
        drafted[seed] += 1
        return (token + 1) % 67 if (drafted[seed] - 1) % 15 + 1 == wrong_slot else token

    engine, expected = scripted_engine(target, requests, script)
    chunks = toys.run_all(engine, requests)
    for request in requests:
        assert toys.answer_of(chunks[request.id]) == expected[request.id]
        assert {len(run) for run in toys.runs_of(chunks[request.id])[1:-1]} == {wrong_slot}
    assert engine.counters.accepted_at[wrong_slot - 1 :] == (16 - wrong_slot) * [0]
    if wrong_slot == 1:
        assert engine.counters.tau == 1.0


def test_drafts_that_are_always_right(long_requests: tuple) -> None:
    target, requests = long_requests
    engine, expected = scripted_engine(target, requests, lambda seed, position, token: token)
    chunks = toys.run_all(engine, requests)
    for request in requests:
        assert toys.answer_of(chunks[request.id]) == expected[request.id]
        assert [len(run) for run in toys.runs_of(chunks[request.id])] == [1, *(12 * [16]), 7]


def test_proposals_that_end_early(long_requests: tuple) -> None:
    target, requests = long_requests
    engine, expected = scripted_engine(target, requests, lambda seed, position, token: token)
    head = engine._step.drafter.head
    head.num_verified = lambda position: position % 16
    chunks = toys.run_all(engine, requests)
    for request in requests:
        assert toys.answer_of(chunks[request.id]) == expected[request.id]
        position = len(request.prompt_ids) + 1
        for chunk in chunks[request.id][1:-1]:
            assert len(chunk.token_ids) == position % 16 + 1
            assert (chunk.num_drafted, chunk.num_accepted) == (position % 16, position % 16)
            position += len(chunk.token_ids)


@pytest.mark.parametrize("head", HEADS)
def test_one_request_drafts_what_the_reference_drafts(head: str) -> None:
    target = toys.toy_target()
    draft_model = toys.toy_draft_model(target, head, block_size=6)
    proposals, propose = [], draft_model.head.propose

    def watched(draft, sampling):
        proposals.append(propose(draft, sampling).token_ids.tolist())
        return propose(draft, sampling)

    draft_model.head.propose = watched
    for prompt in ([3], toys.random_prompts(1, seed=4)[0], [5, 2] * 32, [1, 2, 7] * 43):
        requests = [Request("a", prompt, SamplingParams(50))]
        expected = toys.reference_runs(target, draft_model, requests)["a"]
        drafted = proposals.copy()
        proposals.clear()
        assert toys.runs_of(toys.run_all(toys.toy_engine(target, draft_model), requests)["a"]) == expected
        assert proposals == drafted and len(drafted) > 10
        proposals.clear()


@pytest.mark.parametrize("head", [None, *HEADS])
def test_seeded_requests_draw_the_same_tokens_in_any_company(head: str | None) -> None:
    target = toys.toy_target(vocab=67)
    draft_model = toys.toy_draft_model(target, head) if head else None

    def params(i: int) -> SamplingParams:
        return SamplingParams(40, temperature=0.7 + 0.1 * i, top_k=i % 3 * 20, top_p=1 - 0.05 * (i % 2), seed=i)

    requests = toys.requests_of([prompt[:90] for prompt in toys.random_prompts(8, seed=3, vocab=60)], params)
    expected = toys.reference_runs(target, draft_model, requests)
    assert len({tuple(answer[0]) for answer in expected.values()}) > 3

    def check(engine, **arguments) -> None:
        chunks = toys.run_all(engine, requests, **arguments)
        assert {id: toys.runs_of(of_one) for id, of_one in chunks.items()} == expected

    for request in requests:  # alone
        assert (
            toys.runs_of(toys.run_all(toys.toy_engine(target, draft_model), [request])[request.id])
            == expected[request.id]
        )
    together = toys.toy_engine(target, draft_model)
    check(together)
    assert together.scheduler.num_preemptions == 0
    again = together.scheduler.num_cached_tokens
    check(together)  # after a prefix hit
    assert together.scheduler.num_cached_tokens > again
    tight = toys.toy_engine(target, draft_model, num_pages=6, prefix_cache=False)
    check(tight)
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_one_prompt_64_times_has_one_answer(concurrency: int) -> None:
    target = toys.toy_target(vocab=67)
    draft_model = toys.toy_draft_model(target, "lilicorr")
    requests = toys.requests_of(64 * [[5, 3, 8]], lambda i: SamplingParams(30))
    expected = toys.reference_runs(target, draft_model, requests[:1])["0"]
    chunks = toys.run_all(toys.toy_engine(target, draft_model, max_running=concurrency, num_pages=200), requests)
    assert {str(toys.runs_of(of_one)) for of_one in chunks.values()} == {str(expected)}


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    target = toys.toy_target(vocab=67)
    temperatures = (0.0, 1e-6, 1.0)
    requests = toys.requests_of(
        9 * [[7, 1, 4, 2]], lambda i: SamplingParams(25, temperature=temperatures[i % 3], seed=i)
    )
    draft_model = toys.toy_draft_model(target, "argmax")
    expected = toys.reference_runs(target, draft_model, requests)
    chunks = toys.run_all(toys.toy_engine(target, draft_model), requests)
    assert {id: toys.runs_of(of_one) for id, of_one in chunks.items()} == expected
    assert expected["0"] == expected["1"] != expected["2"]


def test_fp64_and_a_draft_vocabulary() -> None:
    target = toys.toy_target(dtype=torch.float64)
    draft_model = toys.toy_draft_model(target, "argmax")
    draft_model.vocab_ids = torch.tensor([1, 3, 4, 8, 9])
    draft_model.draft_rows = target.lm_head[draft_model.vocab_ids]
    requests = toys.requests_of(toys.random_prompts(6), lambda i: SamplingParams(30))
    expected = toys.reference_runs(target, draft_model, requests)
    assert {
        i: toys.runs_of(c) for i, c in toys.run_all(toys.toy_engine(target, draft_model), requests).items()
    } == expected
