"""Lattice matching: the cosine of every out vector with the in vectors of the next slot, and the walk over them.

Place in the flow: the last step of the LiLiCorr head's proposal. The scores are Eq. (1); the walk commits a path
through them, Eq. (8) or the dynamic program of Appendix E, and says how sure the lattice was of every step, which
is what the engine trims the verified length by. Paper: sections 3.2 and 3.5, Appendix E.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lilicorr.blocks import wide
from lilicorr.lattice import WALKS


def match_scores(start: Tensor, out: Tensor, into: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Eq. (1): `scale` times the cosine of every out vector with the in vectors of the next slot; differentiable.

    start [N, E] is the anchor's out vector; out and into [N, S, K, E], of which the last slot's out vectors lead
    nowhere; a norm counts as at least `eps`. Returns anchor scores [N, K] and pair scores [N, S - 1, K, K]
    (from, to), at least fp32.
    """
    start, out, into = (nn.functional.normalize(wide(x), dim=-1, eps=eps) for x in (start, out, into))
    anchor_scores = scale * torch.einsum("ne,nke->nk", start, into[:, 0])
    return anchor_scores, scale * out[:, :-1] @ into[:, 1:].transpose(-1, -2)


def step_confidence(anchor_scores: Tensor, pair_scores: Tensor, ranks: Tensor) -> Tensor:
    """Softmax probability [N, S] of each chosen candidate among those that could follow the one before it."""
    index = ranks[:, :-1, None, None].expand(-1, -1, 1, pair_scores.shape[-1])
    followed = torch.cat([anchor_scores[:, None], pair_scores.gather(2, index)[:, :, 0]], dim=1)
    return followed.softmax(dim=-1).gather(-1, ranks[..., None])[..., 0]


def match_walk_reference(
    start: Tensor, out: Tensor, into: Tensor, scale: float, eps: float, walk: str = "greedy"
) -> tuple[Tensor, Tensor]:
    """The definition of `match_walk`."""
    scores = match_scores(start, out, into, scale, eps)
    ranks = WALKS[walk](*scores)
    return ranks, step_confidence(*scores, ranks)


def match_walk(
    start: Tensor, out: Tensor, into: Tensor, scale: float, eps: float, walk: str = "greedy"
) -> tuple[Tensor, Tensor]:
    """The walk's ranks [N, S] int64 and the confidence [N, S] of its steps; ties go to the lower rank.

    Shapes as `match_scores`; `walk` is a name of `lattice.WALKS`. Sums are at least fp32. On a GPU there is no
    gradient.
    """
    return match_walk_reference(start, out, into, scale, eps, walk)
