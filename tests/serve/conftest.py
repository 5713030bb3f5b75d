"""Fixtures: the API over a decoder that echoes, without a port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import EchoDecoder, make_app
from fastapi.testclient import TestClient


@pytest.fixture
def decoder() -> EchoDecoder:
    return EchoDecoder()


@pytest.fixture
def client(decoder: EchoDecoder) -> Iterator[TestClient]:
    app, replica = make_app(decoder)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
    replica.close()
