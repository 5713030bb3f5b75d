"""`serve_app.openapi`: the document names every route and every field, and says what the routes really take."""

from __future__ import annotations

import json
import re

from fakes import CHAT, COMPLETIONS, EchoEngine, body, make_app
from fastapi.testclient import TestClient

from serve_app.openapi import POSTS, document
from serve_app.protocol import IGNORED


def test_the_document_is_served_and_has_every_route() -> None:
    app, replica = make_app(EchoEngine())
    with TestClient(app) as client:
        found = client.get("/openapi.json").json()
        assert found == json.loads(json.dumps(document())) and found["openapi"].startswith("3.1")
        routes = {(route.path, method.lower()) for route in app.routes for method in route.methods}
        routes = {(path.replace("{name:path}", "{id}"), method) for path, method in routes}
        named = {(path, method) for path, methods in found["paths"].items() for method in methods}
        assert named == routes - {("/openapi.json", "get")}
    replica.close()


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(document())
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names and names <= document()["components"]["schemas"].keys() and "$defs" not in text


def test_every_field_is_in_it() -> None:
    schemas = document()["components"]["schemas"]
    for kind, _ in POSTS.values():
        schema = schemas[kind.__name__]
        assert schema["properties"].keys() == kind.model_fields.keys() | kind.neutral.keys() | IGNORED
        assert schema["additionalProperties"] is False
    assert schemas["ChatRequest"]["properties"]["tool_choice"] == {"enum": ["none", "auto", None]}
    assert schemas["ChatRequest"]["required"] == ["model", "messages"]


def test_the_other_spellings_of_a_field_are_in_it(client: TestClient) -> None:
    """A validator takes a string where the record has a list; the document must not say less."""
    schemas = document()["components"]["schemas"]
    kinds = {one.get("type") for one in schemas["ChatRequest"]["properties"]["stop"]["anyOf"]}
    assert kinds == {"string", "array", "null"}
    assert {one.get("type") for one in schemas["Message"]["properties"]["content"]["anyOf"]} == {"string", "array"}
    for stop in ("x", ["x"], None):
        assert client.post(CHAT, json=body(stop=stop)).status_code == 200
    for prompt in ("a", ["a"], [97], [[97]]):
        assert client.post(COMPLETIONS, json={"model": "echo", "prompt": prompt}).status_code == 200
