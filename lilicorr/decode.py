"""The reference decoder: one sequence at a time on the transformers model, on any device.

Place in the flow: it defines what decoding means; the engine is held against it, and evaluation runs it.

    prefill the prompt, draw its next token            (a verification with zero slots)
    repeat: draft from the anchor -> target on [anchor, drafts] -> verify -> commit the accepted run and the
            next token, which is the new anchor -> append the drafter's context

Autoregression is the same loop with zero slots. The block anchored at position a sees the target's features
of positions before a only, so context is appended after verification, for the rows that stay. Rollback is
setting the length of the target's cache.

Paper: section 3.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lilicorr.blocks import DraftOutput, Proposal, Verdict
from lilicorr.draft_model import DraftModel
from lilicorr.logprobs import TokenLogprobs, check_num_logprobs, logprob_table, read_logprobs
from lilicorr.processing import check_processing, process, processing_of
from lilicorr.target import Target, are_broken
from lilicorr.verify import Sampling, check_sampling, verify

Observer = Callable[[DraftOutput | None, Proposal, Verdict], None]
LogprobObserver = Callable[[list[TokenLogprobs]], None]


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is decoded. Raises ValueError for values out of range."""

    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    seed: int = 0
    stop_ids: tuple[int, ...] = ()  # the answer ends with the first of these, usually `target.eos_ids`
    min_p: float = 0.0  # tokens less likely than so much of the likeliest are not drawn; 0 is off
    presence_penalty: float = 0.0  # once for a token of the answer so far; 0 is off
    frequency_penalty: float = 0.0  # as often as a token stands in the answer so far; 0 is off
    repetition_penalty: float = 1.0  # divides positive, multiplies other logits of tokens seen, prompt included; 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_new_tokens: int = 0  # no stop id is drawn before the answer has so many tokens
    num_logprobs: int | None = None  # likeliest tokens to report beside each token of the answer; None: no report

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be in [0, max_new_tokens], here {self.max_new_tokens}, got {self.min_new_tokens}"
            )
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed, self.min_p)
        check_processing(self.presence_penalty, self.frequency_penalty, self.repetition_penalty, self.logit_bias)
        check_num_logprobs("num_logprobs", self.num_logprobs)

    @property
    def filters_tokens(self) -> bool:
        """Whether some tokens are never drawn for being unlikely, at a temperature above 0."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def processes_logits(self) -> bool:
        """Whether tokens are drawn from anything but the target's own logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1) or bool(self.logit_bias) or self.min_new_tokens > 0


def check_request(target: Target, prompt_ids: list[int], params: SamplingParams, max_length: int) -> None:
    """Raise ValueError where `target` cannot serve a request within `max_length` positions."""
    vocab = target.embed.shape[0]
    if not prompt_ids:
        raise ValueError("the prompt must have at least one token")
    biased_ids = tuple(token_id for token_id, _ in params.logit_bias)
    for name, ids in (("prompt", prompt_ids), ("stop", params.stop_ids), ("logit_bias", biased_ids)):
        outside = [token_id for token_id in ids if not 0 <= token_id < vocab]
        if outside:
            raise ValueError(f"{name} token id {outside[0]} is outside the target's vocabulary of {vocab}")
    if params.min_new_tokens > 0 and len(set(params.stop_ids)) == vocab:
        raise ValueError(f"min_new_tokens is {params.min_new_tokens}, but all {vocab} token ids are stop ids")
    total = len(prompt_ids) + params.max_new_tokens
    if total > max_length:
        raise ValueError(
            f"prompt ({len(prompt_ids)} tokens) and max_new_tokens ({params.max_new_tokens}) make {total}, "
            f"more than the context of {max_length}"
        )


@dataclass(frozen=True)
class Decoded:
    """A finished answer. Its acceptance length tau is `num_block_tokens / num_blocks`.

    `num_block_tokens` counts what verified blocks added to the answer: accepted drafts and the token after
    them, without what was cut behind a stop token or the limit. The token of the prefill is in no block.
    """

    token_ids: list[int]
    finish_reason: str  # stop | length
    num_blocks: int
    num_block_tokens: int
    seconds: float  # of the whole call, prefill included
    logprobs: list[TokenLogprobs] | None = None  # of each token, where `num_logprobs` asks for them


class Decoder:
    """Decodes with a target and a draft model, or autoregressively where `draft_model` is None."""

    def __init__(self, target: Target, draft_model: DraftModel | None) -> None:
        if draft_model is not None and draft_model.spec.target_layer_ids != target.layer_ids:
            raise ValueError(
                f"the draft model reads target layers {draft_model.spec.target_layer_ids}, "
                f"the target captures {target.layer_ids}"
            )
        self.target = target
        self.draft_model = draft_model
        self.num_slots = draft_model.spec.num_slots if draft_model is not None else 0

    def generate(self, prompt_ids: list[int], params: SamplingParams, observe: Observer | None = None) -> Decoded:
        """Decode the whole answer; errors as in `stream`."""
        start = time.perf_counter()
        logprobs: list[TokenLogprobs] = []
        runs = list(self.stream(prompt_ids, params, observe, logprobs.extend))
        seconds = time.perf_counter() - start
        token_ids = [token_id for run in runs for token_id in run]
        finish_reason = "stop" if token_ids[-1] in params.stop_ids else "length"
        blocks = (len(runs) - 1, len(token_ids) - len(runs[0]))
        reported = logprobs if params.num_logprobs is not None else None
        return Decoded(token_ids, finish_reason, *blocks, seconds, reported)

    @torch.no_grad()
    def prompt_logprobs(self, prompt_ids: list[int], num_top: int) -> list[TokenLogprobs | None]:
        """Of each token of a prompt, with its `num_top` likeliest; None for the first, which follows nothing.

        Raises ValueError for prompts that `stream` refuses, and for a number that may not be asked for.
        """
        check_num_logprobs("num_top", num_top)
        check_request(self.target, prompt_ids, SamplingParams(0), self.target.max_length)
        token_ids = torch.tensor([prompt_ids], device=self.target.device)
        logits = self.target.logits(self.target.forward(token_ids).hidden[0, :-1])
        return [None, *_report(logits, prompt_ids[1:], num_top)]

    def stream(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        observe: Observer | None = None,
        observe_logprobs: LogprobObserver | None = None,
    ) -> Iterator[list[int]]:
        """Yield the answer as it is committed: the prefill's token, then one list per verified block.

        The last list is cut at a stop token, which stays, or at `max_new_tokens`. `observe` is called for every
        block before its tokens are yielded, with the draft (None in autoregression), the proposal and the
        uncut verdict; where `params.num_logprobs` asks for them, `observe_logprobs` with those of every list.

        Raises ValueError for an empty prompt, ids outside the vocabulary, an answer of no tokens or one that could
        outgrow the target's context, and a target whose logits are not finite.
        """
        check_request(self.target, prompt_ids, params, self.target.max_length)
        if params.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {params.max_new_tokens}")
        return self._runs(prompt_ids, params, observe, observe_logprobs if params.num_logprobs is not None else None)

    @torch.no_grad()
    def _runs(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        observe: Observer | None,
        observe_logprobs: LogprobObserver | None,
    ) -> Iterator[list[int]]:
        """The loop of the module's docstring."""
        room = len(prompt_ids) + params.max_new_tokens + self.num_slots
        cache = self.target.new_cache(room)
        context = self.draft_model.new_context(room) if self.draft_model is not None else None
        block = torch.tensor([prompt_ids], device=self.target.device)
        draft, proposal = None, _no_slots(self.target.device)
        position = len(prompt_ids)  # of slot 1's token: the first one that verification decides
        answer: list[int] = []
        while True:
            output = self.target.forward(block, cache)
            logits = self.target.logits(output.hidden[:, -1 - proposal.token_ids.shape[1] :])
            if are_broken(logits).any():
                raise ValueError(f"the target's logits are not finite at position {position}: broken weights or dtype")
            processed = self._processed(logits, proposal, params, prompt_ids, answer)
            verdict = verify(proposal, processed, self._sampling(params, position))
            if observe is not None and position > len(prompt_ids):
                observe(draft, proposal, verdict)
            num_accepted = int(verdict.num_accepted)
            run = [*proposal.token_ids[0, :num_accepted].tolist(), int(verdict.next_ids)]
            committed = _cut(run, params.stop_ids, params.max_new_tokens - len(answer))
            if observe_logprobs is not None:
                observe_logprobs(_report(logits[0], committed, params.num_logprobs))
            answer += committed
            yield committed
            if len(answer) == params.max_new_tokens or committed[-1] in params.stop_ids:
                return
            num_rows = block.shape[1] - proposal.token_ids.shape[1] + num_accepted
            cache.length = position + num_accepted
            position += len(run)
            if context is not None:
                self.draft_model.extend_context(context, output.features[:, :num_rows])
                draft = self.draft_model.draft(verdict.next_ids, context)
                proposal = self.draft_model.head.propose(draft, self._sampling(params, position)).trimmed()
            block = torch.cat([verdict.next_ids[:, None], proposal.token_ids], dim=1)

    def _processed(
        self, logits: Tensor, proposal: Proposal, params: SamplingParams, prompt_ids: list[int], answer: list[int]
    ) -> Tensor:
        """The logits [1, S + 1, V] that the request's tokens are drawn from."""
        if not params.processes_logits:
            return logits
        processing = processing_of(params, prompt_ids, answer, logits.shape[-1], logits.device)
        return process(logits, proposal.token_ids, processing)

    def _sampling(self, params: SamplingParams, position: int) -> Sampling:
        """The request's sampling as one row, for the token at `position`."""

        def row(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=self.target.device)

        return Sampling(
            temperature=row(params.temperature, torch.float64),
            top_k=row(params.top_k, torch.int64),
            top_p=row(params.top_p, torch.float64),
            seeds=row(params.seed, torch.int64),
            positions=row(position, torch.int64),
            any_sampled=params.temperature > 0,
            any_filtered=params.filters_tokens,
            min_p=row(params.min_p, torch.float64),
        )


def _report(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probabilities of tokens under the first rows of logits [Q, V]."""
    table = logprob_table(logits[: len(token_ids)], torch.tensor(token_ids, dtype=torch.int64, device=logits.device))
    return read_logprobs(table.tolist(), token_ids, num_top)


def _no_slots(device: torch.device) -> Proposal:
    """The proposal of autoregression."""
    return Proposal(torch.empty(1, 0, dtype=torch.int64, device=device))


def _cut(run: list[int], stop_ids: tuple[int, ...], remaining: int) -> list[int]:
    """The run up to its first stop token, which stays, and at most `remaining` tokens."""
    run = run[:remaining]
    stops = [index for index, token_id in enumerate(run) if token_id in stop_ids]
    return run[: stops[0] + 1] if stops else run
