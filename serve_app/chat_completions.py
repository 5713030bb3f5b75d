"""POST /v1/chat/completions: conversations in, the assistant's answers out.

Place in the flow: `api` has `chat_prompts` render a request's conversation and makes a `ChatWriter` for its answers.
"""

from __future__ import annotations

from typing import Any

from lilicorr import chat
from serve_app.answer import Delta
from serve_app.errors import ApiError
from serve_app.generation import Choice, Prompt, Writer
from serve_app.logprobs import chat_logprobs
from serve_app.protocol import ChatRequest, Message, Rendering
from serve_app.served_model import ServedModel


def render(model: ServedModel, messages: list[Message], wanted: Rendering, field: str = "messages") -> list[int]:
    """Token ids of a conversation. Raises ApiError (400) that names `field` for one that the chat template refuses."""
    continued = bool(wanted.continue_final_message)
    prompted = not continued if wanted.add_generation_prompt is None else wanted.add_generation_prompt
    kwargs = model.template_kwargs | (wanted.chat_template_kwargs or {})
    kwargs |= {"add_generation_prompt": prompted, "continue_final_message": continued}
    try:
        token_ids = chat.render_prompt(model.tokenizer, [message.as_dict() for message in messages], kwargs)
    except chat.ChatError as error:
        raise ApiError(400, str(error), field, "invalid_value") from error
    if not token_ids:
        raise ApiError(400, f"{field}: the chat template makes no text of this", field, "invalid_value")
    return token_ids


def chat_prompts(model: ServedModel, wanted: ChatRequest) -> list[Prompt]:
    """The conversation as the one prompt there is."""
    return [Prompt(render(model, wanted.messages, wanted))]


class ChatWriter(Writer):
    """Chat completions and their chunks."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def envelope(self, choices: list[Choice]) -> dict[str, Any]:
        return {"prompt_token_ids": choices[0].prompt.token_ids} if self.wanted.return_token_ids else {}

    def opening(self, choice: Choice) -> dict[str, Any]:
        return self._event(choice, {"role": "assistant", "content": ""})

    def whole(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        answer = choice.answer
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        written = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas)},
            "logprobs": self._logprobs([entry for delta in deltas for entry in delta.logprobs or []]),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        return written | ({"token_ids": token_ids} if self.wanted.return_token_ids else {})

    def delta(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        written = self._event(choice, {"content": delta.text}) | {"logprobs": self._logprobs(delta.logprobs or [])}
        return written | ({"token_ids": delta.token_ids} if self.wanted.return_token_ids else {})

    def closing(self, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        return self._event(choice, {}) | {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}

    def _event(self, choice: Choice, delta: dict[str, str]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: list[Any]) -> dict[str, Any] | None:
        if self.wanted.num_logprobs is None:
            return None
        return chat_logprobs(self.model.spelled_table, entries)
