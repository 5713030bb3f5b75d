"""POST /tokenize and POST /detokenize: text and token ids as the endpoint itself reads them.

Place in the flow: as the routes that answer, without the engine.
"""

from __future__ import annotations

from typing import Any

from serve_app.chat_completions import render
from serve_app.completions import encode
from serve_app.detokenize import text_of
from serve_app.logprobs import token_name
from serve_app.protocol import DetokenizeRequest, TokenizeRequest
from serve_app.sampling import check_ids
from serve_app.served_model import ServedModel


def tokenize(model: ServedModel, wanted: TokenizeRequest) -> dict[str, Any]:
    """The ids of a prompt or of a conversation."""
    if wanted.messages is not None:
        token_ids = render(model, wanted.messages, wanted)
    else:
        token_ids = encode(model, wanted.prompt or "", wanted.add_special_tokens)
    names = [token_name(model.spelled_table, token_id) for token_id in token_ids] if wanted.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": names,
    }


def detokenize(model: ServedModel, wanted: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens spelled out."""
    check_ids(model, "tokens", wanted.tokens)
    return {"prompt": text_of(model.spelled_table, wanted.tokens)}
