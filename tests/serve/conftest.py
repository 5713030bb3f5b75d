"""Fixtures: the API over a engine that echoes, without a port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import EchoEngine, make_app
from fastapi.testclient import TestClient


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def client(engine: EchoEngine) -> Iterator[TestClient]:
    app, replica = make_app(engine)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
    replica.close()
