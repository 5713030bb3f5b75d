"""Loss terms: hand-worked two-slot cases of Eq. (3)-(7) and (13), and the gradient identities of Appendix D."""

import math

import pytest
import torch

from lilicorr.blocks import LossTerm, add_terms
from lilicorr.losses import (
    acceptance_weights,
    block_cross_entropy,
    diagnostic,
    distractor_penalty,
    lattice_cross_entropy,
    margin_hinge,
    total_loss,
)

SCORES = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]]], dtype=torch.float64)
GOLD = torch.tensor([[1, 2]])
BOTH = torch.tensor([[True, True]])
FIRST = torch.tensor([[True, False]])


def mean(term: LossTerm) -> float:
    return float(term.sum / term.count)


def test_block_cross_entropy_decays_by_slot():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -50.0]], dtype=torch.float64)
    valid = torch.tensor([[True, True], [True, False]])
    term = block_cross_entropy(log_probs, valid, decay=4.0)
    second = math.exp(-1 / 4)
    assert float(term.sum) == pytest.approx(1 + 2 * second + 3)
    assert float(term.count) == pytest.approx(2 + second)


def test_weights_of_block_size_16_sum_to_the_published_mass():
    valid = torch.ones(1, 15, dtype=torch.bool)
    term = block_cross_entropy(torch.zeros(1, 15, dtype=torch.float64), valid, decay=7.0)
    assert float(term.count) == pytest.approx(6.6306, abs=1e-4)


def test_an_invalid_slot_has_no_gradient_even_at_minus_infinity():
    log_probs = torch.tensor([[-1.0, float("-inf")]], requires_grad=True)
    block_cross_entropy(log_probs, FIRST, 7.0).sum.backward()
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]


def test_lattice_cross_entropy_by_hand():
    first = -(1.0 - math.log(math.e**2 + math.e + 1))
    second = -(3.0 - math.log(2 + math.e**3))
    assert mean(lattice_cross_entropy(SCORES, GOLD, BOTH, 1.0)) == pytest.approx((first + second) / 2)
    assert mean(lattice_cross_entropy(SCORES, GOLD, FIRST, 1.0)) == pytest.approx(first)


def test_distractor_penalty_by_hand():
    target_logits = torch.tensor([[[0.0, 4.0, 5.0], [1.0, 1.0, 1.0]]], dtype=torch.float64)
    probs = SCORES[0, 0].softmax(-1)
    term = distractor_penalty(SCORES, target_logits, GOLD, BOTH, 1.0)
    # Slot 1: only candidate 0 lies below the ground truth, by 4; candidate 2 lies above and is clipped.
    assert mean(term) == pytest.approx(float(probs[0]) * 4 / 2)
    target_logits[0, 1] = torch.tensor([-1.0, 0.5, 2.0])  # Slot 2: below it by 3 and by 1.5
    second = SCORES[0, 1].softmax(-1)
    both = float(probs[0]) * 4 + float(second[0]) * 3 + float(second[1]) * 1.5
    assert mean(distractor_penalty(SCORES, target_logits, GOLD, BOTH, 1.0)) == pytest.approx(both / 2)
    assert mean(distractor_penalty(SCORES, target_logits, GOLD, FIRST, 1.0)) == pytest.approx(float(probs[0]) * 4)


def test_distractor_penalty_does_not_see_the_normaliser():
    target_logits = torch.randn(1, 2, 3, dtype=torch.float64)
    shifted = target_logits + torch.tensor([[[7.0], [-3.0]]])
    first, second = (distractor_penalty(SCORES, t, GOLD, BOTH, 1.0) for t in (target_logits, shifted))
    assert float(first.sum) == pytest.approx(float(second.sum))
    assert float(distractor_penalty(SCORES, torch.zeros(1, 2, 3), GOLD, BOTH, 1.0).sum) == 0.0


def test_margin_hinge_by_hand():
    # Slot 1: gap 1 - 2 = -1; slot 2: gap 3 - 0 = 3.
    assert mean(margin_hinge(SCORES, GOLD, BOTH, 2.0, 1.0)) == pytest.approx((3.0 + 0.0) / 2)
    assert mean(margin_hinge(SCORES, GOLD, BOTH, 3.5, 1.0)) == pytest.approx((4.5 + 0.5) / 2)


def test_cross_entropy_gradient_is_equation_10():
    scores = SCORES.clone().requires_grad_()
    lattice_cross_entropy(scores, GOLD, FIRST, 1.0).sum.backward()
    expected = SCORES[0, 0].softmax(-1)[1] - 1
    assert float(scores.grad[0, 0, 1]) == pytest.approx(float(expected))
    assert scores.grad[0, 1].abs().sum() == 0


def test_penalty_gradient_is_equation_11():
    scores = SCORES.clone().requires_grad_()
    target_logits = torch.tensor([[[0.5, 4.0, -2.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    distractor_penalty(scores, target_logits, GOLD, FIRST, 1.0).sum.backward()
    probs = SCORES[0, 0].softmax(-1)
    shortfall = torch.tensor([3.5, 0.0, 6.0], dtype=torch.float64)
    assert float(scores.grad[0, 0, 1]) == pytest.approx(float(-probs[1] * (probs * shortfall).sum()))


def test_penalty_is_the_target_cross_entropy_when_the_ground_truth_is_its_favourite():
    """Eq. (9): equal gradients, whatever normalisation the target's probabilities have."""
    target_logits = torch.tensor([[[0.5, 4.0, -2.0], [1.0, 0.0, 6.0]]], dtype=torch.float64)
    first, second = SCORES.clone().requires_grad_(), SCORES.clone().requires_grad_()
    distractor_penalty(first, target_logits, GOLD, BOTH, 1.0).sum.backward()
    (second.softmax(-1) * -target_logits.log_softmax(-1)).sum().backward()
    assert torch.allclose(first.grad, second.grad)


def test_the_least_penalty_is_certainty_of_the_targets_favourite():
    """Nothing for a head sure of a ground truth that the target likes best; for one sure of another, its shortfall."""
    target_logits = torch.tensor([[[0.5, 4.0, -2.0]]], dtype=torch.float64)
    certain = 1000.0 * torch.eye(3, dtype=torch.float64)

    def penalty(scores: torch.Tensor, gold: int) -> float:
        one = torch.tensor([[True]])
        return mean(distractor_penalty(scores[None, None], target_logits, torch.tensor([[gold]]), one, 1.0))

    assert [penalty(certain[rank], 1) for rank in range(3)] == [3.5, 0.0, 6.0]
    assert penalty(SCORES[0, 0], 1) > 0  # not sure enough
    assert [penalty(certain[rank], 0) for rank in range(3)] == [0.0, 0.0, 2.5]  # the ground truth is no favourite


def test_acceptance_weights_by_hand():
    """D-PACE: q = 1/2 p + 1/2; w_s is the sum over the slots from s on of the product of q up to there."""
    log_probs = torch.tensor([[0.5, 0.0, 1.0], [1.0, 0.2, 0.6]], dtype=torch.float64).log()
    valid = torch.tensor([[True, True, True], [True, False, True]])
    weights = acceptance_weights(log_probs, valid, 0.5)
    q = (0.75, 0.75 * 0.5, 0.75 * 0.5 * 1.0)
    assert weights[0].tolist() == pytest.approx([sum(q), q[1] + q[2], q[2]])
    assert weights[1].tolist() == [1.0, 0.0, 0.0]  # behind a slot without a label nothing is reached
    term = block_cross_entropy(log_probs.clone().requires_grad_(), valid, 7.0, 0.5, dpace_alpha=0.5)
    assert float(term.count) == pytest.approx(float(weights.sum())) and term.weight == 0.5
    assert acceptance_weights(log_probs, valid, 1.0)[0].tolist() == [3.0, 2.0, 1.0]
    assert not acceptance_weights(log_probs.requires_grad_(), valid, 0.5).requires_grad


def test_total_loss_is_equation_7():
    terms = {
        "drafter_ce": LossTerm(torch.tensor(6.0), torch.tensor(3.0), 1.0),
        "head_ce": LossTerm(torch.tensor(8.0), torch.tensor(2.0), 0.25),
        "empty": LossTerm(torch.tensor(0.0), torch.tensor(0.0), 0.25),
        "seen": LossTerm(torch.tensor(9.0), torch.tensor(1.0), 0.0),
    }
    assert float(total_loss(terms)) == pytest.approx(2.0 + 0.25 * 4.0)


def test_terms_add_up_over_chunks():
    whole = {"ce": lattice_cross_entropy(SCORES, GOLD, BOTH, 0.5), "d": diagnostic(GOLD, BOTH)}
    parts: dict[str, LossTerm] = {}
    for s in range(2):
        cut = slice(s, s + 1)
        part = lattice_cross_entropy(SCORES[:, cut], GOLD[:, cut], BOTH[:, cut], 0.5)
        parts = add_terms(parts, {"ce": part, "d": diagnostic(GOLD[:, cut], BOTH[:, cut])})
    for name in whole:
        assert float(whole[name].sum) == pytest.approx(float(parts[name].sum))
        assert float(whole[name].count) == float(parts[name].count)
    with pytest.raises(AssertionError, match="terms of different weight"):
        whole["ce"] + whole["d"]
