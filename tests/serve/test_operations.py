"""`serve_app.operations` and `trial`: the state of all replicas, setting replicas with the key, trying a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import CHAT, NUM_SLOTS, UNICODE, EchoEngine, body, listening, wait_until
from fastapi.testclient import TestClient
from operated import ADMIN_KEY, FakeServe, operated_app, report

from serve_app.guard import Limits
from serve_app.operations import MAX_REPLICAS, read_admin_key
from serve_app.peers import Plain

KEY = {"x-admin-key": ADMIN_KEY.decode()}


@pytest.fixture
def serve() -> FakeServe:
    return FakeServe()


@pytest.fixture
def page(engine: EchoEngine, serve: FakeServe) -> Iterator[TestClient]:
    """The API of a replica that has another one beside it."""

    async def ask(_own: Plain) -> list[dict[str, Plain]]:
        return [{"b": report("b").plain()}]

    app, replica = operated_app(engine, serve, ask=ask)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
    replica.close()


def lines(client: TestClient, **wanted: Any) -> list[dict[str, Any]]:
    """The answer to a prompt, line by line."""
    response = client.post("/ui/try", json=wanted)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_the_state_adds_up_over_replicas(page: TestClient) -> None:
    page.post(CHAT, json=body("hello there")).raise_for_status()
    state = page.get("/ui/state").json()
    assert (state["model"], state["version"]) == ("echo", "0123")
    assert [one["name"] for one in state["replicas"]["list"]] == ["b", "own"]
    assert (state["replicas"]["running"], state["replicas"]["wanted"]) == (1, 1)  # Serve's own words
    assert state["scaling"] == {"kind": "autoscaled", "minimum": 1, "maximum": 4, "enabled": True, "reason": None}
    assert (state["requests"]["running"], state["requests"]["waiting"]) == (3, 2)
    assert state["requests"]["finished"] == {"stop": 5, "abort": 1}
    assert state["kv_usage"] == pytest.approx(6 / 20)
    totals = state["totals"]
    assert totals["tokens"] == 100 + 12 and totals["blocks"] == 30 + 3 and totals["block_tokens"] == 90 + 11
    assert totals["accepted_at"] == [28, 23, 18, 0, 0] and totals["accepted"] == 69


def test_without_serve_there_is_a_state_and_nothing_to_set(engine: EchoEngine) -> None:
    app, replica = operated_app(engine)
    with TestClient(app) as client:
        state = client.get("/ui/state").json()
        assert (state["replicas"]["running"], state["replicas"]["wanted"]) == (1, None)
        assert not state["scaling"]["enabled"] and "Ray Serve" in state["scaling"]["reason"]
        assert error(client.post("/ui/replicas", json={"replicas": 2}, headers=KEY), 503)
    replica.close()


def test_a_controller_that_does_not_answer_leaves_the_rest(page: TestClient, serve: FakeServe) -> None:
    def fail() -> dict[str, Any]:
        raise ConnectionError("it is being restarted")

    serve.details = fail
    state = page.get("/ui/state").json()
    assert state["replicas"]["running"] == 2 and state["replicas"]["wanted"] is None
    assert "it is being restarted" in state["scaling"]["reason"] and not state["scaling"]["enabled"]


def test_a_controller_that_does_not_answer_sets_nothing_now(page: TestClient, serve: FakeServe) -> None:
    def fail(_config: dict[str, Any]) -> None:
        raise RuntimeError("GetTimeoutError: it is being restarted")

    serve.deploy = fail
    response = page.post("/ui/replicas", json={"replicas": 3}, headers=KEY)
    refusal = error(response, 503)
    assert refusal["code"] == "service_unavailable" and "it is being restarted" in refusal["message"]
    assert int(response.headers["retry-after"]) > 0


def test_the_controller_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import GetTimeoutError

    from serve_app import controller

    asked: list[tuple[Any, ...]] = []

    class Actor:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *arguments: (method, *arguments))

    def get(reference: tuple[Any, ...], timeout: float) -> None:
        asked.append(reference)
        raise GetTimeoutError(f"nothing after {timeout}")

    monkeypatch.setattr(controller, "_get_global_client", lambda: SimpleNamespace(_controller=Actor()))
    monkeypatch.setattr(ray, "get", get)
    for ask in (lambda serve: serve.details(), lambda serve: serve.deploy({"applications": []}),
                lambda serve: serve.scale("a", "b", 2)):  # fmt: skip
        with pytest.raises(RuntimeError, match="GetTimeoutError: nothing after 5"):
            ask(controller.Controller())
    methods = ["get_serve_instance_details", "apply_config", "update_deployment_replicas"]
    assert [method for method, *_ in asked] == methods
    from ray.serve._private.controller import ServeController

    assert all(hasattr(ServeController, method) for method in methods)


def test_a_key_outside_of_ascii_opens(engine: EchoEngine, serve: FakeServe) -> None:
    key = "Schlüssel à la carte"  # ends a header's bytes with 0xA0 in the middle, as UTF-8
    limits = Limits(api_keys=("clé à",))
    app, replica = operated_app(engine, serve, admin_key=key.encode(), limits=limits)
    with TestClient(app) as client:
        headers = {"x-admin-key": key.encode(), "authorization": "Bearer clé à".encode()}
        assert client.post("/ui/replicas", json={"replicas": 2}, headers=headers).status_code == 202
    replica.close()


def test_replicas_are_set_with_the_key(page: TestClient, serve: FakeServe) -> None:
    response = page.post("/ui/replicas", json={"replicas": 3}, headers=KEY)
    assert response.status_code == 202 and response.json() == {"replicas": 3, "before": 1, "kind": "autoscaled"}
    assert serve.wanted == 3
    state = page.get("/ui/state").json()
    assert (state["replicas"]["running"], state["replicas"]["wanted"]) == (1, 3)
    assert state["replicas"]["states"] == {"RUNNING": 1, "STARTING": 2}
    assert (state["scaling"]["minimum"], state["scaling"]["maximum"]) == (3, 3)


@pytest.mark.parametrize("headers", [{}, {"x-admin-key": ""}, {"x-admin-key": KEY["x-admin-key"] + "x"}])
def test_not_without_the_key(page: TestClient, serve: FakeServe, headers: dict[str, str]) -> None:
    assert error(page.post("/ui/replicas", json={"replicas": 3}, headers=headers), 401)["code"] == "invalid_admin_key"
    assert page.get("/ui/replicas").status_code == 405
    assert not serve.deployed


def test_no_key_configured_means_no_control_for_any_key(engine: EchoEngine, serve: FakeServe) -> None:
    app, replica = operated_app(engine, serve, admin_key=None)
    with TestClient(app) as client:
        scaling = client.get("/ui/state").json()["scaling"]
        assert not scaling["enabled"] and "admin_key_file" in scaling["reason"]
        for headers in (KEY, {"x-admin-key": ""}, {"x-admin-key": "None"}):
            assert (
                "admin_key_file"
                in error(client.post("/ui/replicas", json={"replicas": 3}, headers=headers), 403)["message"]
            )
    replica.close()
    assert not serve.deployed


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", '{"replicas": 0}', '{"replicas": true}', '{"replicas": "3"}', '{"replicas": 2.0}',
     f'{{"replicas": {MAX_REPLICAS + 1}}}', '{"replicas": 3, "more": 1}', '{"replicas": NaN}'],
)  # fmt: skip
def test_only_a_number_of_replicas(page: TestClient, serve: FakeServe, content: str) -> None:
    assert error(page.post("/ui/replicas", content=content, headers=KEY), 400)
    assert not serve.deployed


def test_what_cannot_be_scaled_says_so(page: TestClient, serve: FakeServe) -> None:
    serve.config = {}
    assert "config file" in error(page.post("/ui/replicas", json={"replicas": 2}, headers=KEY), 409)["message"]


def test_the_keys_file(tmp_path: Path) -> None:
    assert read_admin_key(None) is None
    (tmp_path / "key").write_text("0123456789abcdef\n")
    assert read_admin_key(str(tmp_path / "key")) == b"0123456789abcdef"
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(ValueError, match="holds 5 characters.*at least 16"):
        read_admin_key(str(tmp_path / "key"))
    with pytest.raises(ValueError, match="cannot be read"):
        read_admin_key(str(tmp_path / "nothing"))


def test_a_prompt_comes_back_token_by_token_with_slots(page: TestClient) -> None:
    """The fake answers with the prompt: one token, then blocks of 4 whose first 3 are accepted drafts."""
    first, *runs, last = lines(page, prompt="hello there", max_tokens=64)
    assert first == {"slots": NUM_SLOTS}
    assert "".join(token["text"] for run in (*runs, last) for token in run["tokens"]) == "hello there"
    assert [[token["slot"] for token in run["tokens"]] for run in runs] == [[None], [0, 1, 2, None], [0, 1, 2, None]]
    assert [run["accepted"] for run in runs] == [0, 3, 3] and runs[1]["drafted"] == NUM_SLOTS
    assert last["finish_reason"] == "stop"


def test_a_character_comes_whole_with_its_last_token(page: TestClient) -> None:
    runs = lines(page, prompt=UNICODE, max_tokens=200)[1:]
    text = "".join(token["text"] for run in runs for token in run["tokens"])
    assert text == UNICODE and "\ufffd" not in text


def test_a_prompt_is_sampled_as_asked(page: TestClient, engine: EchoEngine) -> None:
    lines(page, prompt="abc", max_tokens=3, temperature=0.5)
    assert (engine.params[-1].max_new_tokens, engine.params[-1].temperature) == (3, 0.5)
    lines(page, prompt="abc", max_tokens=100_000)
    assert engine.params[-1].temperature == 0
    assert engine.params[-1].max_new_tokens == 4096 - len(engine.prompts[-1])  # the context is the limit


@pytest.mark.parametrize(
    "wanted",
    [{}, {"prompt": ""}, {"prompt": 3}, {"prompt": "a", "max_tokens": 0}, {"prompt": "a", "temperature": -1},
     {"prompt": "a", "top_p": 1}, {"prompt": "a" * 5000}],
)  # fmt: skip
def test_a_prompt_that_cannot_be_is_refused(page: TestClient, engine: EchoEngine, wanted: dict[str, Any]) -> None:
    assert error(page.post("/ui/try", json=wanted), 400)["message"]
    assert not engine.requests


def test_a_failing_prompt_ends_with_its_error(page: TestClient) -> None:
    assert "cursed" in lines(page, prompt="BOOM")[-1]["error"]["message"]


def test_a_full_replica_does_not_read_the_prompt(
    monkeypatch: pytest.MonkeyPatch, engine: EchoEngine, serve: FakeServe
) -> None:
    app, replica = operated_app(engine, serve)
    replica.max_requests = 0
    monkeypatch.setattr("serve_app.served_model.ServedModel.aside", None)
    with TestClient(app, raise_server_exceptions=False) as client:
        response = client.post("/ui/try", json={"prompt": "hello"})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(response.headers["retry-after"]) > 0
    replica.close()


def test_leaving_the_page_ends_the_decoding() -> None:
    import httpx2

    engine = EchoEngine(pace_s=0.02)
    app, replica = operated_app(engine)
    with listening(app) as url, httpx2.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", "/ui/try", json={"prompt": 2000 * "a", "max_tokens": 2000}) as response:
            next(response.iter_lines())
        wait_until(lambda: replica.snapshot().num_finished == {"abort": 1})
        assert engine.num_open == 0
    replica.close()


def test_api_keys_guard_all_but_the_page_without_data(engine: EchoEngine, serve: FakeServe) -> None:
    app, replica = operated_app(engine, serve, limits=Limits(api_keys=("open sesame",)))
    with TestClient(app) as client:
        assert client.get("/ui").status_code == 200
        key = {"authorization": "Bearer open sesame"}
        for path in ("/metrics", "/ui/state"):
            assert error(client.get(path), 401)["code"] == "invalid_api_key"
            assert client.get(path, headers=key).status_code == 200
        for path in ("/ui/try", "/ui/replicas"):
            assert error(client.post(path, json={"replicas": 2}, headers=KEY), 401)["code"] == "invalid_api_key"
        assert client.post("/ui/replicas", json={"replicas": 2}, headers=KEY | key).status_code == 202
    replica.close()


def test_a_body_beyond_all_measure_is_refused(page: TestClient) -> None:
    assert error(page.post("/ui/try", content=b"x" * (2**20 + 1)), 413)
    assert error(page.post("/ui/replicas", content=b"x" * 2000, headers=KEY), 413)


def test_the_page_is_one_file_that_needs_nothing_else(page: TestClient) -> None:
    response = page.get("/ui")
    policy = response.headers["content-security-policy"]
    assert response.headers["content-type"].startswith("text/html") and "default-src 'none'" in policy
    assert not re.findall(r"https?://", response.text)
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?!data:)", response.text)
    routes = set(re.findall(r'fetch\("([^"]+)"', response.text))
    assert routes == {"ui/state", "ui/replicas", "ui/try"}


def test_the_exchange_lives_as_long_as_the_application(engine: EchoEngine) -> None:
    told: list[Plain] = []

    async def ask(own: Plain) -> list[dict[str, Plain]]:
        told.append(own)
        return []

    app, replica = operated_app(engine, ask=ask)
    with TestClient(app):
        wait_until(lambda: bool(told))
        count = len(told)
    assert len(told) > count
    replica.close()
