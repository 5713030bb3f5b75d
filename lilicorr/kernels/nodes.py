"""The nodes of the lattice: what the LiLiCorr head attends over, one for every candidate of every slot.

Place in the flow: the LiLiCorr head builds its nodes from candidates, the drafter's states and a small network over
the confidence features of `lattice.build_lattice`. Paper: section 3.2 and Appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lilicorr.lattice import Lattice

NUM_FEATURES = 5


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


def build_nodes_reference(
    lattice: Lattice, table: Tensor, table_rows: Tensor, slot_terms: Tensor, weights: NodeWeights
) -> Tensor:
    """The definition of `build_nodes`; differentiable."""
    norm = ((NUM_FEATURES,), weights.norm_weight, weights.norm_bias, weights.norm_eps)
    normed = nn.functional.layer_norm(lattice.features.to(slot_terms.dtype), *norm)
    hidden = nn.functional.silu(nn.functional.linear(normed, weights.up_weight, weights.up_bias))
    nodes = nn.functional.embedding(table_rows, table) + slot_terms[:, :, None]
    nodes = nodes + nn.functional.linear(hidden, weights.down_weight, weights.down_bias)
    return nodes + weights.slot_embedding[: nodes.shape[1], None] + weights.rank_embedding


def build_nodes(
    lattice: Lattice, table: Tensor, table_rows: Tensor, slot_terms: Tensor, weights: NodeWeights
) -> Tensor:
    """Token, drafter state, confidence, slot and rank of every candidate, summed: nodes [N, S, K, W].

    table [X, W] holds (projected) token embeddings and table_rows [N, S, K] int64 says which of its rows each
    candidate takes: the token's id, or its own number where only the candidates were projected. slot_terms
    [N, S, W] are the projected drafter states; the nodes are of their type. On a GPU there is no gradient.
    """
    return build_nodes_reference(lattice, table, table_rows, slot_terms, weights)
