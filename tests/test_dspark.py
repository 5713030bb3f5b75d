"""DSpark: published sizes, the three Markov heads written out, the losses by hand, the confidence and where it ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lilicorr.blocks import BlockSpec
from lilicorr.heads.dspark import MARKOV_HEADS, DSparkConfig, DSparkHead
from lilicorr.losses import total_loss, total_variation_loss
from test_drafter import make_shape
from test_heads import make_blocks, make_head


@pytest.mark.parametrize(
    ("kind", "hidden", "parameters"),
    [
        ("vanilla", 4096, 77_795_585),
        ("vanilla", 2560, 77_794_049),
        ("gated", 4096, 78_909_953),
        ("gated", 2560, 78_515_201),
        ("rnn", 4096, 81_335_297),
        ("rnn", 2560, 80_154_113),
    ],
)
def test_parameter_counts_of_the_released_checkpoints(kind: str, hidden: int, parameters: int) -> None:
    spec = BlockSpec(7, 8, 151_669, (1, 9, 17, 25, 33), "anchor_first")
    with torch.device("meta"):
        config, shape = DSparkConfig(markov_head_type=kind), make_shape(hidden_size=hidden, vocab_size=151_936)
        head = DSparkHead(config, shape, spec)
        bare = DSparkHead(replace(config, enable_confidence_head=False), shape, spec)
        blind = DSparkHead(replace(config, confidence_head_with_markov=False), shape, spec)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (head, bare, blind)]
    assert counts == [parameters, parameters - hidden - 257, parameters - 256]


def by_hand(head: DSparkHead, draft, tokens: list[int]) -> torch.Tensor:
    """Logits [S, V] of the first block, slot after slot."""
    markov, logits = head.markov_head, []
    state = torch.zeros(head.config.markov_rank, dtype=torch.float64)
    for slot, previous in enumerate([int(draft.anchor_ids[0]), *tokens[:-1]]):
        before, hidden = markov.markov_w1.weight[previous], draft.hidden[0, slot]
        units = before
        if markov.kind == "gated":
            units = torch.sigmoid(markov.gate_proj(torch.cat([hidden, before]))) * before
        if markov.kind == "rnn":
            gate, candidate, out = markov.joint_proj(torch.cat([state, before, hidden])).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            units = torch.tanh(out)
        logits.append(draft.logits[0, slot] + markov.markov_w2.weight @ units)
    return torch.stack(logits)


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_drafting_and_teacher_forcing_are_the_equations(kind: str) -> None:
    head, (draft, _) = make_head("dspark", markov_head_type=kind), make_blocks(n=1)
    draft = replace(draft, logits=draft.logits / 50)  # a bias that decides
    tokens = head.propose(draft).token_ids
    expected = by_hand(head, draft, tokens[0].tolist())
    assert torch.equal(expected.argmax(-1), tokens[0])
    assert torch.allclose(head.corrected(draft, tokens)[0], expected)
    assert (tokens != draft.logits.argmax(-1)).any()


def test_total_variation_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]], dtype=torch.float64)  # 1/4 3/4, 1/2 1/2
    target = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]], dtype=torch.float64)
    assert total_variation_loss(logits, target, None).tolist() == [[pytest.approx(0.5), pytest.approx(1.0)]]
    three = torch.tensor([[[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]]], dtype=torch.float64)
    narrow = total_variation_loss(logits, three, torch.tensor([0, 2]))  # 0.05 + 0.25 + 0.3; 1/2 + 1/2 + 1
    assert narrow.tolist() == [[pytest.approx(0.6), pytest.approx(2.0)]]


def test_losses_on_the_leading_run_of_labels_by_hand() -> None:
    head, (draft, labels) = make_head("dspark", decay=2.0), make_blocks(n=2)
    valid = torch.tensor([[True] * 5, [True, True, False, True, True]])
    labels = replace(labels, valid=valid)
    terms = head.loss(draft, labels, 0.3)
    run = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.float64)
    weights = run * torch.exp(-torch.arange(5) / 2.0)
    law = head.corrected(draft, labels.token_ids).softmax(-1)
    target = (labels.target_hidden @ labels.lm_head.T).softmax(-1)
    distance = (law - target).abs().sum(-1)
    label = law.gather(-1, labels.token_ids[..., None])[..., 0]
    confidence = head.confidence(draft, labels.token_ids).sigmoid()
    accepted = 1 - distance / 2
    surprise = -(accepted * confidence.log() + (1 - accepted) * (1 - confidence).log())
    expected = {"head_ce": (-label.log(), 0.1), "distance": (distance, 0.9), "confidence": (surprise, 1.0)}
    loss = 0.0
    for name, (values, weight) in expected.items():
        assert float(terms[name].sum.detach()) == pytest.approx(float((weights * values).sum().detach())), name
        assert float(terms[name].count) == pytest.approx(float(weights.sum()))
        assert terms[name].weight == weight
        loss += weight * float((weights * values).sum().detach() / weights.sum())
    assert float(total_loss(terms).detach()) == pytest.approx(loss)


def test_no_gradient_flows_through_the_confidences_goal_and_on_request_none_into_the_drafter() -> None:
    for detached in (False, True):
        weights = {"ce_weight": 0.0, "distance_weight": 0.0, "detach_confidence": detached}
        head, (draft, labels) = make_head("dspark", **weights), make_blocks()
        hidden = draft.hidden.clone().requires_grad_()
        total_loss(head.loss(replace(draft, hidden=hidden), labels, 1.0)).backward()
        assert (hidden.grad is None) == detached
        assert head.markov_head.markov_w2.weight.grad is None  # only through the distance, which is a constant here
        assert head.confidence_head.proj.weight.grad.abs().sum() > 0


def test_a_block_ends_before_the_first_slot_below_the_threshold() -> None:
    draft, _ = make_blocks(n=50)
    head = make_head("dspark", confidence_threshold=0.5)
    proposal = head.propose(draft)
    assert torch.equal(proposal.token_ids, make_head("dspark").propose(draft).token_ids)
    confident = head.confidence(draft, proposal.token_ids).sigmoid() >= 0.5
    expected = [(row.tolist() + [False]).index(False) for row in confident]
    assert proposal.lengths.tolist() == expected and len(set(expected)) > 2
    moved = proposal.token_ids.clone()
    moved[:, 2] = (moved[:, 2] + 1) % 67
    after = head.confidence(draft, moved).sigmoid() >= 0.5
    assert torch.equal(after[:, :3], confident[:, :3])  # a slot's own token is not seen
    assert make_head("dspark").propose(draft).lengths is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type must be one of vanilla, gated, rnn, got 'lstm'"),
        ({"confidence_threshold": 1.5}, r"confidence_threshold of the head must be in \[0, 1\], got 1.5"),
        ({"confidence_threshold": 0.5, "enable_confidence_head": False}, "needs enable_confidence_head"),
    ],
)
def test_values_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head("dspark", **changes)
