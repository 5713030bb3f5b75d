"""Penalties, bias, least lengths and log-probabilities in the engine: what `decode.py` gives, in any company."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from toys import (
    answer_of,
    random_prompts,
    reference_runs,
    requests_of,
    run_all,
    runs_of,
    toy_draft_model,
    toy_engine,
    toy_target,
)

from brute_force import brute_force, check_logprobs, model_logits, next_law
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.engine.request import Request, TokenChunk
from lilicorr.heads import HEADS
from lilicorr.target import Target

SAMPLED = [f"{name} sampled" for name in HEADS if name != "argmax"]
STOPS = (4, 9, 17, 30)
SETTINGS = [
    {},
    dict(presence_penalty=1.1, frequency_penalty=0.6),
    dict(repetition_penalty=1.4, stop_ids=STOPS, min_new_tokens=15),
    dict(logit_bias=((3, 6.0), (12, -100.0)), frequency_penalty=0.9),
    dict(
        presence_penalty=-0.5,
        frequency_penalty=0.8,
        repetition_penalty=1.2,
        logit_bias=tuple((token, 5.0) for token in STOPS),
        min_new_tokens=11,
        stop_ids=STOPS,
        min_p=0.01,
        num_logprobs=4,
    ),
]


def draft_model_of(target: Target, name: str | None) -> DraftModel | None:
    """None, or a head by its name, "... sampled" for one of the sampled contract."""
    if name is None:
        return None
    draft_model = toy_draft_model(target, name.removesuffix(" sampled"))
    if name.endswith(" sampled"):
        draft_model.head.config = replace(draft_model.head.config, contract="sampled")
    return draft_model


@pytest.fixture(scope="module")
def mixed() -> tuple[Target, list[Request], dict[str, list[int]]]:
    """A target, ten requests of all settings, greedy ones and drawn ones, and their answers token by token."""
    target = toy_target(vocab=67)

    def params(i: int) -> SamplingParams:
        return SamplingParams(22, temperature=float(i % 2), seed=i, **SETTINGS[i % len(SETTINGS)])

    lengths = (62, 100, 60, 130, 50, 70, 58, 3, 62, 66)  # some outgrow their pages, some may be found in the cache
    text = 2 * list(range(60))
    prompts = [(p + text)[:length] for p, length in zip(random_prompts(10, seed=3, vocab=60), lengths, strict=True)]
    requests = requests_of(prompts, params)
    return target, requests, {r.id: brute_force(target, r.prompt_ids, r.params) for r in requests}


@pytest.mark.parametrize("head", [None, *HEADS, *SAMPLED])
def test_all_settings_in_any_company(mixed: tuple, head: str | None) -> None:
    target, requests, answers = mixed
    draft_model = draft_model_of(target, head)
    expected = reference_runs(target, draft_model, requests)
    for request in requests:
        if head not in SAMPLED or request.params.temperature == 0:
            assert sum(expected[request.id], []) == answers[request.id]

    def check(engine: Engine, some: list[Request] = requests) -> None:
        chunks = run_all(engine, some)
        for request in some:
            assert runs_of(chunks[request.id]) == expected[request.id], request.id
            check_reports(chunks[request.id], request, target)

    together = toy_engine(target, draft_model, max_running=6)
    check(together)
    cached = together.scheduler.num_cached_tokens
    check(together, requests[::-1])  # other rows, after prefix hits
    assert together.scheduler.num_cached_tokens > cached and together.scheduler.num_preemptions == 0
    for index in (4, 5):  # alone, a greedy one and a drawn one
        check(together, requests[index : index + 1])
    tight = toy_engine(target, draft_model, num_pages=5, prefix_cache=False, steps_behind=1)
    check(tight)
    assert tight.scheduler.num_preemptions > 0


def check_reports(chunks: list[TokenChunk], request: Request, target: Target) -> None:
    """Log-probabilities where they are asked for, of every token, and nowhere else."""
    num_top = request.params.num_logprobs
    if num_top is None:
        assert all(chunk.logprobs is None for chunk in chunks)
        return
    for chunk in chunks:
        assert [report.token_id for report in chunk.logprobs] == chunk.token_ids
    reports = [report for chunk in chunks for report in chunk.logprobs]
    check_logprobs(reports, target, request.prompt_ids + answer_of(chunks), num_top)


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    target = toy_target(vocab=67)
    short = SamplingParams(6, logit_bias=((5, 100.0),), stop_ids=(5,), min_new_tokens=3)
    long = SamplingParams(30, frequency_penalty=0.5)  # beside all others
    requests = requests_of(6 * [[3, 1, 4]], lambda i: long if i == 0 else (SamplingParams(7), short)[i % 2])
    chunks = run_all(toy_engine(target, None, max_running=2), requests)
    assert {id: runs_of(of_one) for id, of_one in chunks.items()} == reference_runs(target, None, requests)
    assert answer_of(chunks["1"]) == answer_of(chunks["3"]) and len(answer_of(chunks["1"])) == 4
    assert answer_of(chunks["2"]) == answer_of(chunks["4"]) and chunks["1"][-1].finish_reason == "stop"


@pytest.mark.parametrize("head", [None, "lilicorr sampled"])
def test_processed_text_has_its_law(head: str | None) -> None:
    target, draws, prompt, vocab = toy_target(vocab=8), 1200, [1, 5], 8
    settings = dict(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.7, logit_bias=((2, 1.5),))
    settings |= dict(stop_ids=(0,), min_new_tokens=3)
    requests = requests_of(draws * [prompt], lambda i: SamplingParams(3, seed=i, **settings))
    counts = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for of_one in run_all(toy_engine(target, draft_model_of(target, head), max_running=32), requests).values():
        counts[tuple(answer_of(of_one))] += 1

    def law(answer: list[int]) -> torch.Tensor:
        return next_law(model_logits(target, prompt + answer)[-1], prompt, answer, requests[0].params)

    first, second = law([]), torch.stack([law([a]) for a in range(vocab)])
    third = torch.stack([torch.stack([law([a, b]) for b in range(vocab)]) for a in range(vocab)])
    expected = draws * first[:, None, None] * second[..., None] * third
    often = expected >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    chi_square, freedom = float(((observed - expected) ** 2 / expected.clamp_min(1e-9)).sum()), len(expected) - 1
    assert freedom > 10
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def check_prompt_reports(chunks: dict[str, list[TokenChunk]], requests: list[Request], target: Target) -> None:
    """Log-probabilities of prompts in first chunks alone, and the answers of autoregression."""
    for request in requests:
        of_one, num_top = chunks[request.id], request.num_prompt_logprobs
        assert all(chunk.prompt_logprobs is None for chunk in of_one[num_top is not None :])
        if num_top is not None:
            none, *found = of_one[0].prompt_logprobs
            assert none is None and len(found) == len(request.prompt_ids) - 1
            check_logprobs(found, target, request.prompt_ids, num_top)
        assert of_one[-1].finish_reason == "length"
        if request.params.max_new_tokens == 0:
            assert [chunk.token_ids for chunk in of_one] == [[]]
        else:
            assert answer_of(of_one) == Decoder(target, None).generate(request.prompt_ids, request.params).token_ids


@pytest.mark.parametrize(("head", "steps_behind"), [(None, 1), ("argmax", 0), ("lilicorr", 1)])
def test_prompts_are_reported_on_whole(head: str | None, steps_behind: int) -> None:
    target = toy_target(vocab=67)
    long = [1 + i % 50 for i in range(129)]
    requests = [
        Request(str(i), long[:length], SamplingParams(new), num_prompt_logprobs=num_top)
        for i, (length, new, num_top) in enumerate(
            [(129, 4, None), (1, 0, 2), (1, 3, 2), (64, 0, 0), (65, 0, 1), (65, 5, 20), (128, 0, 3), (129, 4, 1)]
        )
    ]
    engine = toy_engine(target, draft_model_of(target, head), steps_behind=steps_behind, prefill_tokens=50)
    for _ in range(2):  # the second time the cache knows the prompts
        check_prompt_reports(run_all(engine, requests), requests, target)
    assert engine.scheduler.num_cached_tokens == 128 and engine.pool.num_free == 40


def test_a_prompt_that_is_prefilled_again_is_reported_on_once() -> None:
    target = toy_target(vocab=67)
    prompts = [*(4 * [[1 + i % 9 for i in range(62)]]), [1 + i % 50 for i in range(150)]]
    requests = [Request(str(i), p, SamplingParams(30), num_prompt_logprobs=1) for i, p in enumerate(prompts)]
    engine = toy_engine(target, None, num_pages=10, prefill_tokens=16, idle_prefill_tokens=64, steps_behind=1)
    written = []

    def watch(_chunks: dict) -> None:
        progress = engine._requests.get("4")
        written.append(progress.num_written if progress is not None and progress.num_answered == 0 else 0)

    check_prompt_reports(run_all(engine, requests, before_step=watch), requests, target)
    assert any(0 < before and after < before for before, after in zip(written, written[1:]) if before < 150)
    assert engine.scheduler.num_preemptions > 0


def test_the_engine_reports_what_the_reference_reports() -> None:
    target = toy_target(vocab=67)
    params = SamplingParams(12, temperature=1.0, seed=3, num_logprobs=3)
    engine, decoder = toy_engine(target, toy_draft_model(target, "lilicorr")), Decoder(target, None)
    (decoded,) = engine.generate([[3, 1]], params)
    for got, wanted in zip(decoded.logprobs, decoder.generate([3, 1], params).logprobs, strict=True):
        assert (got.token_id, [token for token, _ in got.top]) == (wanted.token_id, [token for token, _ in wanted.top])
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    assert engine.generate([[3, 1]], replace(params, num_logprobs=None))[0].logprobs is None
    request = Request("a", [3, 1, 4], SamplingParams(0), num_prompt_logprobs=2)
    (chunk,) = run_all(engine, [request])["a"]
    for got, wanted in zip(chunk.prompt_logprobs[1:], decoder.prompt_logprobs([3, 1, 4], 2)[1:], strict=True):
        assert (got.token_id, got.logprob) == (wanted.token_id, pytest.approx(wanted.logprob, abs=1e-4))


def test_reports_that_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1 without num_prompt_logprobs, got 0"):
        Request("a", [1], SamplingParams(0))
    with pytest.raises(ValueError, match=r"num_prompt_logprobs must be in \[0, 20\] or None \(off\), got 21"):
        Request("a", [1], SamplingParams(1), num_prompt_logprobs=21)
    engine = toy_engine(toy_target(), None)
    with pytest.raises(ValueError, match="logit_bias token id 12 is outside"):
        engine.check(Request("a", [1], SamplingParams(1, logit_bias=((12, 1.0),))))


def test_deterministic_answers_are_processed_and_reported_with_the_same_bits() -> None:
    target = toy_target(dtype=torch.bfloat16, vocab=67, hidden=64)
    params = [SamplingParams(12, seed=i, **SETTINGS[(1, 3, 4)[i % 3]], temperature=i % 2) for i in range(6)]
    requests = [
        Request(str(i), prompt[:90], replace(p, num_logprobs=2), num_prompt_logprobs=2)
        for i, (prompt, p) in enumerate(zip(random_prompts(6, seed=3, vocab=60), params, strict=True))
    ]
    settings = dict(deterministic=True, deterministic_width=8, max_running=4)

    def reports(chunks: list[TokenChunk]) -> tuple[list, list]:
        return chunks[0].prompt_logprobs, [report for chunk in chunks for report in chunk.logprobs]

    drafted = run_all(toy_engine(target, toy_draft_model(target, "lilicorr"), **settings), requests)
    for request in (requests[1], requests[2], requests[5]):
        alone = run_all(toy_engine(target, None, **settings), [request])[request.id]
        assert reports(drafted[request.id]) == reports(alone)
