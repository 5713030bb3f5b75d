"""/v1/completions, /tokenize and /detokenize over an engine that echoes: prompts of every kind, echo, logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import COMPLETIONS, END, UNICODE, EchoEngine, complete, events, refused
from fastapi.testclient import TestClient

PROMPT = "one two"  # seven tokens


def test_text_and_its_ids_are_one_prompt(client: TestClient, engine: EchoEngine) -> None:
    answers = [complete(client, prompt, max_tokens=20) for prompt in (PROMPT, list(PROMPT.encode()), [PROMPT])]
    assert answers[0]["object"] == "text_completion" and answers[0]["id"].startswith("cmpl-")
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    (choice,) = answers[0]["choices"]
    assert (choice["text"], choice["index"], choice["finish_reason"], choice["logprobs"]) == (PROMPT, 0, "stop", None)
    assert answers[0]["usage"]["prompt_tokens"] == 7 and answers[0]["usage"]["completion_tokens"] == 8
    assert engine.prompts == 3 * [list(PROMPT.encode())]


@pytest.mark.parametrize("prompts", [["first", "2nd", "three"], [[*b"first"], [*b"2nd"], [*b"three"]]])
def test_list_of_prompts(client: TestClient, prompts: list[Any]) -> None:
    answer = complete(client, prompts, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["first", "first", "2nd", "2nd", "three", "three"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 13 and answer["usage"]["completion_tokens"] == 2 * 16
    parsed = events(client, COMPLETIONS, {"model": "echo", "prompt": prompts, "n": 2})
    texts = 6 * [""]
    for event in parsed:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert sum(event["choices"][0]["finish_reason"] == "stop" for event in parsed) == 6


def test_default_limit_is_that_of_the_api(client: TestClient) -> None:
    assert complete(client, "x" * 100)["usage"]["completion_tokens"] == 16
    assert complete(client, [1] * 4090)["usage"]["completion_tokens"] == 6  # what the context leaves


def test_special_tokens_of_a_text_prompt_are_special(client: TestClient, engine: EchoEngine) -> None:
    complete(client, "a<|im_end|>b", ignore_eos=True)
    assert engine.prompts == [[97, END, 98]]


@pytest.mark.parametrize("streamed", [False, True])
def test_echo(client: TestClient, streamed: bool) -> None:
    request = {"model": "echo", "prompt": PROMPT, "echo": True, "max_tokens": 3}
    if streamed:
        text = "".join(event["choices"][0]["text"] for event in events(client, COMPLETIONS, request))
    else:
        answer = complete(client, PROMPT, echo=True, max_tokens=3)
        assert answer["usage"]["completion_tokens"] == 3
        text = answer["choices"][0]["text"]
    assert text == PROMPT + "one"


def test_echo_of_token_ids_is_their_text(client: TestClient) -> None:
    assert complete(client, [*UNICODE.encode()], echo=True, max_tokens=1)["choices"][0]["text"] == UNICODE
    ids = [97, END, 98]
    assert complete(client, ids, echo=True, max_tokens=1)["choices"][0]["text"] == "aba"
    shown = complete(client, ids, echo=True, max_tokens=1, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "a<|im_end|>ba"


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_log_likelihoods_of_a_prompt(client: TestClient, max_tokens: int) -> None:
    """What evaluation harnesses send: token lists, echo, one log-probability, nothing or a token of an answer."""
    prompts = [[*b"one two"], [*b"ab"]]
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    answer = complete(client, prompts, **fields)
    for choice, prompt in zip(answer["choices"], prompts):
        logprobs = choice["logprobs"]
        answered = [*prompt, END][:max_tokens]
        assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(prompt) + len(answered)
        assert logprobs["token_logprobs"][: len(prompt)] == [None, *(-token_id / 1000 for token_id in prompt[1:])]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1] == {chr(prompt[1]): -prompt[1] / 1000}
        assert "".join(logprobs["tokens"]).removesuffix("<|im_end|>") == choice["text"]
        ends = [len(choice["text"])] if END in answered else []
        assert logprobs["text_offset"] == [*range(len(choice["text"])), *ends]
    assert answer["usage"]["completion_tokens"] == sum(min(max_tokens, len(prompt) + 1) for prompt in prompts)
    parsed = events(client, COMPLETIONS, {"model": "echo", "prompt": prompts, **fields})
    for choice in answer["choices"]:
        pieces = [event["choices"][0] for event in parsed if event["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in (piece["logprobs"] or {}).get(key, [])] == values


def test_tokens_that_are_no_characters_have_names_of_their_own(client: TestClient) -> None:
    (choice,) = complete(client, [*"漢".encode()], logprobs=2, max_tokens=4)["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1]
    assert choice["logprobs"]["token_logprobs"][-1] == -9999.0  # minus infinity is no JSON
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2, 2, 2, 2]


def test_prompt_token_ids_are_returned(client: TestClient) -> None:
    (choice,) = complete(client, PROMPT, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == [*PROMPT.encode()]
    assert choice["token_ids"] == [*PROMPT.encode(), END]
    parsed = events(client, COMPLETIONS, {"model": "echo", "prompt": PROMPT, "return_token_ids": True})
    assert parsed[0]["choices"][0]["prompt_token_ids"] == [*PROMPT.encode()]
    assert not any("prompt_token_ids" in event["choices"][0] for event in parsed[1:])
    pieces = [event["choices"][0].get("token_ids", []) for event in parsed]
    assert [token_id for piece in pieces for token_id in piece] == choice["token_ids"]


def test_unknown_model_is_404(client: TestClient) -> None:
    for path, fields in (
        (COMPLETIONS, {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": []}),
    ):
        assert refused(client, 404, path, json={"model": "gpt-4", **fields})["code"] == "model_not_found"


def test_tokenize_and_back(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": f"{UNICODE}<|im_end|>", "return_token_strs": True}).json()
    assert answer["tokens"] == [*UNICODE.encode(), END] and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096 and answer["token_strs"][-1] == "<|im_end|>"
    text = client.post("/detokenize", json={"model": "echo", "tokens": answer["tokens"]}).json()["prompt"]
    assert text == f"{UNICODE}<|im_end|>"
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_tokenize_renders_as_the_chat_route_does(client: TestClient, engine: EchoEngine) -> None:
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    client.post("/v1/chat/completions", json={"model": "echo", "messages": messages})
    assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == engine.prompts[0]
    unprompted = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert unprompted["tokens"] == engine.prompts[0][: unprompted["count"]] and unprompted["tokens"][-2] == END
