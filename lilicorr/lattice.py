"""The lattice of candidates, the part of it that carries supervision, and the walks through it.

Place in the flow: a head takes `candidates` of the drafter's logits, scores neighbouring ones, and commits a
path by `greedy_walk` (Eq. 8); `oracle_prefix` says which slots a training block supervises (section 3.3);
`exact_walk` is the dynamic program of Appendix E; `lookahead_walk` is the one that prefix acceptance asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lilicorr.blocks import BlockLabels, DraftOutput, wide
from lilicorr.kernels.topk_lse import topk_lse


@dataclass(frozen=True)
class Lattice:
    """The K likeliest tokens of every slot, likeliest first."""

    token_ids: Tensor  # [N, S, K] int64, ids of the target
    log_probs: Tensor  # [N, S, K] under the drafter's whole vocabulary
    features: Tensor  # [N, S, K, 5] the drafter's confidence (Appendix A)


def log_probs_at(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probabilities [..., J] of `index` [..., J] under logits [..., D].

    Asking for labels and candidates in one call makes one pass over the vocabulary forwards and one backwards.
    """
    return wide(logits).log_softmax(dim=-1).gather(-1, index)


def top_index(logits: Tensor, num_candidates: int) -> Tensor:
    """Indices [..., K] of the largest logits, largest first; membership has no gradient."""
    return logits.detach().topk(num_candidates, dim=-1).indices


def candidates(draft: DraftOutput, num_candidates: int) -> Lattice:
    """The top `num_candidates` of every slot; equal ones by ascending id.

    Padding rows of the tables are never among them and count in the normaliser, as in training.
    """
    logits, slots = draft.logits.flatten(0, 1), draft.logits.shape[:2]
    values, index, lse = topk_lse(logits, num_candidates, draft.num_ids)
    if draft.num_ids is not None:
        lse = torch.logaddexp(lse, wide(logits[:, draft.num_ids :]).logsumexp(dim=-1))
    return build_lattice(draft.token_ids(index.unflatten(0, slots)), (values - lse[:, None]).unflatten(0, slots))


def build_lattice(token_ids: Tensor, log_probs: Tensor) -> Lattice:
    """The lattice of candidates [N, S, K], likeliest first, with the features of Appendix A.

    In the order of the published heads: log-probability, probability, gap to the slot's best log-probability,
    rank in [0, 1], and whether it is the slot's top choice. Gradients flow through the first three.
    """
    num_candidates = token_ids.shape[-1]
    ranks = torch.arange(num_candidates, device=log_probs.device, dtype=log_probs.dtype)
    features = torch.stack(
        [
            log_probs,
            log_probs.exp(),
            log_probs - log_probs[..., :1],
            (ranks / max(1, num_candidates - 1)).expand_as(log_probs),
            (ranks == 0).to(log_probs.dtype).expand_as(log_probs),
        ],
        dim=-1,
    )
    return Lattice(token_ids, log_probs, features)


def oracle_prefix(token_ids: Tensor, labels: BlockLabels) -> tuple[Tensor, Tensor]:
    """Where the ground truth stands among the candidates [N, S, K], and which slots that supervises.

    Returns gold_rank [N, S] (0 where the ground truth is no candidate) and supervised [N, S]: true on the
    leading run of slots that are valid and hold their ground truth, the oracle prefix of section 3.3.
    """
    matches = token_ids == labels.token_ids[..., None]
    covered = matches.any(dim=-1) & labels.valid
    return matches.int().argmax(dim=-1), covered.int().cumprod(dim=-1).bool()


def scores_along(anchor_scores: Tensor, pair_scores: Tensor, ranks: Tensor) -> Tensor:
    """The scores of Eq. (2) in every slot, given the candidate `ranks` [N, S] of the slot before it: [N, S, K].

    anchor_scores and pair_scores as `greedy_walk`; the last of the ranks leads nowhere.
    """
    index = ranks[:, :-1, None, None].expand(-1, -1, 1, pair_scores.shape[-1])
    return torch.cat([anchor_scores[:, None], pair_scores.gather(2, index)[:, :, 0]], dim=1)


def greedy_walk(anchor_scores: Tensor, pair_scores: Tensor) -> Tensor:
    """Eq. (8): commit each slot to the best continuation of the one before it.

    anchor_scores [N, K], pair_scores [N, S - 1, K, K] (from, to). Returns ranks [N, S]; ties go to the lower rank.
    """
    ranks = [anchor_scores.argmax(dim=-1)]
    blocks = torch.arange(anchor_scores.shape[0], device=anchor_scores.device)
    for step in range(pair_scores.shape[1]):
        ranks.append(pair_scores[blocks, step, ranks[-1]].argmax(dim=-1))
    return torch.stack(ranks, dim=-1)


def exact_walk(anchor_scores: Tensor, pair_scores: Tensor) -> Tensor:
    """The path of highest total score, Eq. (12), by the Viterbi sweep of Appendix E; shapes as `greedy_walk`."""
    best, arrived_from = anchor_scores, []
    for step in range(pair_scores.shape[1]):
        best, previous = (best[:, :, None] + pair_scores[:, step]).max(dim=1)
        arrived_from.append(previous)
    ranks = [best.argmax(dim=-1)]
    for previous in reversed(arrived_from):
        ranks.append(previous.gather(1, ranks[-1][:, None])[:, 0])
    return torch.stack(ranks[::-1], dim=-1)


def lookahead_walk(anchor_scores: Tensor, pair_scores: Tensor) -> Tensor:
    """The path of highest expected accepted length, if a candidate follows another with its softmax probability.

    That is sum_s prod_{j <= s} P(c_j | c_{j-1}) over the slots, with P of Eq. (2). A backward sweep maximises it
    exactly: W_s(c) = max over c' of P(c' | c) (1 + W_{s+1}(c')), W = 0 behind the last slot. Shapes as
    `greedy_walk`.
    """
    worth, followed_by = torch.zeros_like(anchor_scores), []
    for step in range(pair_scores.shape[1] - 1, -1, -1):
        worth, following = (pair_scores[:, step].softmax(dim=-1) * (1 + worth)[:, None]).max(dim=-1)
        followed_by.append(following)
    ranks = [(anchor_scores.softmax(dim=-1) * (1 + worth)).argmax(dim=-1)]
    for following in reversed(followed_by):
        ranks.append(following.gather(1, ranks[-1][:, None])[:, 0])
    return torch.stack(ranks, dim=-1)


WALKS = {"greedy": greedy_walk, "exact": exact_walk, "lookahead": lookahead_walk}
