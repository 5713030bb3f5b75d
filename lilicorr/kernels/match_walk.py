"""Lattice matching: the cosine of every out vector with the in vectors of the next slot, and the walk over them.

Place in the flow: the last step of the LiLiCorr head's proposal. The scores are Eq. (1); the walk commits a path
through them, Eq. (8) or the dynamic program of Appendix E, and says how sure the lattice was of every step.
Paper: sections 3.2 and 3.5, Appendix E.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lilicorr.blocks import full_precision, wide
from lilicorr.kernels.language import jit, next_power, tl
from lilicorr.lattice import WALKS, scores_along

KERNEL_WALKS = ("greedy", "exact")
VECTOR_BLOCK = 64  # entries of the vectors in one product


def match_scores(start: Tensor, out: Tensor, into: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Eq. (1): `scale` times the cosine of every out vector with the in vectors of the next slot; differentiable.

    start [N, E] is the anchor's out vector; out and into [N, S, K, E], of which the last slot's out vectors lead
    nowhere; a norm counts as at least `eps`. Returns anchor scores [N, K] and pair scores [N, S - 1, K, K]
    (from, to), at least fp32.
    """
    with full_precision(start):
        start, out, into = (nn.functional.normalize(wide(x), dim=-1, eps=eps) for x in (start, out, into))
        anchor_scores = scale * torch.einsum("ne,nke->nk", start, into[:, 0])
        return anchor_scores, scale * out[:, :-1] @ into[:, 1:].transpose(-1, -2)


def step_confidence(anchor_scores: Tensor, pair_scores: Tensor, ranks: Tensor) -> Tensor:
    """Softmax probability [N, S] of each chosen candidate among those that could follow the one before it."""
    followed = scores_along(anchor_scores, pair_scores, ranks)
    return followed.softmax(dim=-1).gather(-1, ranks[..., None])[..., 0]


def match_walk_reference(
    start: Tensor, out: Tensor, into: Tensor, scale: float, eps: float, walk: str = "greedy"
) -> tuple[Tensor, Tensor]:
    """The definition of `match_walk`."""
    scores = match_scores(start, out, into, scale, eps)
    ranks = WALKS[walk](*scores)
    return ranks, step_confidence(*scores, ranks)


@jit
def _scores_kernel(
    start,
    out,
    into,
    scores,
    width,
    scale,
    eps,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores [K, K] of the candidates before one slot (the anchor is candidate 0 before the first) and in it."""
    block, slot, num_slots = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ranks, entries = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    into += (block * num_slots + slot) * K * width
    num_from = K
    if slot == 0:
        before = start + block * width
        num_from = 1
    else:
        before = out + (block * num_slots + slot - 1) * K * width
    products = tl.zeros([PADDED, PADDED], tl.float32)
    out_squares, in_squares = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + entries
        places = ranks[:, None] * width + columns[None, :]
        inside = (columns < width)[None, :]
        a = tl.load(before + places, mask=inside & (ranks < num_from)[:, None], other=0.0)
        b = tl.load(into + places, mask=inside & (ranks < K)[:, None], other=0.0)
        products = tl.dot(a, tl.trans(b), products, input_precision="ieee")
        a, b = a.to(tl.float32), b.to(tl.float32)
        out_squares += tl.sum(a * a, axis=1)
        in_squares += tl.sum(b * b, axis=1)
    norms = tl.maximum(tl.sqrt(out_squares), eps)[:, None] * tl.maximum(tl.sqrt(in_squares), eps)[None, :]
    places = (block * num_slots + slot) * K * K + ranks[:, None] * K + ranks[None, :]
    tl.store(scores + places, scale * products / norms, mask=(ranks < num_from)[:, None] & (ranks < K)[None, :])


@jit
def _chosen(values, ranks, rank):
    """values [K] at `rank`."""
    return tl.sum(tl.where(ranks == rank, values, 0), axis=0)


@jit
def _walk_kernel(
    scores,
    chosen,
    confidence,
    num_slots,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The walk through one block's scores; for the exact one every candidate carries the best path that ends in it.

    Ranks from K on only fill up: a score of -inf is never the best.
    """
    block = tl.program_id(0).to(tl.int64)
    scores += block * num_slots * K * K
    ranks, slots = tl.arange(0, PADDED), tl.arange(0, SLOTS)
    square, there = ranks[:, None] * K + ranks[None, :], ranks < K
    pair_there = there[:, None] & there[None, :]
    path = tl.zeros([SLOTS], tl.int32)
    if EXACT:
        best = tl.load(scores + ranks, mask=there, other=float("-inf"))
        paths = tl.where(slots[None, :] == 0, ranks[:, None], 0)
        for slot in range(1, num_slots):
            pairs = tl.load(scores + slot * K * K + square, mask=pair_there, other=float("-inf"))
            best, previous = tl.max(best[:, None] + pairs, axis=0, return_indices=True)
            came_from = previous[:, None] == ranks[None, :]
            paths = tl.sum(tl.where(came_from[:, :, None], paths[None, :, :], 0), axis=1)
            paths = tl.where(slots[None, :] == slot, ranks[:, None], paths)
        path = tl.sum(tl.where((ranks == tl.argmax(best, axis=0))[:, None], paths, 0), axis=0)
    rank = 0
    for slot in range(num_slots):
        pairs = tl.load(
            scores + slot * K * K + square, mask=pair_there & ((slot > 0) | (ranks[:, None] == 0)), other=0.0
        )
        row = tl.where(there, tl.sum(tl.where(ranks[:, None] == rank, pairs, 0.0), axis=0), float("-inf"))
        rank = _chosen(path, slots, slot) if EXACT else tl.argmax(row, axis=0)
        rank = tl.minimum(rank, K - 1)  # of NaN the largest may be one that only fills up
        weights = tl.exp(row - tl.max(row, axis=0))
        tl.store(chosen + block * num_slots + slot, rank.to(tl.int64))
        tl.store(confidence + block * num_slots + slot, _chosen(weights, ranks, rank) / tl.sum(weights, axis=0))


def match_walk_triton(
    start: Tensor, out: Tensor, into: Tensor, scale: float, eps: float, walk: str = "greedy"
) -> tuple[Tensor, Tensor]:
    """The Triton version of `match_walk`: all scores at once, then a walk per block.

    The greedy and the exact walk have a kernel; any other goes over the same scores as in the reference.
    """
    num_blocks, num_slots, num_candidates, width = into.shape
    assert start.shape == (num_blocks, width) and out.shape == into.shape, (start.shape, out.shape, into.shape)
    start, out, into = start.contiguous(), out.contiguous(), into.contiguous()
    scores = torch.empty(num_blocks, num_slots, num_candidates, num_candidates, device=into.device)
    if num_blocks:
        padded = max(16, next_power(num_candidates))  # the least that a matrix unit takes
        _scores_kernel[(num_blocks, num_slots)](
            start, out, into, scores, width, scale, eps, num_candidates, padded, VECTOR_BLOCK
        )
    if walk not in KERNEL_WALKS:
        pair = (scores[:, 0, 0], scores[:, 1:])
        ranks = WALKS[walk](*pair)
        return ranks, step_confidence(*pair, ranks)
    ranks = torch.empty(num_blocks, num_slots, dtype=torch.int64, device=into.device)
    confidence = torch.empty(num_blocks, num_slots, device=into.device)
    if num_blocks:
        sizes = (num_slots, num_candidates, next_power(num_candidates), next_power(num_slots), walk == "exact")
        _walk_kernel[(num_blocks,)](scores, ranks, confidence, *sizes, num_warps=4 if walk == "exact" else 1)
    return ranks, confidence


def match_walk(
    start: Tensor, out: Tensor, into: Tensor, scale: float, eps: float, walk: str = "greedy"
) -> tuple[Tensor, Tensor]:
    """The walk's ranks [N, S] int64 and the confidence [N, S] of its steps; ties go to the lower rank.

    Shapes as `match_scores`; `walk` is a name of `lattice.WALKS`. Sums are at least fp32. On a GPU there is no
    gradient.
    """
    version = match_walk_triton if into.is_cuda else match_walk_reference
    return version(start, out, into, scale, eps, walk)
