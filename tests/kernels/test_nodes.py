"""The node build: the reference against the head's own modules, the Triton version against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lilicorr.kernels.nodes import NodeWeights, build_nodes_reference, build_nodes_triton
from lilicorr.lattice import Lattice, build_lattice


def make_inputs(
    shape: tuple[int, int, int], width: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Lattice, Tensor, Tensor, Tensor, NodeWeights]:
    blocks, slots, candidates = shape
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows = torch.randint(0, 50, shape, generator=generator).to(device)
    log_probs = some(blocks, slots, 60).log_softmax(-1).sort(dim=-1, descending=True).values[..., :candidates]
    weights = NodeWeights(
        norm_weight=some(5),
        norm_bias=some(5),
        norm_eps=1e-5,
        up_weight=some(width, 5),
        up_bias=some(width),
        down_weight=some(width, width) / math.sqrt(width),
        down_bias=some(width),
        slot_embedding=some(slots + 1, width),
        rank_embedding=some(candidates, width),
    )
    return build_lattice(rows, log_probs), some(50, width), rows, some(blocks, slots, width), weights


def test_reference_is_the_sum_of_its_terms():
    lattice, table, rows, slot_terms, weights = make_inputs((2, 3, 4), 8, torch.float64)
    nodes = build_nodes_reference(lattice, table, rows, slot_terms, weights)
    features = lattice.features[1, 2, 3]
    normed = (features - features.mean()) / (features.var(correction=0) + weights.norm_eps).sqrt()
    up = weights.up_weight @ (normed * weights.norm_weight + weights.norm_bias) + weights.up_bias
    expected = weights.down_weight @ (up * up.sigmoid()) + weights.down_bias
    expected = expected + table[rows[1, 2, 3]] + slot_terms[1, 2]
    expected = expected + weights.slot_embedding[2] + weights.rank_embedding[3]
    assert torch.allclose(nodes[1, 2, 3], expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 2), (2, 15, 8), (1, 2, 3)])
@pytest.mark.parametrize("width", [16, 257])
def test_triton_equals_reference(shape: tuple[int, int, int], width: int, device: str):
    inputs = make_inputs(shape, width, device=device)
    assert torch.allclose(build_nodes_triton(*inputs), build_nodes_reference(*inputs), atol=1e-4, rtol=1e-4)


def test_equal_candidates_half_precision_and_no_blocks(device: str):
    lattice, table, rows, slot_terms, weights = make_inputs((2, 3, 4), 32, torch.bfloat16, device)
    lattice = build_lattice(rows, torch.full_like(lattice.log_probs, -2.0).float())
    nodes = build_nodes_triton(lattice, table, rows, slot_terms, weights)
    expected = build_nodes_reference(lattice, table, rows, slot_terms, weights)
    assert nodes.dtype == torch.bfloat16
    assert torch.allclose(nodes.float(), expected.float(), atol=0.1, rtol=0.03)
    empty = build_lattice(rows[:0], lattice.log_probs[:0])
    assert build_nodes_triton(empty, table, rows[:0], slot_terms[:0], weights).shape == (0, 3, 4, 32)


def test_an_impossible_candidate_harms_no_other(device: str):
    """Of log-probability -inf: its node is no number, as in the reference, and it is the only one."""
    lattice, table, rows, slot_terms, weights = make_inputs((2, 3, 4), 32, device=device)
    log_probs = lattice.log_probs.clone()
    log_probs[1, 2, 3] = -math.inf
    inputs = (build_lattice(rows, log_probs), table, rows, slot_terms, weights)
    nodes, expected = build_nodes_triton(*inputs), build_nodes_reference(*inputs)
    assert torch.allclose(nodes, expected, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert nodes[1, 2, 3].isnan().all() and nodes.isfinite().sum() == nodes.numel() - 32
