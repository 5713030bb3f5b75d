"""`serve_app.encoding`: the same JSON, in lines that nobody splits and in pieces."""

from __future__ import annotations

import json

from serve_app.encoding import json_bytes, json_line, json_pieces


def test_lines_of_the_page_are_whole_too() -> None:
    assert json_line({"a": "\u2028ď\u0085"}) == '{"a":"\\u2028ď\\u0085"}'


def test_a_long_body_is_encoded_in_pieces() -> None:
    """Other threads run between two of them."""
    entries = [{"token": "ď\u2028", "top_logprobs": [{"token": "x", "logprob": -0.5}] * 20} for _ in range(200)]
    columns = {"tokens": [str(i) for i in range(2000)], "empty": [], "none": {}, "null": None}
    choices = [{"index": i, "logprobs": {"content": entries, **columns}, "text": "t"} for i in range(3)]
    body = {"id": "x", "choices": choices, "usage": {"total": 3}, "nothing": []}
    pieces = list(json_pieces(body))
    assert json.loads("".join(pieces)) == json.loads(json_bytes(body)) == body
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 8
