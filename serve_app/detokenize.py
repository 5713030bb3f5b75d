"""Text of an answer while it is being decoded: whole characters only, and stop strings.

Place in the flow: `answer` pushes the token ids of every committed block into a `TextStream` and sends what
comes out. A byte-level tokenizer maps each id to bytes, and the text is those bytes as UTF-8; so nothing
has to be decoded twice, and a character that spans tokens or blocks is held back until it is complete.
The result does not depend on how the ids are cut into pushes.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lilicorr.tiny import byte_characters


def token_table(tokenizer: PreTrainedTokenizerBase, special: bool = False) -> list[bytes]:
    """The bytes of every token id; empty for ids without a token, and for special tokens unless `special`.

    Raises ValueError for a tokenizer that is not byte-level.
    """
    backend = tokenizer.backend_tokenizer
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    if [step.get("type") for step in steps] != ["ByteLevel"]:
        kinds = [step.get("type") for step in steps]
        raise ValueError(f"the endpoint needs a byte-level tokenizer (decoder ByteLevel), this one decodes by {kinds}")
    alphabet = {character: byte for byte, character in enumerate(byte_characters())}
    hidden = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special and not special}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token_id not in hidden:
            spelled = [alphabet.get(character) for character in token]
            table[token_id] = token.encode() if None in spelled else bytes(spelled)
    return table


def text_of(table: Sequence[bytes], token_ids: Sequence[int]) -> str:
    """The text of ids as a whole; bytes that are no UTF-8 become replacement characters."""
    return b"".join(table[token_id] if token_id < len(table) else b"" for token_id in token_ids).decode(
        errors="replace"
    )


@dataclass(frozen=True)
class Piece:
    """What a push adds to the answer."""

    text: str
    num_tokens: int  # of the pushed ids that belong to the answer; behind a stop string there are none
    stop: str | None = None  # the stop string that is complete; nothing may be pushed after it


class TextStream:
    """The text of one answer, pushed block by block. `stop` strings end it; `include_stop`: they are part of it.

    The first `min_tokens` tokens are text whatever they spell.
    """

    def __init__(
        self, table: Sequence[bytes], stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        assert all(stop), f"an empty stop string would stop everything: {stop}"
        self._table = table
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._num_free = min_tokens  # tokens to come in which no stop string is looked for
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded, but perhaps the beginning of a stop string

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Add ids and return the text that is now certain."""
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._held += self._utf8.decode(self._table[token_id] if token_id < len(self._table) else b"")
            certain = len(self._held)
            if self._num_free > 0:
                self._num_free -= 1
            else:
                found = self._first_stop()
                if found is not None:
                    start, stop = found
                    end = start + len(stop) if self._include_stop else start
                    return Piece(text + self._held[:end], count, stop)
                certain -= self._num_uncertain()
            text, self._held = text + self._held[:certain], self._held[certain:]
        return Piece(text, len(token_ids))

    def finish(self) -> str:
        """The text held back at the end of the answer; an incomplete character is dropped, not broken."""
        text, self._held = self._held, ""
        return text

    def _first_stop(self) -> tuple[int, str] | None:
        """Where the stop string begins that is complete first, the longest of those, and it; None without one."""
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _num_uncertain(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
