"""The lattice: candidates and features, the oracle prefix, and the walks against brute force."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lilicorr.blocks import BlockLabels, DraftOutput, prefix_length
from lilicorr.lattice import (
    WALKS,
    candidates,
    exact_walk,
    greedy_walk,
    log_probs_at,
    lookahead_walk,
    oracle_prefix,
    top_index,
)


def make_draft(logits: torch.Tensor, vocab_ids: torch.Tensor | None = None) -> DraftOutput:
    n, s, _ = logits.shape
    hidden = torch.zeros(n, s, 3)
    anchor = torch.zeros(n, dtype=torch.long)
    return DraftOutput(anchor, hidden, logits, torch.zeros(n, 3), anchor == 0, torch.zeros(50, 3), vocab_ids)


def make_labels(token_ids: list[list[int]], valid: list[list[bool]] | None = None) -> BlockLabels:
    ids = torch.tensor(token_ids)
    mask = torch.ones_like(ids, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return BlockLabels(ids, mask, torch.zeros(*ids.shape, 3), torch.zeros(50, 3))


def test_candidates_are_the_likeliest_in_order():
    logits = torch.randn(2, 3, 11, dtype=torch.float64)
    lattice = candidates(make_draft(logits), 4)
    log_probs = logits.log_softmax(-1).sort(dim=-1, descending=True)
    assert torch.equal(lattice.token_ids, log_probs.indices[..., :4])
    assert torch.allclose(lattice.log_probs, log_probs.values[..., :4])


def test_padding_rows_are_no_candidates_and_count_in_the_normaliser():
    logits = torch.randn(2, 3, 11, dtype=torch.float64)
    logits[..., 8:] += 3
    lattice = candidates(replace(make_draft(logits), num_ids=8), 4)
    log_probs = logits.log_softmax(-1)
    assert torch.equal(lattice.token_ids, log_probs[..., :8].sort(dim=-1, descending=True).indices[..., :4])
    assert torch.allclose(lattice.log_probs, log_probs.gather(-1, lattice.token_ids))


def test_features_in_the_published_order():
    logits = torch.tensor([[[2.0, 0.0, 1.0]]], dtype=torch.float64)
    lattice = candidates(make_draft(logits), 3)
    log_probs = lattice.log_probs[0, 0]
    expected = torch.stack(
        [
            log_probs,
            log_probs.exp(),
            torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64),
            torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64),
            torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64),
        ],
        dim=-1,
    )
    assert torch.allclose(lattice.features[0, 0], expected)
    assert candidates(make_draft(logits), 1).features[0, 0, 0, 3] == 0.0


def test_candidates_of_a_restricted_vocabulary_are_ids_of_the_target():
    vocab_ids = torch.tensor([4, 17, 33])
    lattice = candidates(make_draft(torch.tensor([[[0.0, 3.0, 1.0]]]), vocab_ids), 2)
    assert lattice.token_ids.tolist() == [[[17, 33]]]


def test_membership_has_no_gradient_and_the_log_probabilities_do():
    """Of training's pair: the gradient is that of the candidates' log-probabilities, as if their ids were given."""
    logits = torch.randn(1, 2, 7, dtype=torch.float64, requires_grad=True)
    index = top_index(logits, 2)
    weights = torch.randn(1, 2, 2, dtype=torch.float64)
    (weights * log_probs_at(logits, index)).sum().backward()
    chosen = torch.zeros_like(logits).scatter(-1, index, weights)
    assert torch.allclose(logits.grad, chosen - weights.sum(-1, keepdim=True) * logits.detach().softmax(-1))
    assert not index.is_floating_point() and not index.requires_grad


@pytest.mark.parametrize(
    ("labels", "valid", "supervised"),
    [
        ([1, 2, 3], None, [1, 1, 1]),
        ([9, 2, 3], None, [0, 0, 0]),
        ([1, 9, 3], None, [1, 0, 0]),
        ([1, 2, 3], [True, True, False], [1, 1, 0]),
        ([1, 2, 3], [False, True, True], [0, 0, 0]),
    ],
)
def test_oracle_prefix_ends_at_the_first_miss(labels, valid, supervised):
    ids = torch.tensor([[[5, 1], [2, 6], [7, 3]]])
    gold, mask = oracle_prefix(ids, make_labels([labels], [valid] if valid else None))
    assert mask.int().tolist() == [supervised]
    for slot in range(3):
        if mask[0, slot]:
            assert ids[0, slot, gold[0, slot]] == labels[slot]


def test_prefix_length():
    assert prefix_length(torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()).tolist() == [2, 0, 4]


def brute_force(anchor: torch.Tensor, pairs: torch.Tensor) -> tuple[int, ...]:
    slots, k = pairs.shape[0] + 1, anchor.shape[0]

    def score(path: tuple[int, ...]) -> float:
        return float(anchor[path[0]] + sum(pairs[s, path[s], path[s + 1]] for s in range(slots - 1)))

    return max(itertools.product(range(k), repeat=slots), key=score)


def test_walks_against_brute_force():
    torch.manual_seed(0)
    anchor, pairs = torch.randn(20, 3), torch.randn(20, 4, 3, 3)
    greedy, exact = greedy_walk(anchor, pairs), exact_walk(anchor, pairs)
    for i in range(20):
        path = [int(anchor[i].argmax())]
        for slot in range(4):
            path.append(int(pairs[i, slot, path[-1]].argmax()))
        assert greedy[i].tolist() == path
        assert tuple(exact[i].tolist()) == brute_force(anchor[i], pairs[i])
    assert (greedy != exact).any()


def test_walks_of_a_single_slot():
    anchor, pairs = torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(1, 0, 3, 3)
    assert [walk(anchor, pairs).tolist() for walk in WALKS.values()] == 3 * [[[1]]]


def expected_length(anchor: torch.Tensor, pairs: torch.Tensor, path: Sequence[int]) -> float:
    """The sum over slots of the probability that everything up to the slot is accepted."""
    laws = [anchor.softmax(-1), *(pairs[slot, path[slot]].softmax(-1) for slot in range(len(path) - 1))]
    return sum(math.prod(float(law[rank]) for law, rank in zip(laws[:end], path)) for end in range(1, len(path) + 1))


@pytest.mark.parametrize("sharpness", [0.3, 2.0, 8.0])
@pytest.mark.parametrize(("slots", "k"), [(1, 3), (2, 1), (2, 4), (3, 3), (4, 4), (5, 3), (6, 2)])
def test_lookahead_is_the_maximiser_of_the_expected_accepted_length(slots: int, k: int, sharpness: float):
    generator = torch.Generator().manual_seed(100 * slots + k)
    anchor = sharpness * torch.randn(12, k, generator=generator, dtype=torch.float64)
    pairs = sharpness * torch.randn(12, slots - 1, k, k, generator=generator, dtype=torch.float64)
    walked = {name: walk(anchor, pairs).tolist() for name, walk in WALKS.items()}
    for block in range(12):
        lengths = {
            p: expected_length(anchor[block], pairs[block], p) for p in itertools.product(range(k), repeat=slots)
        }
        best = max(lengths.values())
        assert lengths[tuple(walked["lookahead"][block])] == pytest.approx(best, rel=1e-12)
        assert all(lengths[tuple(path[block])] <= best * (1 + 1e-12) for path in walked.values())


def test_lookahead_differs_from_both_walks_by_hand():
    """A first slot a little less likely that opens a sure continuation, and a sum that follows one large score."""
    anchor = torch.tensor([[0.55, 0.45]], dtype=torch.float64).log()
    sure = torch.tensor([[[[0.5, 0.5], [0.99, 0.01]]]], dtype=torch.float64).log()
    assert greedy_walk(anchor, sure).tolist()[0][0] == 0
    assert lookahead_walk(anchor, sure).tolist() == [[1, 0]]  # 0.45 (1 + 0.99) beats 0.55 (1 + 0.5)
    # The softmax of a row does not see a constant added to it, Eq. (12) does
    shifted = sure + torch.tensor([[[[9.0], [0.0]]]], dtype=torch.float64)
    assert exact_walk(anchor, shifted).tolist()[0][0] == 0
    assert lookahead_walk(anchor, shifted).tolist() == [[1, 0]]
