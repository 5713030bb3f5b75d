"""The nodes of the lattice: what the LiLiCorr head attends over, one for every candidate of every slot.

Place in the flow: the LiLiCorr head builds its nodes from candidates, the drafter's states and a small network over
the confidence features of `lattice.build_lattice`. Paper: section 3.2 and Appendix A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lilicorr.kernels.language import ceil_div, jit, next_power, tl
from lilicorr.lattice import Lattice

NUM_FEATURES = 5
COLUMNS = 256  # of the nodes, for one program


@dataclass(frozen=True)
class NodeWeights:
    """The parameters of the node build; W is the head's width, LayerNorm and two linear layers the feature network."""

    norm_weight: Tensor  # [5]
    norm_bias: Tensor  # [5]
    norm_eps: float
    up_weight: Tensor  # [W, 5]
    up_bias: Tensor  # [W]
    down_weight: Tensor  # [W, W]
    down_bias: Tensor  # [W]
    slot_embedding: Tensor  # [S or more, W]
    rank_embedding: Tensor  # [K, W]


NodeBuild = Callable[[Lattice, Tensor, Tensor, Tensor, NodeWeights], Tensor]  # `build_nodes` and its versions


def build_nodes_reference(
    lattice: Lattice, table: Tensor, table_rows: Tensor, slot_terms: Tensor, weights: NodeWeights
) -> Tensor:
    """The definition of `build_nodes`; differentiable."""
    norm = ((NUM_FEATURES,), weights.norm_weight, weights.norm_bias, weights.norm_eps)
    normed = nn.functional.layer_norm(lattice.features.to(weights.norm_weight.dtype), *norm)
    hidden = nn.functional.silu(nn.functional.linear(normed, weights.up_weight, weights.up_bias))
    nodes = nn.functional.embedding(table_rows, table) + slot_terms[:, :, None]
    nodes = nodes + nn.functional.linear(hidden, weights.down_weight, weights.down_bias)
    return nodes + weights.slot_embedding[: nodes.shape[1], None] + weights.rank_embedding


@jit
def _node_kernel(
    log_probs,
    table,
    table_rows,
    slot_terms,
    norm_weight,
    norm_bias,
    up_weight,
    up_bias,
    down_bias,
    slot_embedding,
    rank_embedding,
    terms,
    hidden,
    norm_eps,
    num_slots,
    width,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of one slot's candidates: the terms that need no matrix, summed, and the feature network before its last one."""
    place, slot = tl.program_id(0).to(tl.int64), tl.program_id(0) % num_slots
    ranks, columns = tl.arange(0, PADDED), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, inside = ranks < K, columns < width
    both = real[:, None] & inside[None, :]
    log_prob = tl.load(log_probs + place * K + ranks, mask=real, other=0.0).to(tl.float32)
    prob = tl.exp(log_prob)
    gap = log_prob - tl.load(log_probs + place * K).to(tl.float32)
    rank = ranks.to(tl.float32) / (K - 1 if K > 1 else 1)
    is_top = tl.where(ranks == 0, 1.0, 0.0)
    mean = (log_prob + prob + gap + rank + is_top) / 5
    log_prob, prob, gap, rank, is_top = log_prob - mean, prob - mean, gap - mean, rank - mean, is_top - mean
    squares = log_prob * log_prob + prob * prob + gap * gap + rank * rank + is_top * is_top
    scale = tl.rsqrt(squares / 5 + norm_eps)
    up = tl.zeros([PADDED, COLUMNS], tl.float32)
    up += tl.load(up_bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    for index in tl.static_range(5):
        feature = log_prob
        if index == 1:
            feature = prob
        elif index == 2:
            feature = gap
        elif index == 3:
            feature = rank
        elif index == 4:
            feature = is_top
        weight = tl.load(norm_weight + index).to(tl.float32)
        normed = feature * scale * weight + tl.load(norm_bias + index).to(tl.float32)
        rows = tl.load(up_weight + columns * 5 + index, mask=inside, other=0.0).to(tl.float32)
        up += normed[:, None] * rows[None, :]
    outputs = (place * K + ranks[:, None]) * width + columns[None, :]
    tl.store(hidden + outputs, up / (1 + tl.exp(-up)), mask=both)
    token = tl.load(table_rows + place * K + ranks, mask=real, other=0)
    total = tl.load(table + token[:, None] * width + columns[None, :], mask=both, other=0.0).to(tl.float32)
    total += tl.load(rank_embedding + ranks[:, None] * width + columns[None, :], mask=both, other=0.0).to(tl.float32)
    shared = tl.load(slot_terms + place * width + columns, mask=inside, other=0.0).to(tl.float32)
    shared += tl.load(slot_embedding + slot * width + columns, mask=inside, other=0.0).to(tl.float32)
    shared += tl.load(down_bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(terms + outputs, total + shared[None, :], mask=both)


def build_nodes_triton(
    lattice: Lattice, table: Tensor, table_rows: Tensor, slot_terms: Tensor, weights: NodeWeights
) -> Tensor:
    """The Triton version of `build_nodes`: one kernel and one matrix product that adds to its result."""
    num_blocks, num_slots, num_candidates = lattice.log_probs.shape
    width = slot_terms.shape[-1]
    assert table.shape[1] == width and table_rows.shape == lattice.log_probs.shape, (table.shape, table_rows.shape)
    terms = slot_terms.new_empty(num_blocks * num_slots * num_candidates, width)
    if not len(terms):
        return terms.view(num_blocks, num_slots, num_candidates, width)
    hidden = torch.empty_like(terms)
    inputs = (lattice.log_probs, table, table_rows, slot_terms, weights.norm_weight, weights.norm_bias)
    parameters = (weights.up_weight, weights.up_bias, weights.down_bias, weights.slot_embedding, weights.rank_embedding)
    sizes = (weights.norm_eps, num_slots, width, num_candidates, next_power(num_candidates), COLUMNS)
    _node_kernel[(num_blocks * num_slots, ceil_div(width, COLUMNS))](
        *(x.contiguous() for x in inputs + parameters), terms, hidden, *sizes
    )
    nodes = torch.addmm(terms, hidden, weights.down_weight.T)
    return nodes.view(num_blocks, num_slots, num_candidates, width)


def build_nodes(
    lattice: Lattice, table: Tensor, table_rows: Tensor, slot_terms: Tensor, weights: NodeWeights
) -> Tensor:
    """Token, drafter state, confidence, slot and rank of every candidate, summed: nodes [N, S, K, W].

    table [X, W] holds (projected) token embeddings and table_rows [N, S, K] int64 says which of its rows each
    candidate takes: the token's id, or its own number where only the candidates were projected. slot_terms
    [N, S, W] are the projected drafter states; the nodes are of their type. On a GPU there is no gradient.
    """
    version = build_nodes_triton if slot_terms.is_cuda else build_nodes_reference
    return version(lattice, table, table_rows, slot_terms, weights)
