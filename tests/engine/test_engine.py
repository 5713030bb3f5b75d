"""The engine's surface: what it takes, refuses, counts, forgets, and keeps through a long run."""

from __future__ import annotations

import math

import pytest
import torch
import toys

from lilicorr.config import EngineConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.engine.request import Request
from lilicorr.heads import HEADS
from lilicorr.kernels.attention import paged_attention


def test_generate_is_the_reference_decoder() -> None:
    target = toys.toy_target(vocab=67)
    prompts = toys.random_prompts(5, vocab=60)
    params = [SamplingParams(limit, stop_ids=(7,)) for limit in (1, 30, 12, 3, 20)]
    for draft_model in (None, toys.toy_draft_model(target, "argmax")):
        decoder, engine = Decoder(target, draft_model), toys.toy_engine(target, draft_model)
        for got, prompt, settings in zip(engine.generate(prompts, params), prompts, params, strict=True):
            wanted = decoder.generate(prompt, settings)
            for name in ("token_ids", "finish_reason", "num_blocks", "num_block_tokens"):
                assert getattr(got, name) == getattr(wanted, name)
            assert got.seconds > 0
        assert not engine.busy
        assert engine.generate(prompts[:1], params[1])[0].token_ids == decoder.generate(prompts[0], params[1]).token_ids


def test_requests_that_cannot_be_served() -> None:
    engine = toys.toy_engine(toys.toy_target(), None, num_pages=4, max_model_len=300)

    def request(**changes: object) -> Request:
        settings = dict(prompt=[1, 2], limit=3, stop_ids=()) | changes
        return Request("a", settings["prompt"], SamplingParams(settings["limit"], stop_ids=settings["stop_ids"]))

    for refused, message in (
        (request(prompt=[]), "at least one token"),
        (request(prompt=[1, 12]), "prompt token id 12"),
        (request(stop_ids=(-1,)), "stop token id -1"),
        (request(stop_ids=tuple(range(9))), "at most 8 stop ids, got 9"),
        (request(limit=299), r"prompt \(2 tokens\) .* \(299\) make 301, more than the context of 300"),
        (request(limit=290), r"need 5 pages, the engine has 4"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.check(refused)
        with pytest.raises(ValueError, match=message):
            engine.submit(refused)
    assert not engine.busy
    engine.submit(request())
    with pytest.raises(ValueError, match="id 'a' is in hand"):
        engine.submit(request())
    with pytest.raises(ValueError, match="1 requests are in hand"):
        engine.generate([[1]], SamplingParams(2))


def test_settings_that_make_no_engine() -> None:
    target = toys.toy_target()
    for settings in (
        dict(max_running=0),
        dict(prefill_tokens=0),
        dict(steps_behind=2),
        dict(num_pages=3, kv_gib=1.0),
        dict(num_pages=0),
        dict(max_model_len=0),
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            EngineConfig(**settings)
    with pytest.raises(ValueError, match="deterministic_width must be at least 4, anchor and slots, got 3"):
        toys.toy_engine(target, toys.toy_draft_model(target, "argmax"), deterministic=True, deterministic_width=3)


@pytest.mark.parametrize("steps_behind", [0, 1])
def test_an_aborted_request_gives_everything_back_and_says_no_more(steps_behind: int) -> None:
    target = toys.toy_target(vocab=67)
    requests = toys.requests_of(toys.random_prompts(3, vocab=60), lambda i: SamplingParams(60))
    expected = toys.reference_runs(target, None, requests)
    engine = toys.toy_engine(target, None, max_running=2, steps_behind=steps_behind, prefix_cache=False)
    for request in requests:
        engine.submit(request)
    chunks = [chunk for _ in range(5) for chunk in engine.step()]
    assert any(chunk.request_id == "1" for chunk in chunks)
    engine.abort("1")  # running
    engine.abort("never heard of")
    later = engine.step()
    engine.submit(Request("4", [1], SamplingParams(5)))
    engine.abort("4")  # waiting
    while engine.busy:
        later += engine.step()
    assert {chunk.request_id for chunk in later} == {"0", "2"}
    assert toys.answer_of([c for c in later if c.request_id == "2"]) == sum(expected["2"], [])
    assert engine.pool.num_free == 40


def test_a_request_that_ends_and_is_aborted_in_the_same_step() -> None:
    engine = toys.toy_engine(toys.toy_target(), None, steps_behind=1)
    engine.submit(Request("a", [1, 2], SamplingParams(1)))
    assert engine.step() == []  # the host is a step behind
    engine.abort("a")
    assert engine.busy and engine.step() == [] and not engine.busy
    engine.abort("a")
    assert engine.pool.num_free == 40


def test_pages_in_flight_are_not_handed_out() -> None:
    """A request is aborted while a step may still write to its pages."""
    engine = toys.toy_engine(toys.toy_target(), None, steps_behind=1, num_pages=2, prefix_cache=False)
    engine.submit(Request("a", 70 * [1], SamplingParams(20)))
    engine.step()
    engine.abort("a")
    assert engine.pool.num_used == 0 and engine.pool.num_free == 0
    engine.submit(Request("b", 70 * [2], SamplingParams(20)))
    engine.step()
    assert len(engine.scheduler.waiting) == 1 and engine.pool.num_free == 2
    engine.step()
    assert not engine.scheduler.waiting


@pytest.mark.parametrize("index", [0, 1, 5, 7, 8])  # prefill; first, inside and last of a block
def test_a_stop_token_ends_the_answer_on_the_device(index: int) -> None:
    target, prompt = toys.toy_target(vocab=67), [3, 1, 4]
    settings = dict(temperature=3.0, seed=2)
    text = Decoder(target, None).generate(prompt, SamplingParams(14, **settings)).token_ids
    assert text.index(text[index]) == index
    draft_model = toys.toy_draft_model(target, "argmax", block_size=8)
    draft_model.head = toys.ScriptedHead({2: prompt + text}, lambda seed, position, token: token)
    engine = toys.toy_engine(target, draft_model, steps_behind=1)
    request = Request("a", prompt, SamplingParams(14, stop_ids=(text[index], 66), **settings))
    chunks = toys.run_all(engine, [request])["a"]
    assert toys.answer_of(chunks) == text[: index + 1] and chunks[-1].finish_reason == "stop"
    assert toys.runs_of(chunks) == toys.reference_runs(target, draft_model, [request])["a"]
    assert engine.counters.num_tokens == index + 1


def test_the_context_may_be_filled_to_its_last_position() -> None:
    target = toys.toy_target(vocab=67)
    prompt = [1 + i % 60 for i in range(497)]
    for head in (None, *HEADS):
        draft_model = toys.toy_draft_model(target, head, block_size=16) if head else None
        request = Request("a", prompt, SamplingParams(15))
        expected = toys.reference_runs(target, draft_model, [request])["a"]
        assert toys.runs_of(toys.run_all(toys.toy_engine(target, draft_model), [request])["a"]) == expected
        with pytest.raises(ValueError, match="497 tokens.*16.*513.*512"):
            toys.toy_engine(target, draft_model).submit(Request("a", prompt, SamplingParams(16)))


def test_only_requests_of_the_same_salt_share_pages() -> None:
    engine, prompt = toys.toy_engine(toys.toy_target(), None), 70 * [3]
    for name, salt, cached in (("a", "", 0), ("b", "x", 0), ("c", "x", 64), ("d", "", 128)):
        toys.run_all(engine, [Request(name, prompt, SamplingParams(2), salt)])
        assert engine.scheduler.num_cached_tokens == cached


def test_a_prompt_of_full_pages_runs_its_last_token_again() -> None:
    target = toys.toy_target(vocab=67)
    draft_model, prompt = toys.toy_draft_model(target, "lilicorr"), [1 + i % 7 for i in range(128)]
    engine, requests = (
        toys.toy_engine(target, draft_model),
        toys.requests_of(2 * [prompt], lambda i: SamplingParams(20)),
    )
    expected = toys.reference_runs(target, draft_model, requests[:1])["0"]
    for request in requests:
        assert toys.runs_of(toys.run_all(engine, [request])[request.id]) == expected
    assert engine.scheduler.num_cached_tokens == 64


def test_an_answer_is_cached_too() -> None:
    target = toys.toy_target(vocab=67)
    draft_model = toys.toy_draft_model(target, "argmax")
    engine, prompt = toys.toy_engine(target, draft_model), [5, 6, 7]
    answer = engine.generate([prompt], SamplingParams(130))[0].token_ids
    request = Request("next turn", [*prompt, *answer, 9, 9], SamplingParams(20))
    assert (
        toys.runs_of(toys.run_all(engine, [request])[request.id])
        == toys.reference_runs(target, draft_model, [request])[request.id]
    )
    assert engine.scheduler.num_cached_tokens == 128


def test_long_prompts_are_prefilled_beside_rows_that_decode() -> None:
    target = toys.toy_target(vocab=67)
    engine = toys.toy_engine(target, None, prefill_tokens=50, idle_prefill_tokens=100)
    requests = toys.requests_of([[1, 2, 3], *(2 * [[1 + i % 50 for i in range(400)]])], lambda i: SamplingParams(40))
    expected = toys.reference_runs(target, None, requests)
    engine.submit(requests[0])
    chunks, sizes = engine.step(), []
    for request in requests[1:]:
        engine.submit(request)
    while engine.busy:
        before = engine.counters.num_prompt_tokens
        chunks += engine.step()
        sizes.append(engine.counters.num_prompt_tokens - before)
    for request in requests:
        assert toys.runs_of([c for c in chunks if c.request_id == request.id]) == expected[request.id]
    assert sizes[:16] == 16 * [50] and sum(sizes) == 800


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_end_the_request_and_not_the_engine(value: float, temperature: float) -> None:
    target = toys.toy_target()
    engine = toys.toy_engine(target, toys.toy_draft_model(target, "argmax"))
    target.lm_head[5:7, 0] = torch.tensor([value, -value])  # one of the two logits is +inf
    (chunk,) = toys.run_all(engine, [Request("a", [1, 2], SamplingParams(3, temperature))])["a"]
    assert chunk.error == "ValueError: the target's logits are not finite at position 2" and chunk.last
    assert not engine.busy and engine.pool.num_used == 0
    with pytest.raises(RuntimeError, match="prompt 0: ValueError: the target's logits are not finite"):
        engine.generate([[1, 2]], SamplingParams(3))


@pytest.mark.parametrize("head", [None, "argmax"])
def test_a_broken_request_fails_alone_beside_one_that_filters(head: str | None) -> None:
    target = toys.toy_target(vocab=67)
    draft_model = toys.toy_draft_model(target, head) if head else None
    params = SamplingParams(12, temperature=1.0, top_p=0.9, min_p=0.01, seed=3)
    requests = [Request("fine", [1, 2, 3], params), Request("broken", [4, 66, 5], SamplingParams(12))]
    expected = toys.reference_runs(target, draft_model, requests[:1])["fine"]
    target.embed[66] = math.nan
    chunks = toys.run_all(toys.toy_engine(target, draft_model), requests)
    assert toys.runs_of(chunks["fine"]) == expected
    error = "ValueError: the target's logits are not finite at position 3"
    assert [chunk.error for chunk in chunks["broken"]] == [error]


@pytest.mark.parametrize("head", [head for head in HEADS if head != "argmax"])
def test_a_broken_drafter_changes_no_answer(head: str) -> None:
    target = toys.toy_target(vocab=67)
    draft_model = toys.toy_draft_model(target, head, head_config={"contract": "sampled"})
    requests = toys.requests_of(
        toys.random_prompts(3, vocab=60), lambda i: SamplingParams(9, temperature=i, top_k=20, seed=i)
    )
    expected = toys.reference_runs(target, None, requests)
    with torch.no_grad():
        draft_model.drafter.norm.weight.fill_(math.nan)
    chunks = toys.run_all(toys.toy_engine(target, draft_model), requests)
    assert {id: toys.answer_of(of_one) for id, of_one in chunks.items()} == {
        id: sum(runs, []) for id, runs in expected.items()
    }


@pytest.mark.parametrize("settings", [{}, dict(deterministic=True, deterministic_width=8)])
@pytest.mark.parametrize("head", [None, "lilicorr"])
def test_what_others_left_in_a_page_is_not_read(head: str | None, settings: dict) -> None:
    target = toys.toy_target(vocab=67)
    draft_model = toys.toy_draft_model(target, head) if head else None
    requests = toys.requests_of([[1, 2, 3], [4 + i % 50 for i in range(70)]], lambda i: SamplingParams(12))
    expected = toys.reference_runs(target, draft_model, requests)
    engine = toys.toy_engine(target, draft_model, max_running=2, **settings)
    for stack in (engine._step.target, engine._step.drafter) if head else (engine._step.target,):
        for layer in stack.layers:
            layer.k_pages.fill_(math.nan)
            layer.v_pages.fill_(math.nan)
    assert {id: toys.runs_of(of_one) for id, of_one in toys.run_all(engine, requests).items()} == expected


def test_a_piece_near_the_end_of_the_context_may_be_filled_up_to_a_page() -> None:
    target = toys.toy_target(vocab=67)
    lengths, limits = (3, 100, 230, 100), (60, 2, 2, 2)
    requests = toys.requests_of([[1 + i % 50 for i in range(n)] for n in lengths], lambda i: SamplingParams(limits[i]))
    expected = toys.reference_runs(target, None, requests)
    engine = toys.toy_engine(target, None, max_model_len=232, prefill_tokens=64, prefix_cache=False)
    engine.submit(requests[0])
    chunks, reached, prefill = engine.step(), [], engine._step.prefill

    def watched(pieces, *rest):
        reached.append(int(pieces.starts.max()) + pieces.token_ids.shape[1])
        return prefill(pieces, *rest)

    engine._step.prefill = watched
    for request in requests[1:]:
        engine.submit(request)
    while engine.busy:
        chunks += engine.step()
    for request in requests:
        assert toys.runs_of([c for c in chunks if c.request_id == request.id]) == expected[request.id]
    assert max(reached) > 256  # the pages of the context end there


def test_a_row_that_filled_the_context_may_be_decoded_once_more() -> None:
    target, prompt = toys.toy_target(vocab=67), [1 + i % 50 for i in range(101)]
    text = Decoder(target, None).generate(prompt, SamplingParams(170)).token_ids
    draft_model = toys.toy_draft_model(target, "argmax")
    starts: list[int] = []

    def script(seed: int, position: int, token: int) -> int:
        starts.append(position)
        return token

    draft_model.head = toys.ScriptedHead({0: prompt + text}, script)
    engine = toys.toy_engine(target, draft_model, max_model_len=252, steps_behind=1)
    chunks = toys.run_all(engine, [Request("a", prompt, SamplingParams(151))])["a"]
    assert toys.answer_of(chunks) == text[:151] and max(starts) == 256  # behind the last page of the context


def test_prefill_of_one_shape_gives_the_same_answers() -> None:
    """As on a GPU: pieces of a page and the whole table, so that no kernel is compiled while requests wait."""
    target = toys.toy_target(vocab=67)
    requests = toys.requests_of(toys.random_prompts(4, vocab=60), lambda i: SamplingParams(6))
    draft_model = toys.toy_draft_model(target, "lilicorr")
    expected = toys.reference_runs(target, draft_model, requests)
    engine = toys.toy_engine(target, draft_model, max_running=3, idle_prefill_tokens=512)
    engine._fixed_shapes = True
    prefill, shapes = engine._step.prefill, []

    def watched(pieces, num_pages, mix):
        shapes.append((len(pieces.rows), pieces.token_ids.shape[1], num_pages))
        return prefill(pieces, num_pages, mix)

    engine._step.prefill = watched
    engine.warm_up()
    assert sorted({count for count, _, _ in shapes}) == [1, 2, 4, 8, 11]  # 512 / 64 and a last piece of every row
    assert {id: toys.runs_of(c) for id, c in toys.run_all(engine, requests).items()} == expected
    assert {shape[1:] for shape in shapes} == {(64, engine.state.page_table.shape[1])}


def test_pages_of_an_aborted_request_are_there_before_anyone_is_preempted() -> None:
    target = toys.toy_target(vocab=67)
    requests = toys.requests_of([[1 + i % 50 for i in range(n)] for n in (127, 100)], lambda i: SamplingParams(8))
    expected = toys.reference_runs(target, None, requests[:1])["0"]
    engine = toys.toy_engine(target, None, num_pages=4, prefix_cache=False, steps_behind=0)
    for request in requests:
        engine.submit(request)
    chunks = engine.step()
    engine.abort("1")
    assert engine.pool.num_free == 0
    while engine.busy:
        chunks += engine.step()
    assert toys.runs_of([c for c in chunks if c.request_id == "0"]) == expected
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("steps_behind", [0, 1])
def test_a_broken_prompt_leaves_nothing_of_the_others_in_hand(steps_behind: int) -> None:
    target = toys.toy_target(vocab=67)
    target.embed[66] = math.nan
    engine = toys.toy_engine(target, None, max_running=2, steps_behind=steps_behind)
    with pytest.raises(RuntimeError, match="prompt 1: ValueError: the target's logits are not finite at position 2"):
        engine.generate([[1, 2], [3, 66], [4, 5], [6]], SamplingParams(20))
    assert not engine.busy and engine.pool.num_used == 0
    assert len(engine.generate([[1, 2]], SamplingParams(3))[0].token_ids) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deterministic_answers_have_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    target = toys.toy_target(dtype=dtype, vocab=67, hidden=64)
    expected = {}
    requests = toys.requests_of(toys.random_prompts(9, longest=140, vocab=60), lambda i: SamplingParams(50, seed=i))
    settings = dict(deterministic=True, deterministic_width=8, max_running=4)
    for head in (None, *HEADS):
        draft_model, pages = toys.toy_draft_model(target, head) if head else None, 9 if head == "lilicorr" else 40
        engine = toys.toy_engine(target, draft_model, num_pages=pages, prefix_cache=pages == 40, **settings)
        chunks = toys.run_all(engine, requests)
        answers = {id: toys.answer_of(of_one) for id, of_one in chunks.items()}
        expected = expected or answers
        assert answers == expected
    assert engine.scheduler.num_preemptions > 0
    alone = toys.run_all(toys.toy_engine(target, None, **settings), requests[3:4])
    assert toys.answer_of(alone["3"]) == expected["3"]


@pytest.mark.parametrize("head", [None, *HEADS])
def test_every_head_decodes_in_bf16(head: str | None) -> None:
    """Without passes of one shape a near tie may fall otherwise in other company; alone, a request has one answer."""
    target = toys.toy_target(dtype=torch.bfloat16, vocab=67, hidden=64)
    draft_model = toys.toy_draft_model(target, head) if head else None
    requests = toys.requests_of(
        [prompt[:90] for prompt in toys.random_prompts(5, vocab=60)], lambda i: SamplingParams(20, i % 2, seed=i)
    )
    engine = toys.toy_engine(target, draft_model)
    chunks = toys.run_all(engine, requests)
    assert all(len(toys.answer_of(of_one)) == 20 and of_one[-1].error is None for of_one in chunks.values())
    assert engine.state.anchor_context.dtype == torch.bfloat16
    first, second = (toys.run_all(toys.toy_engine(target, draft_model), requests[3:4])["3"] for _ in range(2))
    assert toys.runs_of(first) == toys.runs_of(second)


def test_deterministic_passes_of_the_target_ask_for_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and splits of attention follow from these shapes: with others the same position has other bits."""
    target, found = toys.toy_target(vocab=67), {}
    requests = toys.requests_of([[1 + i % 50 for i in range(n)] for n in (3, 70)], lambda i: SamplingParams(6))

    def watched(queries, k_pages, v_pages, table, kv_lengths, causal, lengths, reading):
        if causal:
            found[head].add((*queries.shape, *table.shape, lengths is None))
        return paged_attention(queries, k_pages, v_pages, table, kv_lengths, causal, lengths, reading=reading)

    monkeypatch.setattr("lilicorr.engine.model.paged_attention", watched)
    for head, block_size in ((None, 1), ("argmax", 4), ("lilicorr", 8)):
        found[head] = set()
        draft_model = toys.toy_draft_model(target, head, block_size) if head else None
        toys.run_all(
            toys.toy_engine(target, draft_model, deterministic=True, deterministic_width=8, max_running=3), requests
        )
    assert found[None] == found["argmax"] == found["lilicorr"] and len(found[None]) == 1
