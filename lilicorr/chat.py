"""Conversations as token ids: the only place where a chat becomes what the target reads.

Place in the flow: regeneration, evaluation and the server all call `render_prompt`, so a conversation has
the same ids everywhere. No system prompt is added here (a template may have its own).

A user may write the text of a special token, `<|im_end|>` say. It must stay text: were it read as the token,
a user could open a system turn. Such text is taken out of the contents before the template sees them, and
put back into pieces that are tokenised without special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
FIRST_PRIVATE = 0xE000  # private-use code points: stand-ins for special-token text
LAST_PRIVATE = 0xF8FF


class ChatError(ValueError):
    """A conversation that cannot be rendered: the template refused it, or its text cannot be told from tokens."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_kwargs: dict[str, Any]
) -> list[int]:
    """Token ids of `messages` by the tokenizer's chat template, ending where the assistant's answer begins.

    `template_kwargs` go to the template (`enable_thinking`); with `add_generation_prompt` False no answer is opened,
    with `continue_final_message` besides the ids end inside the last message. Special ids appear only where the
    template wrote them. For contents without special-token text the ids are those of `apply_chat_template`.

    The tokenizer's state is switched during the call: use it from one thread at a time.

    Raises ChatError (a ValueError) if there is no template, the template refuses the messages, a content is
    no valid Unicode, or special-token text cannot be kept apart.
    """
    for message in messages:
        _check_text(message["content"])
    special = special_tokens(tokenizer)
    if not any(text in message["content"] for message in messages for text in special):
        return _encode(tokenizer, _render(tokenizer, messages, template_kwargs), plain=False)
    pattern = re.compile("|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)))
    hidden, stand_ins = _hide(messages, pattern)
    rendered = _render(tokenizer, hidden, template_kwargs)
    # The check that a piecewise reading of this template and tokenizer equals the reading of the whole.
    if _encode_pieces(tokenizer, rendered, pattern, {}) != _encode(tokenizer, rendered, plain=False):
        raise ChatError("special-token text in a message, and this tokenizer cannot encode it as plain text")
    return _encode_pieces(tokenizer, rendered, pattern, stand_ins)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The texts that a tokenizer reads as special tokens, and their ids."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: index for index, token in added if token.special and token.content}


def answer_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of an answer's ids as the next turn's history and the reader see it: special tokens left out."""
    ids = np.asarray(token_ids, dtype=np.int64)  # a list would be looked through in Python, id by id
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _check_text(content: Any) -> None:
    if not isinstance(content, str):
        raise ChatError(f"message content must be a string, got {type(content).__name__}")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ChatError(f"message content is no valid Unicode: {error.reason} at character {error.start}") from error


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_kwargs: dict[str, Any]) -> str:
    if tokenizer.chat_template is None:
        raise ChatError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template")
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, **{"add_generation_prompt": True, **template_kwargs}
        )
    except Exception as error:  # a template is a program of its own, and `template_kwargs` are its input
        raise ChatError(f"the chat template refused the messages: {error}") from error


def _hide(messages: Sequence[Message], pattern: re.Pattern[str]) -> tuple[list[Message], dict[str, str]]:
    """Replace special-token text in the contents by private characters, one for each of the texts."""
    used = {character for message in messages for character in message["content"]}
    free = (chr(code) for code in range(FIRST_PRIVATE, LAST_PRIVATE + 1) if chr(code) not in used)
    by_text: dict[str, str] = {}

    def stand_in(match: re.Match[str]) -> str:
        if match[0] not in by_text:
            character = next(free, None)
            if character is None:
                raise ChatError("special-token text in a message, and no private-use character left to stand in for it")
            by_text[match[0]] = character
        return by_text[match[0]]

    hidden = [{**message, "content": pattern.sub(stand_in, message["content"])} for message in messages]
    return hidden, {character: text for text, character in by_text.items()}


def _encode_pieces(
    tokenizer: PreTrainedTokenizerBase, rendered: str, pattern: re.Pattern[str], stand_ins: dict[str, str]
) -> list[int]:
    """Encode the template's special tokens as such and the text between them, stand-ins undone, as plain text."""
    ids: list[int] = []
    position = 0
    special = special_tokens(tokenizer)
    table = str.maketrans(stand_ins)
    for match in [*pattern.finditer(rendered), None]:
        piece = rendered[position : match.start() if match else len(rendered)].translate(table)
        plain = _encode(tokenizer, piece, plain=True) if piece else []
        if not set(plain).isdisjoint(special.values()):
            raise ChatError("special-token text in a message, and this tokenizer makes the token from plain text")
        ids += plain
        if match:
            ids.append(special[match[0]])
            position = match.end()
    return ids


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, plain: bool) -> list[int]:
    """Ids of `text` without added beginnings; `plain` reads special-token text as text."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = plain
    backend.no_truncation()
    backend.no_padding()
    # a third faster than the tokenizer's own call, which also finds every token's place in the text
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
