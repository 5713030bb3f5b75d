"""Log-probabilities in the shapes of the two APIs, and the spelling of single tokens.

Place in the flow: the routes' writers turn the log-probabilities of a `Delta` into the `logprobs` of a choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from lilicorr.logprobs import TokenLogprobs

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


def token_name(spelled: Sequence[bytes], token_id: int) -> str:
    """A token as text; where its bytes are no whole characters, `bytes:` and the bytes."""
    spelling = spelled[token_id] if token_id < len(spelled) else b""
    if not spelling:
        return f"token_id:{token_id}"
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def chat_logprobs(spelled: Sequence[bytes], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        spelling = spelled[token_id] if token_id < len(spelled) else b""
        return {"token": token_name(spelled, token_id), "logprob": max(logprob, LEAST), "bytes": list(spelling)}

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*candidate) for candidate in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a completion choice, piece by piece: text offsets go on where the last piece ended."""

    def __init__(self, table: Sequence[bytes], spelled: Sequence[bytes]) -> None:
        self._table, self._spelled = table, spelled
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def piece(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of the next tokens; an entry of None is a token that nothing stands before."""
        assert len(token_ids) == len(entries), f"{len(token_ids)} tokens, {len(entries)} log-probabilities"
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(self._table[token_id] if token_id < len(self._table) else b""))
        return {
            "tokens": [token_name(self._spelled, token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself; of two that are spelled alike the likelier one."""
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
            top.setdefault(token_name(self._spelled, token_id), max(logprob, LEAST))
        return top


def join_pieces(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of one answer as one."""
    return {key: [value for piece in pieces for value in piece[key]] for key in pieces[0]}
