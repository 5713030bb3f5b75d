"""Keys, sizes, ids, and bodies nobody would send: no request is answered with a 500 or harms another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import CHAT, COMPLETIONS, EchoEngine, ask, body, echo_model, make_app, refused
from fastapi import Request
from fastapi.testclient import TestClient
from odd import PATHS, odd_bodies

from serve_app.errors import ApiError
from serve_app.guard import Limits, read_body, read_keys

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


def test_behind_a_proxy_the_id_is_the_proxys_to_add() -> None:
    app, replica = make_app(EchoEngine(), limits=Limits(api_keys=KEYS, behind_proxy=True))
    with TestClient(app) as client:
        for path in ("/health", CHAT):
            assert "x-request-id" not in client.get(path, headers={"x-request-id": "mine"}).headers
    replica.close()


def test_odd_lengths() -> None:
    """As a header's bytes may be; a superscript two is a digit to Python, and no number."""

    def body_of(length: bytes) -> bytes:
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> dict[str, Any]:
            return next(messages)

        request = Request({"type": "http", "headers": [(b"content-length", length)]}, receive)
        return asyncio.run(read_body(request, 10))

    for length in (b"\xb2", b"", b"-3", b"2"):
        assert body_of(length) == b"{}"
    for length in (b"11", b"9" * 5000):
        with pytest.raises(ApiError, match="more than 10 bytes"):
            body_of(length)


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


def test_a_failure_that_asyncio_does_not_carry_still_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(echo_model().aside(next, iter(())), 10))


@pytest.mark.parametrize("path", PATHS)
def test_no_body_is_answered_with_a_500(client: TestClient, path: str) -> None:
    statuses = []
    for content in odd_bodies(path, "echo"):
        response = client.post(path, content=content)
        statuses.append(response.status_code)
        assert response.status_code in (200, 400, 404), (content, response.text)
        if response.status_code != 200:
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}, content
        else:
            assert '"error"' not in response.text, content
    assert 200 in statuses and 400 in statuses
    assert client.get("/health").status_code == 200
