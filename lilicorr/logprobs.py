"""Log-probabilities of tokens, as a request may ask for them.

Place in the flow: both decoders take them from the target's logits beside verification; the engine hands them out in
its `TokenChunk`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lilicorr.kernels.topk_lse import topk_lse

MAX_LOGPROBS = 20  # likeliest tokens that may be asked for, and that a table's row has, or as many as there are


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability, and the likeliest tokens in its place.

    Of the target's own law: the log-softmax of its raw logits, before temperature, bias, penalties and filters (what
    vLLM reports unless told otherwise). A chosen token may therefore be missing from `top` or be behind others.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # as many (token id, log-probability) as were asked for, likeliest first, then by id


def logprob_table(logits: Tensor, token_ids: Tensor) -> Tensor:
    """What a report says of tokens: logits [..., V] and int64 ids [...] -> [..., 1 + 2 * J] float64.

    The token's log-probability, the J likeliest ids (equal ones ascending), their log-probabilities. One tensor, for
    one copy to the host.
    """
    rows = logits.flatten(0, -2)
    values, ids, lse = topk_lse(rows, min(MAX_LOGPROBS, rows.shape[-1]))
    chosen = rows.gather(-1, token_ids.flatten()[:, None])
    parts = (chosen - lse[:, None], ids, values - lse[:, None])
    return torch.cat([part.double() for part in parts], dim=-1).view(*token_ids.shape, 1 + 2 * ids.shape[1])


def read_logprobs(table: Sequence[Sequence[float]], token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The report of each of `token_ids` with its `num_top` likeliest, from the rows of a `logprob_table`."""
    report = []
    for (logprob, *rest), token_id in zip(table, token_ids, strict=True):
        width = len(rest) // 2
        top = [(int(top_id), value) for top_id, value in zip(rest[:num_top], rest[width:])]
        # logits that differ by less than a rounding have the same log-probability
        report.append(TokenLogprobs(token_id, logprob, sorted(top, key=lambda entry: (-entry[1], entry[0]))))
    return report


def check_num_logprobs(name: str, value: int | None) -> None:
    """Raise ValueError for a number that a user may not set."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise ValueError(f"{name} must be in [0, {MAX_LOGPROBS}] or None (off), got {value}")
