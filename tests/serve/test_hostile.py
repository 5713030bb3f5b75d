"""Bodies nobody would send, against the real engine: none ends its thread, none is answered with a 500 or never."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fakes import CHAT, COMPLETIONS, chat_tokenizer, listening
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import save_random_checkpoint
from odd import PATHS, edge_bodies, odd_bodies, right_body
from schemas import ANY, values

from lilicorr.chat import FIRST_PRIVATE, LAST_PRIVATE
from lilicorr.tiny import tiny_target_folder
from serve_app.api import build_api
from serve_app.args import AppArgs
from serve_app.openapi import POSTS, document
from serve_app.protocol import CompletionRequest
from serve_app.replica import Replica
from serve_app.sampling import sampling_params
from serve_app.served_model import open_model

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
TIMEOUT_S = 60.0  # a request that never ends is a failure


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target_folder(folder / "target")
    save_random_checkpoint(folder / "checkpoint", target, seed=0)
    args = AppArgs(
        checkpoint=str(folder / "checkpoint"),
        target=str(target),
        model_name="tiny",
        max_model_len=80,
        engine={"max_running": 4, "num_pages": 12},
    )
    model, engine = open_model(args)
    replica = Replica(engine, args.max_requests, args.stall_s)
    with listening(build_api(model, replica)) as url, httpx2.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client
        replica.check()
    replica.close()


@pytest.mark.parametrize("path", PATHS)
def test_no_odd_body_harms_the_engine(client: httpx2.Client, path: str) -> None:
    for content in odd_bodies(path, "tiny"):
        response = client.post(path, content=content)
        assert response.status_code in (200, 400, 404), (content, response.text)
        assert client.get("/health").status_code == 200, content
    assert client.post(path, json=right_body(path, "tiny")).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_number_harms_the_engine(client: httpx2.Client, path: str) -> None:
    for content in edge_bodies(path, "tiny"):
        response = client.post(path, content=content)
        assert response.status_code in (200, 400), (content, response.text)
    assert client.get("/health").status_code == 200
    assert client.post(path, json=right_body(path, "tiny")).status_code == 200


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any], bool]:
    """A path, a body as the document allows it, and whether one field holds something else instead."""
    path = draw(st.sampled_from(sorted(POSTS)))
    wanted = draw(values({"$ref": POSTS[path][0].__name__}, SCHEMAS))
    if draw(st.integers(0, 7)):
        wanted["model"] = "tiny"
    odd = draw(st.integers(0, 3)) == 0
    if odd:
        wanted[draw(st.sampled_from(sorted(SCHEMAS[POSTS[path][0].__name__]["properties"])))] = draw(ANY)
    return path, wanted, odd


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_what_the_document_allows_is_answered_as_it_says(
    client: httpx2.Client, request: tuple[str, dict[str, Any], bool]
) -> None:
    path, wanted, odd = request
    response = client.post(path, content=json.dumps(wanted).encode())
    assert response.status_code in (200, 400, 404), response.text
    assert str(response.status_code) in DOCUMENT["paths"][path]["post"]["responses"]
    if response.status_code == 200:
        assert "internal_error" not in response.text
    elif not odd:
        code = response.json()["error"]["code"]
        assert code not in ("unknown_parameter", "missing_required_parameter", "invalid_json", "unsupported_parameter")
    assert client.get("/health").status_code == 200


def test_a_top_k_beyond_the_vocabulary_is_all_of_it(client: httpx2.Client) -> None:
    body = right_body(COMPLETIONS, "tiny") | {"seed": 5}
    texts = {
        client.post(COMPLETIONS, json=body | {"top_k": top_k}).json()["choices"][0]["text"] for top_k in (0, 2**70)
    }
    assert len(texts) == 1


def test_the_engine_gets_a_top_k_that_it_can_hold() -> None:
    model = SimpleNamespace(num_rows=300, max_model_len=100, stop_ids=())
    wanted = CompletionRequest(model="m", prompt="a", top_k=2**70)
    assert sampling_params(model, wanted, 1, 0).top_k == 300


def test_a_message_of_all_private_characters_is_answered(client: httpx2.Client) -> None:
    """There is no character left to stand in for the text of a special token."""
    special = next(iter(chat_tokenizer().all_special_tokens))
    text = special + "".join(map(chr, range(FIRST_PRIVATE, LAST_PRIVATE + 1)))
    response = client.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": text}]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
    assert "no private-use character" in response.json()["error"]["message"]
