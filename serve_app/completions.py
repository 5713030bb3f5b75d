"""POST /v1/completions: prompts as text or token ids in, what follows them out.

Place in the flow: as `chat_completions`. A prompt that is text is read as other servers read it, special tokens
included: whoever sends one has applied a template already. `echo` puts the prompt before the answer, and with
`logprobs` its log-probabilities before the answer's, which is how log-likelihoods are asked for.
"""

from __future__ import annotations

from typing import Any

from serve_app.answer import Delta
from serve_app.detokenize import text_of
from serve_app.errors import ApiError
from serve_app.generation import Choice, Prompt, Writer
from serve_app.logprobs import CompletionLogprobs, join_pieces
from serve_app.protocol import CompletionRequest
from serve_app.served_model import ServedModel


def encode(model: ServedModel, text: str, add_special_tokens: bool | None) -> list[int]:
    """Token ids of a text, with the tokenizer's own beginning unless `add_special_tokens` is False."""
    encoding = model.tokenizer(text, add_special_tokens=add_special_tokens is not False, verbose=False)
    return list(encoding["input_ids"])


def completion_prompts(model: ServedModel, wanted: CompletionRequest) -> list[Prompt]:
    """The prompts, in order. Raises ApiError (400) for a text that has no tokens."""
    prompts = []
    for prompt in wanted.prompt:
        if isinstance(prompt, str):
            token_ids = encode(model, prompt, wanted.add_special_tokens)
            if not token_ids:
                raise ApiError(400, f"prompt: {prompt!r} has no tokens", "prompt", "invalid_value")
            prompts.append(Prompt(token_ids, prompt))
        else:
            table = model.spelled_table if wanted.skip_special_tokens is False else model.token_table
            prompts.append(Prompt(prompt, text_of(table, prompt)))
    return prompts


class CompletionWriter(Writer):
    """Completions; an event is one too."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    wanted: CompletionRequest

    def __init__(self, model: ServedModel, wanted: CompletionRequest) -> None:
        super().__init__(model, wanted)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if self.wanted.echo and self.wanted.num_logprobs is None:
            return self._choice(choice, choice.prompt.text)
        return None

    def whole(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        echo = choice.prompt.text if self.wanted.echo else ""
        written = self._choice(choice, echo + "".join(delta.text for delta in deltas))
        if self.wanted.num_logprobs is not None:
            written["logprobs"] = join_pieces([self._piece(choice, delta) for delta in deltas])
        if self.wanted.return_token_ids:
            written["prompt_token_ids"] = choice.prompt.token_ids
            written["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return written | self._end(choice)

    def delta(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        echo = choice.prompt.text if delta.prompt_logprobs is not None else ""
        written = self._choice(choice, echo + delta.text)
        if self.wanted.num_logprobs is not None:
            written["logprobs"] = self._piece(choice, delta)
        if self.wanted.return_token_ids:
            written |= {"prompt_token_ids": choice.prompt.token_ids} if first else {}
            written["token_ids"] = delta.token_ids
        return written

    def closing(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, "") | self._end(choice)

    def _choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}

    def _end(self, choice: Choice) -> dict[str, Any]:
        return {"finish_reason": choice.answer.finish_reason, "stop_reason": choice.answer.stop_reason}

    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The log-probabilities of a delta's tokens, behind those of the prompt where they are in it."""
        table = self.model.spelled_table if self.wanted.skip_special_tokens is False else self.model.token_table
        writer = self._logprobs.setdefault(choice.index, CompletionLogprobs(table, self.model.spelled_table))
        prompt_ids = choice.prompt.token_ids if delta.prompt_logprobs is not None else []
        entries = [*(delta.prompt_logprobs or []), *(delta.logprobs or [])]
        return writer.piece([*prompt_ids, *delta.token_ids], entries)
