"""Keys, sizes, ids, and bodies nobody would send: no request is answered with a 500 or harms another."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import CHAT, COMPLETIONS, EchoEngine, ask, body, make_app, refused
from fastapi.testclient import TestClient

from serve_app.guard import Limits, read_keys

KEYS = ("first key", "second")


@pytest.fixture
def guarded() -> Iterator[TestClient]:
    app, replica = make_app(EchoEngine(), limits=Limits(max_body_bytes=500, api_keys=KEYS))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
    replica.close()


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer third", "Basic second", "second", "Bearer ß"]
)
def test_without_a_key_only_health_answers(guarded: TestClient, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    for method, path in (
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/v1/models"),
        ("GET", "/"),
        ("GET", "/version"),
    ):
        response = guarded.request(method, path, headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert guarded.get("/health", headers=headers).status_code == 200


def test_every_key_of_the_file_opens(guarded: TestClient, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n first key \n\nsecond\n")
    assert read_keys(str(file)) == KEYS and read_keys(None) == ()
    for key in KEYS:
        assert guarded.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(str(file))


def test_body_size(guarded: TestClient) -> None:
    guarded.headers["authorization"] = f"Bearer {KEYS[0]}"
    content = json.dumps(body("x")).encode()
    assert guarded.post(CHAT, content=content + b" " * (500 - len(content))).status_code == 200
    too_large = content + b" " * (501 - len(content))
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        assert refused(guarded, 413, path, content=too_large)["code"] == "request_too_large"
        pieces = iter([too_large[:300], too_large[300:]])  # chunked: no length is declared
        assert refused(guarded, 413, path, content=pieces)["code"] == "request_too_large"


def test_every_answer_has_an_id(client: TestClient) -> None:
    given = {"x-request-id": "mine-1"}
    for response in (client.post(CHAT, json=body(), headers=given), client.post(CHAT, json={}, headers=given)):
        assert response.headers["x-request-id"] == "mine-1"
    made = [
        client.get(path, headers={"x-request-id": "no good\t"}).headers["x-request-id"] for path in ("/health", "/x")
    ]
    assert len(set(made)) == 2 and all(len(request_id) == 32 for request_id in made)


def test_unexpected_failure_is_a_500_that_names_the_request(
    monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("nobody thought of it")

    monkeypatch.setattr("serve_app.generation.check_fields", broken)
    response = client.post(CHAT, json=body(), headers={"x-request-id": "mine"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "mine"
    assert "mine" in response.json()["error"]["message"]
    monkeypatch.undo()
    assert ask(client)["choices"][0]["message"]["content"] == "hello there"


FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "return_token_ids", "chat_template_kwargs", "add_generation_prompt", "cache_salt", "echo",
    "continue_final_message", "add_special_tokens", "tools", "response_format", "suffix", "user", "tokens",
]  # fmt: skip
PATHS = [CHAT, COMPLETIONS, "/tokenize", "/detokenize"]


NUM_BODIES = 300


def odd_value(rng: random.Random, depth: int = 2) -> Any:
    """JSON of any kind, some of it at the edges of what fields take."""
    plain = [None, True, False, 0, 1, -1, 2, 0.5, 2**63, 2**70, -1e300, float("nan"), float("inf")]
    plain += ["", "hello", "auto", "\ud800", "漢\x00", "5"]
    kind = rng.randrange(4) if depth else 0
    if kind == 2:
        return [odd_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 3:
        keys = ["5", "type", "text", "role", "content", "include_usage", "\ud800"]
        return {rng.choice(keys): odd_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice(plain)


@pytest.mark.parametrize("path", PATHS)
def test_no_body_is_answered_with_a_500(client: TestClient, path: str) -> None:
    """Most start from a request that is right, so that it is the odd field that is tried."""
    right = {
        CHAT: body("hello", max_tokens=9),
        COMPLETIONS: {"model": "echo", "prompt": "hello", "max_tokens": 9},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [97]},
    }[path]
    rng = random.Random(path)
    statuses = []
    for _ in range(NUM_BODIES // len(PATHS)):
        fields = {rng.choice(FIELDS): odd_value(rng) for _ in range(rng.randrange(1, 4))}
        content = json.dumps({**(right if rng.random() < 0.8 else {}), **fields}).encode()
        response = client.post(path, content=content)
        statuses.append(response.status_code)
        assert response.status_code in (200, 400, 404), (content, response.text)
        if response.status_code != 200:
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}, content
        else:
            assert '"error"' not in response.text, content
    assert 200 in statuses and 400 in statuses
    assert client.get("/health").status_code == 200
