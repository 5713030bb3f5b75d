"""The endpoint over the real engine, without Ray: its answers are those of decode.py, alone and in company."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from fakes import CHAT, COMPLETIONS, wait_until
from scripted import Served, scripted_endpoint

from lilicorr.config import EngineConfig
from lilicorr.decode import SamplingParams

QUESTIONS = ["What is 1 + 1?", "def add(a, b):", "ď 漢字", "", "a", "x = " * 40]
ROWS, PAGES = 3, 5  # pages for less than two of the longest answers: others have to give way


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = EngineConfig(max_running=ROWS, num_pages=PAGES)
    with scripted_endpoint(tmp_path_factory.mktemp("models"), config) as served:
        yield served


SETTINGS = [
    SamplingParams(20, stop_ids=(258,)),
    SamplingParams(20, 1e-6, stop_ids=(258,)),
    SamplingParams(20, 1.0, stop_ids=(258,)),
    SamplingParams(20, 0.8, 20, 0.95, 0, (258,)),
]


def chat_body(question: str, params: SamplingParams, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": params.max_new_tokens}
    body |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "seed": params.seed}
    return body | fields


def test_answers_are_those_of_the_reference_all_at_once(served: Served) -> None:
    """Greedy, nearly greedy and sampled requests in one batch, more than there are rows."""
    cases = [(question, params) for question in QUESTIONS for params in SETTINGS][:12]
    cases = [(question, replace(params, seed=seed)) for seed, (question, params) in enumerate(cases)]
    expected = [served.text(served.chat_prompt(question), params) for question, params in cases]
    before = served.replica.snapshot()
    with ThreadPoolExecutor(len(cases)) as pool:
        posted = [pool.submit(httpx2.post, served.url + CHAT, json=chat_body(*case), timeout=250) for case in cases]
        responses = [future.result() for future in posted]
    drafted = accepted = 0
    for (text, num_tokens), response in zip(expected, responses):
        answer = response.json()
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"]["completion_tokens"] == num_tokens
        details = answer["usage"]["completion_tokens_details"]
        accepted += details["accepted_prediction_tokens"]
        drafted += sum(details.values())
    wait_until(lambda: served.replica.snapshot().running == 0)
    after = served.replica.snapshot()
    assert after.num_drafted - before.num_drafted == drafted
    assert after.num_accepted - before.num_accepted == accepted > len(cases)
    assert after.free_pages == after.total_pages == PAGES


def test_pages_that_run_short_change_nothing(served: Served) -> None:
    params = SamplingParams(130)
    with ThreadPoolExecutor(ROWS) as pool:
        prompts = [f"{number}:" for number in range(ROWS)]
        fields = {"model": "tiny", "max_tokens": 130, "temperature": 0, "ignore_eos": True}
        bodies = [{**fields, "prompt": prompt} for prompt in prompts]
        posted = [pool.submit(httpx2.post, served.url + COMPLETIONS, json=body, timeout=250) for body in bodies]
        answers = [future.result().json() for future in posted]
    for prompt, answer in zip(prompts, answers):
        assert answer["choices"][0]["text"] == served.text([*prompt.encode()], params)[0]
    assert served.replica.snapshot().num_preemptions > 0


@pytest.mark.parametrize("num_kept", range(1, 7))
def test_stop_token_within_accepted_drafts(served: Served, num_kept: int) -> None:
    """Blocks of up to four tokens: a stop token in every place of a block ends the answer there."""
    prompt_ids = [*b"where to stop"]
    served.text(prompt_ids, SamplingParams(20, seed=77))
    answer_ids = served.head.texts[77][len(prompt_ids) :]
    body = {"model": "tiny", "prompt": prompt_ids, "max_tokens": 20, "seed": 77, "temperature": 0, "ignore_eos": True}
    body |= {"stop_token_ids": [answer_ids[num_kept]], "return_token_ids": True, "return_speculative_metrics": True}
    answer = httpx2.post(served.url + COMPLETIONS, json=body, timeout=250).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == answer_ids[: answer_ids.index(answer_ids[num_kept]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", answer_ids[num_kept])
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] + figures["num_accepted_draft_tokens"] + 1 >= len(choice["token_ids"])


def test_one_prompt_many_times_has_one_answer(served: Served) -> None:
    """And its beginning is computed once: the cached pages bring the drafter's context along."""
    prompt = "said before " * 11
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    first = httpx2.post(served.url + COMPLETIONS, json=body, timeout=250).json()
    cached = served.replica.snapshot().num_cached_tokens
    with ThreadPoolExecutor(8) as pool:
        posted = [pool.submit(httpx2.post, served.url + COMPLETIONS, json=body, timeout=250) for _ in range(8)]
        answers = [future.result().json() for future in posted]
    assert {answer["choices"][0]["text"] for answer in answers} == {first["choices"][0]["text"]}
    assert {answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for answer in answers} == {
        first["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    }
    assert served.replica.snapshot().num_cached_tokens >= cached + 8 * 128
    assert {answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in [first, *answers]} == {0, 128}


def test_answer_of_one_token_drafts_nothing(served: Served) -> None:
    before = served.replica.snapshot()
    httpx2.post(served.url + COMPLETIONS, json={"model": "tiny", "prompt": "one", "max_tokens": 1}, timeout=250)
    wait_until(lambda: served.replica.snapshot().running == 0)
    after = served.replica.snapshot()
    assert (after.num_drafts, after.num_drafted) == (before.num_drafts, before.num_drafted)
    assert after.num_tokens == before.num_tokens + 1


@pytest.mark.parametrize("prompt", ["a", "ab", [1, 2, 3, 4, 5]])
def test_short_prompts(served: Served, prompt: Any) -> None:
    answer = httpx2.post(
        served.url + COMPLETIONS,
        json={"model": "tiny", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True},
        timeout=250,
    ).json()
    prompt_ids = [*prompt.encode()] if isinstance(prompt, str) else prompt
    assert answer["choices"][0]["text"] == served.text(prompt_ids, SamplingParams(64))[0]


def test_seeds_make_answers(served: Served) -> None:
    """The same seed gives the same answer, alone and among others; without one no two answers are alike."""
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", timeout=250) as sdk:

        def texts(**fields: Any) -> list[str]:
            answer = sdk.completions.create(model="tiny", prompt="seed", max_tokens=16, temperature=1, **fields)
            return [choice.text for choice in answer.choices]

        seeded = texts(seed=5, n=4)
        assert seeded == texts(seed=5, n=4) and texts(seed=5) == seeded[:1]
        assert len(set(seeded)) == 4
        assert len({*texts(n=4), *texts()}) == 5


def test_sdk_streams_what_it_gets_whole(served: Served) -> None:
    params = SETTINGS[3]
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", timeout=250) as sdk:
        assert [model.id for model in sdk.models.list()] == ["tiny"]
        assert sdk.models.retrieve("tiny").id == "tiny"
        body = chat_body("def add(a, b):", params)
        body["extra_body"] = {"top_k": body.pop("top_k")}
        whole = sdk.chat.completions.create(**body)
        chunks = list(sdk.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
            whole.choices[0].message.content
        )
        assert chunks[-1].usage == whole.usage
        with pytest.raises(openai.BadRequestError, match="response_format"):
            sdk.chat.completions.create(**body, response_format={"type": "json_object"})
        with pytest.raises(openai.NotFoundError):
            sdk.chat.completions.create(**{**body, "model": "other"})


def test_async_sdk_and_parts(served: Served) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", timeout=250) as sdk:
            parts = [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}]
            body = chat_body("", SETTINGS[0], messages=[{"role": "user", "content": parts}])
            del body["top_k"]
            stream = await sdk.chat.completions.create(**body, stream=True)
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    expected = served.text(served.chat_prompt("def add(a, b):"), SETTINGS[0])[0]
    assert "".join(asyncio.run(run())) == expected


def test_leaving_client_frees_its_row(served: Served) -> None:
    """Three clients leave in the middle of long answers; rows and pages are free again."""
    body = chat_body("go on", SamplingParams(250), stream=True, ignore_eos=True)
    before = served.replica.snapshot()
    for _ in range(ROWS):
        with httpx2.stream("POST", served.url + CHAT, json=body, timeout=250) as response:
            lines = response.iter_lines()
            while '"content":""' not in next(lines):
                pass
    wait_until(lambda: served.replica.snapshot().num_finished.get("abort", 0) >= ROWS, timeout_s=120)
    wait_until(lambda: served.replica.snapshot().free_pages == PAGES)
    after = served.replica.snapshot()
    assert after.running == after.waiting == served.replica.num_requests == 0
    assert after.num_tokens - before.num_tokens < 250 * ROWS


def test_streams_of_which_half_are_left_leave_nothing_behind(served: Served) -> None:
    """Twenty of them, five at once: the gauge of requests in hand, which scaling down waits for, is 0 in the end."""
    before = sum(served.replica.snapshot().num_finished.values())
    body = chat_body("go on", SamplingParams(40), stream=True, ignore_eos=True)

    def read(number: int) -> None:
        with httpx2.stream("POST", served.url + CHAT, json=body, timeout=250) as response:
            for line in response.iter_lines():
                if number % 2 and '"delta"' in line:
                    return

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(read, range(20)))
    wait_until(lambda: served.replica.num_requests == 0, timeout_s=120)
    wait_until(lambda: sum(served.replica.snapshot().num_finished.values()) == before + 20)
    after = served.replica.snapshot()
    assert after.running == after.waiting == 0 and after.free_pages == PAGES


def test_answers_fit_the_page_pool(served: Served) -> None:
    """Pages for less than one context: the model card says how much, and no request waits for pages there are not."""
    assert served.model.max_model_len < 1024
    response = httpx2.post(
        served.url + COMPLETIONS,
        json={"model": "tiny", "prompt": "a", "max_tokens": served.model.max_model_len, "ignore_eos": True},
        timeout=250,
    )
    assert response.status_code == 400 and str(served.model.max_model_len) in response.json()["error"]["message"]


PROCESSED = [
    ({"frequency_penalty": 1.5, "temperature": 0}, {"frequency_penalty": 1.5}),
    (
        {"presence_penalty": -1, "repetition_penalty": 1.3, "temperature": 0},
        {"presence_penalty": -1.0, "repetition_penalty": 1.3},
    ),
    ({"min_tokens": 20, "temperature": 0}, {"min_new_tokens": 20}),
    ({"logit_bias": {"258": 30, "97": -100}, "temperature": 0}, {"logit_bias": ((258, 30.0), (97, -100.0))}),
    ({"min_p": 0.2, "seed": 4}, {"min_p": 0.2, "seed": 4, "temperature": 1.0}),
]


@pytest.mark.parametrize("fields, settings", PROCESSED)
def test_processed_answers_are_those_of_the_reference(
    served: Served, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Drafts that are right now and then, since the text is known: penalties must not count the rejected ones."""
    params = SamplingParams(30, stop_ids=(258,), **settings)
    text, num_tokens = served.text([*b"aaaa"], params)
    body = {"model": "tiny", "prompt": "aaaa", "max_tokens": 30, "seed": 0, **fields}
    answer = httpx2.post(served.url + COMPLETIONS, json=body, timeout=250).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_logprobs_are_those_of_the_reference(served: Served) -> None:
    params = SamplingParams(24, stop_ids=(258,), num_logprobs=3)
    fields = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    answer = httpx2.post(served.url + CHAT, json=chat_body("log", params, **fields), timeout=250).json()
    expected = served.decoder.generate(served.chat_prompt("log"), params)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.token_ids
    content = choice["logprobs"]["content"]
    assert len(content) == len(expected.token_ids) == answer["usage"]["completion_tokens"]
    logprobs = [entry.logprob for entry in expected.logprobs]
    assert [entry["logprob"] for entry in content] == pytest.approx(logprobs, abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihood_is_that_of_the_reference(served: Served, max_tokens: int) -> None:
    prompts = [[*b"some context and a continuation"], [*b"another"]]
    body = {"model": "tiny", "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx2.post(served.url + COMPLETIONS, json=body, timeout=250).json()
    for choice, prompt in zip(answer["choices"], prompts):
        expected = [entry.logprob for entry in served.decoder.prompt_logprobs(prompt, 1)[1:]]
        got = choice["logprobs"]["token_logprobs"]
        assert got[0] is None and len(got) == len(prompt) + max_tokens
        assert got[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.parametrize("begin", range(6))
def test_stop_string_within_accepted_drafts(served: Served, begin: int) -> None:
    """Only letters are drawn; two of them are the string, in every place of a block and over its end."""
    letters = {str(token_id): 100 for token_id in range(97, 123)}
    params = SamplingParams(20, 1.0, seed=78, logit_bias=tuple((int(key), 100.0) for key in letters))
    text, _ = served.text([*b"stop"], params)
    assert text.isalpha() and len(text) == 20
    stop = text[begin : begin + 2]
    body = {"model": "tiny", "prompt": "stop", "max_tokens": 20, "seed": 78, "logit_bias": letters, "stop": stop}
    body |= {"return_token_ids": True, "logprobs": 0, "ignore_eos": True}
    answer = httpx2.post(served.url + COMPLETIONS, json=body, timeout=250).json()
    (choice,) = answer["choices"]
    end = text.index(stop) + 2
    assert choice["text"] == text[: end - 2] and choice["stop_reason"] == stop
    assert bytes(choice["token_ids"]).decode() == "".join(choice["logprobs"]["tokens"]) == text[:end]
    assert answer["usage"]["completion_tokens"] == end
