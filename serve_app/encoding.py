"""JSON as it leaves the endpoint: lines that no client splits, and large bodies in pieces.

Place in the flow: `generation` and `trial` write events and lines by `json_line`, whole responses by `json_bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# What some clients take for the end of a line, and JSON leaves as it is: next line, line and paragraph separator.
SEPARATORS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
PIECE = 64  # elements of a list that are encoded at a time
DEPTH = 4  # of a body: the response, its choices, a choice, its log-probabilities


def json_line(data: Any) -> str:
    """JSON in one line, whichever characters end one: as such they can only stand inside of strings."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        for separator, escaped in SEPARATORS.items():
            text = text.replace(separator, escaped)
    return text


def json_bytes(data: Any) -> bytes:
    """JSON of a whole response."""
    return "".join(json_pieces(data)).encode()


def json_pieces(data: Any, depth: int = DEPTH) -> Iterator[str]:
    """JSON of a whole response, in pieces: while the encoder writes one, no other thread runs.

    The log-probabilities of an answer are millions of values, and the streams of others must not wait for all of them.
    """
    if isinstance(data, dict) and data and depth:
        for index, (key, value) in enumerate(data.items()):
            yield ("," if index else "{") + json_line(key) + ":"
            yield from json_pieces(value, depth - 1)
        yield "}"
    elif isinstance(data, list) and data and depth and isinstance(data[0], dict):
        for index, value in enumerate(data):
            yield "," if index else "["
            yield from json_pieces(value, depth - 1)
        yield "]"
    elif isinstance(data, list) and len(data) > PIECE:
        for start in range(0, len(data), PIECE):
            yield ("," if start else "[") + json_line(data[start : start + PIECE])[1:-1]
        yield "]"
    else:
        yield json_line(data)
