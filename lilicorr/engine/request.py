"""What goes into the engine and comes out of it, and where a request stands in between.

Place in the flow: callers make `Request`s and read `TokenChunk`s; `Progress` is the host's side of a request,
which only the scheduler and the engine change. Its device side is a row of `row.RowState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lilicorr.decode import SamplingParams
from lilicorr.logprobs import TokenLogprobs, check_num_logprobs


@dataclass(frozen=True)
class Request:
    """What one answer is decoded from. Raises ValueError for values out of range.

    An answer of no tokens (`max_new_tokens` 0) is for a request that asks for its prompt's log-probabilities.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""  # only requests of the same salt share cached pages
    num_prompt_logprobs: int | None = None  # likeliest tokens to report beside each of the prompt; None: no report

    def __post_init__(self) -> None:
        check_num_logprobs("num_prompt_logprobs", self.num_prompt_logprobs)
        if self.params.max_new_tokens < 1 and self.num_prompt_logprobs is None:
            raise ValueError(
                f"max_new_tokens must be at least 1 without num_prompt_logprobs, got {self.params.max_new_tokens}"
            )


@dataclass(frozen=True)
class TokenChunk:
    """Tokens committed for a request, usually one block; the last chunk has a finish reason or an error."""

    request_id: str
    token_ids: list[int]
    num_drafted: int = 0  # drafts of the block that were put to the test
    num_accepted: int = 0  # of those, how many begin `token_ids`
    finish_reason: str | None = None  # stop | length
    error: str | None = None  # the request failed; no more chunks follow
    logprobs: list[TokenLogprobs] | None = None  # of each of `token_ids`, where `num_logprobs` asks for them
    # in the first chunk of a request with `num_prompt_logprobs`: of each of the prompt's tokens, None for the first
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached: int = 0  # in the first chunk: tokens of the prompt that the prefix cache knew

    @property
    def last(self) -> bool:
        """Whether no more chunks follow."""
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class Progress:
    """Where a request stands, as far as the host has seen."""

    request: Request
    arrival: int  # in order of submission
    token_ids: list[int]  # prompt and answer
    num_written: int = 0  # positions whose keys and values are written, or will be by steps in flight
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the full pages of `token_ids`, for the prefix cache
    num_registered: int = 0  # pages whose content the prefix cache knows
    num_cached: int = 0  # positions that the prefix cache knew when the request got its row
    num_in_flight: int = 0  # steps that may commit tokens the host has not seen
    num_blocks: int = 0
    num_block_tokens: int = 0  # see `decode.Decoded`
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # of the prompt's pieces so far
    finished: bool = False

    @property
    def num_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def answer_ids(self) -> list[int]:
        """The answer so far."""
        return self.token_ids[len(self.request.prompt_ids) :]

    @property
    def reports_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are asked for and not handed out."""
        return self.request.num_prompt_logprobs is not None and self.num_answered == 0

    @property
    def num_to_prefill(self) -> int:
        """Positions to fill before decoding: the prompt, or after a preemption all but the anchor."""
        return len(self.token_ids) - (self.num_answered > 0)

    @property
    def max_length(self) -> int:
        """Positions of the longest answer, with its prompt; one of no tokens has the room of one."""
        return len(self.request.prompt_ids) + max(1, self.request.params.max_new_tokens)
