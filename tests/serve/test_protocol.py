"""What a request may not say: every refusal is a 400 in OpenAI's shape that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes import COMPLETIONS, EchoEngine, body, refused
from fastapi.testclient import TestClient

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
BAD = [
    ("model", {"model": None}),
    ("model", {"model": 3}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages", {"messages": None}),
    ("messages[0]", {"messages": ["hello"]}),
    ("messages[0].role", {"messages": [{"content": "hello"}]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "hello"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
    ("messages[1].content", {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [IMAGE]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("messages[0].name", {"messages": [{"role": "user", "content": "a", "name": "bob"}]}),
    ("messages[0].tool_calls", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": "10"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": 10**6}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 10}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 5000}], "stream": True}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -2}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": 1.5}),
    ("stop", {"stop": 5}),
    ("stop[0]", {"stop": ""}),
    ("stop[1]", {"stop": ["a", 1]}),
    ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.surprise", {"stream": True, "stream_options": {"surprise": True}}),
    ("n", {"n": True}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": 9}),  # more than the replica takes at all
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("min_p", {"min_p": 1.1}),
    ("logit_bias", {"logit_bias": [5]}),
    ("logit_bias", {"logit_bias": {"five": 1}}),
    ("logit_bias", {"logit_bias": {"05": 1}}),
    ("logit_bias", {"logit_bias": {"9" * 30: 1}}),
    ("logit_bias", {"logit_bias": {str(key): 1 for key in range(301)}}),
    ("logit_bias", {"logit_bias": {"264": 1}}),
    ("logit_bias.5", {"logit_bias": {"5": 101}}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": False, "top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [264]}),
    ("stop_token_ids", {"stop_token_ids": list(range(8))}),  # the model's own end token is the ninth
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("skip_special_tokens", {"skip_special_tokens": "no"}),
    ("include_stop_str_in_output", {"include_stop_str_in_output": 0}),
    ("return_token_ids", {"return_token_ids": "x"}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("stream_options.continuous_usage_stats", {"stream": True, "stream_options": {"continuous_usage_stats": 1}}),
    ("stop[0]", {"stop": "\ud800"}),
    ("cache_salt", {"cache_salt": "\ud800"}),
    ("echo", {"echo": True}),
    ("best_of", {"best_of": 2}),
    ("prompt", {"prompt": "of the other route"}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("reasoning_effort", {"reasoning_effort": "low"}),
    ("made_up", {"made_up": 1}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
]


BAD_COMPLETIONS = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": ["a", [1]]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [1, True]}),
    ("prompt", {"prompt": [1, 2.0]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [264]}),
    ("prompt", {"prompt": [[1], [2**70]]}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("prompt", {"prompt": "\ud800"}),
    ("prompt", {"prompt": 9 * ["a"]}),  # more than the replica takes at all
    ("prompt", {"prompt": [[1] * 5000]}),
    ("prompt", {"prompt": "x" * 5000, "max_tokens": 5}),
    ("max_tokens", {"max_tokens": 4096}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 0, "echo": True}),
    ("max_completion_tokens", {"max_completion_tokens": 4}),
    ("logprobs", {"logprobs": 6}),
    ("logprobs", {"logprobs": True}),
    ("top_logprobs", {"top_logprobs": 1}),
    ("suffix", {"suffix": "end"}),
    ("best_of", {"best_of": 3}),
    ("echo", {"echo": "yes"}),
    ("messages", {"messages": []}),
]
BAD_TOKENIZING = [
    ("/tokenize", "prompt", {}),
    ("/tokenize", "prompt", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
    ("/tokenize", "prompt", {"prompt": [1]}),
    ("/tokenize", "messages", {"messages": []}),
    ("/tokenize", "temperature", {"prompt": "a", "temperature": 1}),
    ("/detokenize", "tokens", {}),
    ("/detokenize", "tokens", {"tokens": "abc"}),
    ("/detokenize", "tokens[1]", {"tokens": [1, -1]}),
    ("/detokenize", "tokens", {"tokens": [264]}),
]


@pytest.mark.parametrize("param, fields", BAD)
def test_bad_field_is_named(client: TestClient, engine: EchoEngine, param: str, fields: dict[str, Any]) -> None:
    content = json.dumps({**body(), **fields}).encode()  # ASCII escapes: a lone surrogate travels as it is
    error = refused(client, content=content)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"] or error["code"] == "context_length_exceeded"
    assert not engine.params


@pytest.mark.parametrize("param, fields", BAD_COMPLETIONS)
def test_bad_completion_field_is_named(
    client: TestClient, engine: EchoEngine, param: str, fields: dict[str, Any]
) -> None:
    content = json.dumps({"model": "echo", "prompt": "hello", **fields}).encode()
    error = refused(client, path=COMPLETIONS, content=content)
    assert error["param"] == param and param in error["message"]
    assert not engine.params


@pytest.mark.parametrize("path, param, fields", BAD_TOKENIZING)
def test_bad_field_of_tokenizing_is_named(client: TestClient, path: str, param: str, fields: dict[str, Any]) -> None:
    assert refused(client, path=path, json=fields)["param"] == param


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 100_000, b'{"model": NaN,}'])
def test_bad_json(client: TestClient, content: bytes) -> None:
    assert refused(client, content=content)["code"] == "invalid_json"


def test_field_name_that_is_no_unicode(client: TestClient) -> None:
    content = json.dumps(body(**{"\ud800": 1})).encode()
    assert refused(client, content=content)["code"] == "invalid_value"


def test_nan_is_no_temperature(client: TestClient) -> None:
    content = json.dumps(body(temperature=float("nan"))).encode()
    assert refused(client, content=content)["param"] == "temperature"
