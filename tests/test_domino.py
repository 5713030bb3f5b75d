"""Domino: published sizes, the correction written out, teacher forcing against the roll-out, the decaying base loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lilicorr.blocks import BlockSpec
from lilicorr.heads.domino import DominoConfig, DominoHead
from lilicorr.losses import block_cross_entropy
from test_drafter import make_shape
from test_heads import make_blocks, make_head


@pytest.mark.parametrize(("hidden", "parameters"), [(4096, 55_934_976), (2560, 50_823_168)])
def test_parameter_counts_of_the_released_checkpoints(hidden: int, parameters: int) -> None:
    spec = BlockSpec(16, 8, 151_669, (1, 9, 17, 25, 33), "anchor_first")
    with torch.device("meta"):
        head = DominoHead(DominoConfig(), make_shape(hidden_size=hidden, vocab_size=151_936), spec)
    assert sum(parameter.numel() for parameter in head.parameters()) == parameters
    assert {name: list(tensor.shape) for name, tensor in head.state_dict().items()} == {
        "prefix_gru.weight_ih_l0": [3072, hidden],
        "prefix_gru.weight_hh_l0": [3072, 1024],
        "embed_proj.0.weight": [256, hidden + 1024],
        "embed_proj.2.weight": [151_936, 256],
    }


def by_hand(head: DominoHead, draft, tokens: list[int], slot: int) -> torch.Tensor:
    """Logits of `slot` of the first block after the anchor and `tokens`, by the equations of a gated recurrent unit."""
    gru, state = head.prefix_gru, torch.zeros(head.config.gru_hidden_dim, dtype=torch.float64)
    for token in [int(draft.anchor_ids[0]), *tokens[:slot]]:
        into = (gru.weight_ih_l0 @ draft.embed[token]).chunk(3)
        over = (gru.weight_hh_l0 @ state).chunk(3)
        reset, update = torch.sigmoid(into[0] + over[0]), torch.sigmoid(into[1] + over[1])
        state = (1 - update) * torch.tanh(into[2] + reset * over[2]) + update * state
    units = head.embed_proj[0].weight @ torch.cat([draft.hidden[0, slot], state])
    return draft.logits[0, slot] + head.embed_proj[2].weight @ (units * torch.sigmoid(units))


@pytest.mark.parametrize("prefix", [0, 1, 3, 5])
def test_the_roll_out_is_the_correction_written_out(prefix: int) -> None:
    head, (draft, _) = make_head("domino", pure_draft_prefix_len=prefix), make_blocks(n=1)
    draft = replace(draft, logits=draft.logits / 50)  # a correction that decides
    tokens: list[int] = []
    for slot in range(5):
        logits = draft.logits[0, slot] if slot < prefix else by_hand(head, draft, tokens, slot)
        tokens.append(int(logits.argmax()))
    assert head.propose(draft).token_ids.tolist() == [tokens]
    corrected = head.corrected(draft, torch.tensor([tokens]))
    assert torch.equal(corrected[:, :prefix], draft.logits[:, :prefix])
    for slot in range(prefix, 5):
        assert torch.allclose(corrected[0, slot], by_hand(head, draft, tokens, slot))
    assert (head.propose(draft).token_ids != draft.logits.argmax(-1)).any() == (prefix < 5)


def test_teacher_forcing_gives_the_roll_outs_own_prefix() -> None:
    """The reported prefix under the true tokens is what the sequential roll-out would have had accepted."""
    head, (draft, labels) = make_head("domino"), make_blocks(n=60)
    rolled = head.propose(draft).token_ids
    wrong = torch.arange(60) % 6
    token_ids = rolled.clone()
    for block, slot in enumerate(wrong.tolist()):
        if slot < 5:
            token_ids[block, slot] = (token_ids[block, slot] + 1) % 67
    terms = head.loss(draft, replace(labels, token_ids=token_ids), 0.0)
    assert float(terms["selected_prefix"].sum) == float(wrong.sum())


def test_the_pool_corrects_the_best_tokens_only() -> None:
    draft, _ = make_blocks(n=40)
    exact = make_head("domino").propose(draft).token_ids
    assert torch.equal(make_head("domino", pool=67).propose(draft).token_ids, exact)
    pooled = make_head("domino", pool=3).propose(draft).token_ids
    best = draft.logits.topk(3, dim=-1).indices
    assert (best == pooled[..., None]).any(-1).all() and (pooled != exact).any()
    assert torch.equal(make_head("domino", pool=1).propose(draft).token_ids, draft.logits.argmax(-1))


def test_the_base_loss_gives_way_to_the_corrected_one() -> None:
    draft, labels = make_blocks()
    weights = {
        (fraction, start): [
            (round(terms["drafter_ce"].weight, 9), round(terms["head_ce"].weight, 9))
            for progress in (0.0, 0.25, 0.5, 1.0)
            if (terms := make_head("domino", base_fraction=fraction, base_start=start).loss(draft, labels, progress))
        ]
        for fraction, start in ((1.0, 1.0), (0.5, 0.8), (0.0, 1.0))
    }
    assert weights[1.0, 1.0] == [(1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.0, 1.0)]
    assert weights[0.5, 0.8] == [(0.8, 0.2), (0.4, 0.6), (0.0, 1.0), (0.0, 1.0)]
    assert weights[0.0, 1.0] == 4 * [(0.0, 1.0)]
    head = make_head("domino", decay=3.0)
    terms = head.loss(draft, labels, 0.5)
    for name, logits in (("drafter_ce", draft.logits), ("head_ce", head.corrected(draft, labels.token_ids))):
        log_probs = logits.log_softmax(-1).gather(-1, labels.token_ids[..., None])[..., 0]
        expected = block_cross_entropy(log_probs, labels.valid, 3.0)
        assert float(terms[name].sum.detach()) == pytest.approx(float(expected.sum.detach()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pure_draft_prefix_len": 6}, "pure_draft_prefix_len must be in 0..5, got 6"),
        ({"pool": -1}, "pool must be in 0..67, got -1"),
        ({"contract": "both"}, "contract must be one of deterministic, sampled, got 'both'"),
    ],
)
def test_values_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head("domino", **changes)
