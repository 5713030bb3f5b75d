"""The loss terms of drafter and head, each as a sum and a count.

Place in the flow: a head's `loss` builds its terms from these; the trainer divides by the counts of the whole
optimizer step, over all chunks, micro-batches and ranks, so that every term is an exact mean over the global
batch (Eq. 3, 5 and 13 average over the supervised slots of the batch; Eq. 6 is normalised by its weights, as
every published drafter does and as the head's weight of 0.25 presumes).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lilicorr.blocks import LossTerm, wide


def slot_weights(valid: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """exp(-(s - 1) / decay) of Eq. (6) where `valid` [N, S], else 0."""
    slots = torch.arange(valid.shape[1], device=valid.device, dtype=dtype)
    return torch.exp(-slots / decay) * valid


def acceptance_weights(label_log_probs: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights in place of the decay: how much accepted length hangs on a slot, [N, S].

    With q_s = (1 - alpha) p(label_s) + alpha, w_s = sum_{m >= s} prod_{i <= m} q_i: the part of the expected
    accepted length that slot s has a share in. No gradient flows through them, and a slot behind one without a
    label is never reached.
    """
    accepted = ((1 - alpha) * label_log_probs.detach().exp() + alpha) * valid
    return accepted.cumprod(dim=-1).flip(-1).cumsum(dim=-1).flip(-1) * valid


def weighted_mean(values: Tensor, weights: Tensor, weight: float) -> LossTerm:
    """The mean of `values` [N, S] by `weights` [N, S]; where a weight is 0 the value may be infinite."""
    return LossTerm((weights * values.masked_fill(weights == 0, 0.0)).sum(), weights.sum(), weight)


def block_cross_entropy(
    label_log_probs: Tensor, valid: Tensor, decay: float, weight: float = 1.0, dpace_alpha: float | None = None
) -> LossTerm:
    """Eq. (6): cross-entropy of every valid slot, weighted by `slot_weights`, or by D-PACE's with an alpha.

    label_log_probs [N, S], valid [N, S].
    """
    if dpace_alpha is None:
        weights = slot_weights(valid, decay, label_log_probs.dtype)
    else:
        weights = acceptance_weights(label_log_probs, valid, dpace_alpha)
    return weighted_mean(-label_log_probs, weights, weight)


def total_variation_loss(logits: Tensor, target_probs: Tensor, vocab_ids: Tensor | None) -> Tensor:
    """DSpark's L1 distance of every slot, twice the total variation, [N, S].

    logits [N, S, D] of the draft, target_probs [N, S, V].
    With `vocab_ids` [D] the draft has no mass outside them, so all of the target's mass there is distance.
    """
    law = wide(logits).softmax(dim=-1)
    if vocab_ids is None:
        return (law - target_probs).abs().sum(dim=-1)
    within = target_probs[..., vocab_ids]
    return (law - within).abs().sum(dim=-1) + (1 - within.sum(dim=-1)).clamp(min=0)


def lattice_cross_entropy(scores: Tensor, gold_rank: Tensor, supervised: Tensor, weight: float) -> LossTerm:
    """Eq. (3): cross-entropy of the ground-truth candidate among the K of its slot.

    scores [N, S, K] conditioned on the ground-truth predecessor, gold_rank [N, S], supervised [N, S].
    """
    gold = scores.log_softmax(dim=-1).gather(-1, gold_rank[..., None])[..., 0]
    return _mean_over(-gold, supervised, weight)


def distractor_penalty(
    scores: Tensor, target_logits: Tensor, gold_rank: Tensor, supervised: Tensor, weight: float
) -> LossTerm:
    """Eq. (4) and (5): expected shortfall in target log-probability of the candidate committed to.

    target_logits [N, S, K] are the target's logits of the candidates; the log-normaliser cancels in the
    difference, and no gradient flows through them.
    """
    gold = target_logits.gather(-1, gold_rank[..., None])
    shortfall = (gold - target_logits).clamp(min=0).detach()
    return _mean_over((scores.softmax(dim=-1) * shortfall).sum(dim=-1), supervised, weight)


def margin_hinge(scores: Tensor, gold_rank: Tensor, supervised: Tensor, margin: float, weight: float) -> LossTerm:
    """Eq. (13): hinge on the gap between the ground-truth candidate and its best competitor."""
    gold = scores.gather(-1, gold_rank[..., None])
    others = scores.scatter(-1, gold_rank[..., None], float("-inf"))
    gap = gold[..., 0] - others.amax(dim=-1)
    return _mean_over((margin - gap).clamp(min=0), supervised, weight)


def diagnostic(values: Tensor, chosen: Tensor) -> LossTerm:
    """A mean of `values` where `chosen`, any equal shapes, that is reported and not trained on."""
    return _mean_over(wide(values.detach()), chosen, 0.0)


def _mean_over(values: Tensor, chosen: Tensor, weight: float) -> LossTerm:
    values = wide(values)
    return LossTerm(values.masked_fill(~chosen, 0.0).sum(), chosen.sum().to(values.dtype), weight)


def total_loss(terms: dict[str, LossTerm]) -> Tensor:
    """Eq. (7): the sum of weight * sum / count; a term that counted nothing contributes zero."""
    parts = [term.weight * term.sum / term.count.clamp(min=1e-6) for term in terms.values() if term.weight]
    return torch.stack(parts).sum()
