"""LiLiCorr: the network and the three losses of the head written out, and one lattice for training and serving."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lilicorr.blocks import BlockLabels, DraftOutput
from lilicorr.heads.lilicorr import LatticeAttention, LiLiCorrHead
from lilicorr.lattice import Lattice, candidates
from test_heads import SPEC, make_blocks, make_head

SLOTS, K = SPEC.num_slots, SPEC.num_candidates


def linear(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return layer.weight @ x + layer.bias


def rms_norm(layer: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    return layer.weight * x / (x.square().mean() + layer.eps).sqrt()


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def node(head: LiLiCorrHead, draft: DraftOutput, lattice: Lattice, slot: int, rank: int) -> Tensor:
    """What a candidate is before it has seen the others."""
    norm, up, _, down = head.feature_mlp
    centred = lattice.features[0, slot, rank] - lattice.features[0, slot, rank].mean()
    features = norm.weight * centred / (centred.square().mean() + norm.eps).sqrt() + norm.bias
    token = linear(head.token_proj, draft.embed[lattice.token_ids[0, slot, rank]])
    state = linear(head.pass_hidden_proj, draft.hidden[0, slot])
    places = head.slot_embedding[0, 0, slot, 0] + head.rank_embedding[0, 0, 0, rank]
    return token + state + linear(down, silu(linear(up, features))) + places


def attend(head: LiLiCorrHead, attention: LatticeAttention, x: dict[tuple[int, int], Tensor]) -> dict:
    """Every candidate (slot, rank) over all: a head's score has a term of the signed distance and one of one slot."""
    rows = attention.in_proj_weight, attention.in_proj_bias
    projected = {at: (rows[0] @ vector + rows[1]).view(3, attention.num_heads, -1) for at, vector in x.items()}
    mixed = {}
    for at, (queries, _, _) in projected.items():
        parts = []
        for number, query in enumerate(queries):
            scores = []
            for other, (_, keys, _) in projected.items():
                distance = at[0] - other[0]
                bias = head.relative_slot_bias[number, distance + SPEC.block_size - 1]
                bias = bias + (head.same_slot_bias[number] if distance == 0 else 0.0)
                scores.append(query @ keys[number] / math.sqrt(len(query)) + bias)
            weights = torch.stack(scores).softmax(-1)
            parts.append(sum(weight * values[number] for weight, (_, _, values) in zip(weights, projected.values())))
        mixed[at] = linear(attention.out_proj, torch.cat(parts))
    return mixed


def scores_by_hand(head: LiLiCorrHead, draft: DraftOutput, lattice: Lattice) -> tuple[list, dict]:
    """Scores of the anchor with slot 1, and of every candidate with every one of the next slot, of the first block."""
    x = {(slot, rank): node(head, draft, lattice, slot, rank) for slot in range(SLOTS) for rank in range(K)}
    for layer in head.layers:
        mixed = attend(head, layer.attn, {at: rms_norm(layer.attn_norm, vector) for at, vector in x.items()})
        x = {at: vector + mixed[at] for at, vector in x.items()}
        up, _, down = layer.mlp
        x = {at: v + linear(down, silu(linear(up, rms_norm(layer.mlp_norm, v)))) for at, v in x.items()}
    anchor = rms_norm(head.anchor_norm, linear(head.context_proj, draft.anchor_context[0]))
    fused = {at: rms_norm(head.output_norm, vector) for at, vector in x.items()}
    units = {at: silu(linear(head.factor_input_proj, torch.cat([v, anchor, v * anchor]))) for at, v in fused.items()}

    def score(out: Tensor, into: Tensor) -> float:
        return float(head.config.logit_scale * (out @ into) / (out.norm() * into.norm()))

    into = {at: linear(head.in_head, vector) for at, vector in units.items()}
    first = [score(linear(head.anchor_out_head, anchor), into[0, rank]) for rank in range(K)]
    pairs = {
        (slot, rank, following): score(linear(head.out_head, units[slot, rank]), into[slot + 1, following])
        for slot in range(SLOTS - 1)
        for rank in range(K)
        for following in range(K)
    }
    return first, pairs


@torch.no_grad()
def test_the_network_is_the_appendix_written_out() -> None:
    head, (draft, _) = make_head("lilicorr", num_layers=2), make_blocks(n=1)
    lattice = candidates(draft, K)
    anchor, pairs = head.scores(draft, lattice)
    first, expected = scores_by_hand(head, draft, lattice)
    assert anchor[0].tolist() == pytest.approx(first, abs=1e-9)
    for (slot, rank, following), value in expected.items():
        assert float(pairs[0, slot, rank, following]) == pytest.approx(value, abs=1e-9), (slot, rank, following)


def mixed_labels(draft: DraftOutput, labels: BlockLabels) -> BlockLabels:
    """Labels of mixed ranks; block 0 misses one in its middle, block 1 its first, block 2 ends with its answer."""
    torch.manual_seed(2)
    order = draft.logits.argsort(dim=-1, descending=True)
    ranks = torch.randint(0, K, labels.token_ids.shape)
    ranks[0, 2] = ranks[1, 0] = K  # the likeliest token that is no candidate
    valid = labels.valid.clone()
    valid[2, 3:] = False
    return replace(labels, token_ids=order.gather(-1, ranks[..., None])[..., 0], valid=valid)


def test_the_loss_of_the_head_is_the_equations_written_out() -> None:
    """Eq. (2) after the true predecessor, and of it Eq. (3), (4) and (13); with numbers of the slots they are over."""
    head = make_head("lilicorr", margin=1.5, margin_blend=0.5)
    draft, labels = make_blocks()
    labels = mixed_labels(draft, labels)
    lattice = candidates(draft, K)
    anchor, pairs = (scores.detach() for scores in head.scores(draft, lattice))
    expected = {"head_ce": 0.0, "distractor": 0.0, "margin": 0.0}
    count = 0
    for block in range(len(anchor)):
        before = None
        for slot in range(SLOTS):
            ids, true = lattice.token_ids[block, slot].tolist(), int(labels.token_ids[block, slot])
            if not labels.valid[block, slot] or true not in ids:
                break
            row = anchor[block] if before is None else pairs[block, slot - 1, before]
            gold = ids.index(true)
            law = [math.exp(float(score)) for score in row]
            law = [weight / sum(law) for weight in law]
            targets = (labels.lm_head @ labels.target_hidden[block, slot]).log_softmax(-1)
            expected["head_ce"] -= math.log(law[gold])
            expected["distractor"] += sum(
                part * max(0.0, float(targets[true] - targets[token])) for part, token in zip(law, ids)
            )
            gap = float(row[gold]) - max(float(row[rank]) for rank in range(K) if rank != gold)
            expected["margin"] += max(0.0, 1.5 - gap)
            before, count = gold, count + 1
    assert count == 4 * SLOTS + 2 + 3
    terms = head.loss(draft, labels, 1.0)
    for name, value in expected.items():
        assert float(terms[name].sum.detach()) == pytest.approx(value, rel=1e-9), name
        assert float(terms[name].count) == count


@pytest.mark.parametrize("kind", ["whole", "padding rows", "draft vocabulary"])
def test_training_and_serving_have_one_lattice(kind: str) -> None:
    """The candidates that `loss` scores, and their log-probabilities, are those of `candidates`."""
    draft, labels = make_blocks()
    if kind == "padding rows":
        draft.logits[..., 60:] += 50.0  # likelier than any token
        draft = replace(draft, num_ids=60)
    if kind == "draft vocabulary":
        vocab_ids = torch.arange(1, 67, 3)
        draft = replace(draft, logits=draft.logits[..., vocab_ids], vocab_ids=vocab_ids)
    head, scored = make_head("lilicorr"), []
    scores = head.scores
    head.scores = lambda draft, lattice: scored.append(lattice) or scores(draft, lattice)
    head.loss(draft, labels, 1.0)
    head.propose(draft)
    (trained,), served = scored, candidates(draft, K)
    assert torch.equal(trained.token_ids, served.token_ids)
    assert torch.allclose(trained.log_probs, served.log_probs, rtol=0, atol=1e-10)
    assert torch.allclose(trained.features, served.features, rtol=0, atol=1e-10)
