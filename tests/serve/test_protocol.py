"""What a request may not say: every refusal is a 400 in OpenAI's shape that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes import EchoEngine, body, refused
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
    ("n", {"n": 2}),
    ("n", {"n": True}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": -1}),
    ("logit_bias", {"logit_bias": {"5": 10}}),
    ("logprobs", {"logprobs": True}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("min_p", {"min_p": 0.1}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("ignore_eos", {"ignore_eos": True}),
    ("stop_token_ids", {"stop_token_ids": [3]}),
    ("reasoning_effort", {"reasoning_effort": "low"}),
    ("made_up", {"made_up": 1}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
]


@pytest.mark.parametrize("param, fields", BAD)
def test_bad_field_is_named(client: TestClient, engine: EchoEngine, param: str, fields: dict[str, Any]) -> None:
    content = json.dumps({**body(), **fields}).encode()  # ASCII escapes: a lone surrogate travels as it is
    error = refused(client, content=content)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"] or error["code"] == "context_length_exceeded"
    assert not engine.params


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 100_000, b'{"model": NaN,}'])
def test_bad_json(client: TestClient, content: bytes) -> None:
    assert refused(client, content=content)["code"] == "invalid_json"


def test_field_name_that_is_no_unicode(client: TestClient) -> None:
    content = json.dumps(body(**{"\ud800": 1})).encode()
    assert refused(client, content=content)["code"] == "invalid_value"


def test_nan_is_no_temperature(client: TestClient) -> None:
    content = json.dumps(body(temperature=float("nan"))).encode()
    assert refused(client, content=content)["param"] == "temperature"
