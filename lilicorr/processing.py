"""Logits processing: what a request changes about the target's logits before its tokens are drawn.

Place in the flow: both decoders hold the `Processing` of their rows and hand `process`ed logits to `verify`, which
knows nothing of it: a token's law given the tokens before it is another one, and verification is exact for any law.
What slot s + 1 would follow are the tokens so far and the s drafts before it, so penalties count these drafts too. If
one of them is refused, what stands behind it is not used.

The order is vLLM's: bias, stop ids that may not be drawn yet, repetition, frequency and presence penalty; temperature
and filters come after them. A row of no settings keeps the bits of its logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lilicorr.decode import SamplingParams

MAX_LOGIT_BIAS = 300  # tokens of a request that may have one
MIN_REPETITION, MAX_REPETITION = 1e-6, 1e6  # far beyond them a logit is divided by 0, or 0 multiplied by inf, in fp32


@dataclass(frozen=True)
class Processing:
    """The settings of N rows, and what their penalties count."""

    penalties: Tensor  # [N, 3] float64: presence, frequency, repetition
    bias_ids: Tensor  # [N, J] int64, each id once but for those with a bias of 0
    biases: Tensor  # [N, J] float64
    stop_ids: Tensor  # [N, M] int64, negative ones are none
    num_unstoppable: Tensor  # [N] int64, tokens from slot 1 on that may be no stop id; below 1 none
    counts: Tensor  # [N, V] int32, how often each token stands in the answer so far
    in_prompt: Tensor  # [N, V] bool

    @classmethod
    def neutral(cls, num_rows: int, num_stop_ids: int, vocab: int, device: torch.device) -> Processing:
        """Rows that ask for nothing, with room for what any may ask for."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            penalties=zeros(3, dtype=torch.float64) + torch.tensor([0.0, 0.0, 1.0], device=device),
            bias_ids=zeros(MAX_LOGIT_BIAS),
            biases=zeros(MAX_LOGIT_BIAS, dtype=torch.float64),
            stop_ids=zeros(num_stop_ids) - 1,
            num_unstoppable=zeros(),
            counts=zeros(vocab, dtype=torch.int32),
            in_prompt=zeros(vocab, dtype=torch.bool),
        )

    def of_rows(self, rows: Tensor) -> Processing:
        """The rows [M] as a batch."""
        return Processing(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def count(self, rows: Tensor, token_ids: Tensor, num_new: Tensor) -> None:
        """The first `num_new` [M] of `token_ids` [M, Q] are now part of the answers of `rows` [M]."""
        new = torch.arange(token_ids.shape[1], device=rows.device) < num_new[:, None]
        places = rows[:, None] * self.counts.shape[1] + token_ids
        self.counts.view(-1).scatter_add_(0, places.flatten(), new.flatten().to(self.counts.dtype))
        self.num_unstoppable[rows] -= num_new


def processing_of(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    vocab: int,
    device: torch.device,
    num_stop_ids: int | None = None,
) -> Processing:
    """The row of a request that has `answer_ids` so far; M is `num_stop_ids`, or as many as there are."""
    stop_ids = torch.tensor(params.stop_ids, dtype=torch.int64)
    biases = torch.tensor(params.logit_bias, dtype=torch.float64).view(-1, 2)  # an id is exact in fp64
    row = Processing.neutral(1, len(stop_ids) if num_stop_ids is None else num_stop_ids, vocab, device)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    row.penalties[0] = torch.tensor(penalties, dtype=torch.float64)
    row.bias_ids[0, : len(biases)], row.biases[0, : len(biases)] = biases[:, 0].long(), biases[:, 1]
    row.stop_ids[0, : len(stop_ids)] = stop_ids
    row.num_unstoppable[0] = params.min_new_tokens - len(answer_ids)
    row.counts[0] = torch.bincount(torch.tensor(answer_ids, dtype=torch.int64), minlength=vocab)
    row.in_prompt[0] = torch.bincount(torch.tensor(prompt_ids, dtype=torch.int64), minlength=vocab) > 0
    return row


def process(logits: Tensor, drafts: Tensor, processing: Processing) -> Tensor:
    """The logits that tokens are drawn from: logits [N, S + 1, V] on [anchor, drafts], drafts [N, S] -> [N, S + 1, V].

    With x the biased logit of a token seen before, r, f, p the repetition, frequency and presence penalty and c its
    count in the answer: x / r where x > 0, else x * r; from that, f c + p [c > 0] is taken.
    """
    num_rows, num_queries, _ = logits.shape
    biased = _biased(logits, processing)
    counts, in_prompt = processing.counts[:, None], processing.in_prompt[:, None]
    processed = _penalised(biased, counts, in_prompt, processing.penalties)
    # the drafts' own logits again, with the drafts before each position: c grows by how many of these are the token
    ids = drafts[:, None].expand(-1, num_queries, -1)
    positions = torch.arange(num_queries, device=logits.device)
    before = positions[:-1] < positions[:, None]  # [S + 1, S]
    same = drafts[:, :, None] == drafts[:, None]
    counts = counts.expand(-1, num_queries, -1).gather(2, ids) + (same[:, None] & before[:, None]).sum(dim=-1)
    in_prompt = in_prompt.expand(-1, num_queries, -1).gather(2, ids)
    assert counts.shape == (num_rows, num_queries, num_queries - 1), (counts.shape, logits.shape)
    return processed.scatter_(2, ids, _penalised(biased.gather(2, ids), counts, in_prompt, processing.penalties))


def _biased(logits: Tensor, processing: Processing) -> Tensor:
    """Logits [N, Q, V] with their bias, -inf for stop ids that may not be drawn yet."""
    num_queries = logits.shape[1]

    def at_every_position(ids: Tensor) -> Tensor:
        return ids[:, None].expand(-1, num_queries, -1)

    biases = at_every_position(processing.biases.to(logits.dtype))
    biased = logits.scatter_add(2, at_every_position(processing.bias_ids), biases)
    unstoppable = torch.arange(num_queries, device=logits.device) < processing.num_unstoppable[:, None]
    banned = unstoppable[..., None] & (processing.stop_ids >= 0)[:, None]
    bans = torch.zeros_like(banned, dtype=logits.dtype).masked_fill(banned, -math.inf)
    return biased.scatter_add_(2, at_every_position(processing.stop_ids.clamp_min(0)), bans)


def _penalised(logits: Tensor, counts: Tensor, in_prompt: Tensor, penalties: Tensor) -> Tensor:
    """Logits [N, Q, J] of tokens with their counts, which may have one position for all."""
    presence, frequency, repetition = penalties.to(logits.dtype)[:, :, None, None].unbind(dim=1)
    in_answer = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits.where(~(in_answer | in_prompt), repeated) - frequency * counts - presence * in_answer


def check_processing(
    presence_penalty: float,
    frequency_penalty: float,
    repetition_penalty: float,
    logit_bias: tuple[tuple[int, float], ...],
) -> None:
    """Raise ValueError for a value that a user may not set."""
    for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        if not -2 <= value <= 2:
            raise ValueError(f"{name} must be in [-2, 2] (0 is off), got {value}")
    if not MIN_REPETITION <= repetition_penalty <= MAX_REPETITION:
        allowed = f"in [{MIN_REPETITION:g}, {MAX_REPETITION:g}]"
        raise ValueError(f"repetition_penalty must be {allowed} (1 is off), got {repetition_penalty}")
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} token ids, got {len(logit_bias)}")
    for token_id, bias in logit_bias:
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias must be in [-100, 100], got {bias} for token id {token_id}")
    token_ids = [token_id for token_id, _ in logit_bias]
    twice = {token_id for token_id in token_ids if token_ids.count(token_id) > 1}
    if twice:
        raise ValueError(f"logit_bias must name a token id once, got {min(twice)} more than once")
