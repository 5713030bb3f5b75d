"""Every way to propose leaves the target's law at temperature 1: exact enumeration against 400,000 draws.

The target's next token depends on the one before it, over twelve tokens, so that every path can be enumerated; blocks
have two slots, so that three tokens take a rejection or a bonus token somewhere.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lilicorr.blocks import BlockSpec, DraftOutput, Proposal
from lilicorr.config import from_dict
from lilicorr.heads import HEADS
from lilicorr.lattice import candidates
from lilicorr.verify import Sampling, verify
from test_drafter import make_shape
from test_head_contract import FORMS
from test_heads import SMALL
from test_verify import DRAWS, VOCAB, frequencies, total_variation

SLOTS, CHUNK = 2, 40_000
ANCHOR = 5


# One of every way to propose: the verifier cannot tell the others apart.
LAW_FORMS = (
    *("argmax", "lilicorr", "lilicorr sampled", "domino", "domino sampled", "domino pool sampled"),
    *("dspark sampled", "dspark rnn sampled", "dspark trimmed sampled"),
)


def test_every_head_has_its_law_here() -> None:
    assert {FORMS[form][0] for form in LAW_FORMS} == set(HEADS)


@dataclass(frozen=True, eq=False)
class Law:
    """Blocks of one head against the table `target` [12, 12] of logits of the next token."""

    head: torch.nn.Module
    draft: DraftOutput  # of one block
    target: Tensor
    drawn: bool

    def drafts(self, anchor_ids: Tensor) -> DraftOutput:
        """The same block behind every anchor."""
        own = ("hidden", "logits", "anchor_context", "anchor_valid")
        parts = {
            name: getattr(self.draft, name).expand(len(anchor_ids), *getattr(self.draft, name).shape[1:])
            for name in own
        }
        return replace(self.draft, anchor_ids=anchor_ids, **parts)

    def sampling(self, start: int, num_rows: int, positions: Tensor) -> Sampling:
        rows = torch.arange(start, start + num_rows)
        ones = torch.ones(num_rows, dtype=torch.float64)
        return Sampling(ones, torch.zeros_like(rows), ones, rows, positions, any_filtered=False)

    def block(self, anchor_ids: Tensor, start: int, positions: Tensor) -> tuple[Proposal, Any]:
        """One verified block of every row."""
        sampling = self.sampling(start, len(anchor_ids), positions)
        if self.drawn:
            proposal = self.head.propose(self.drafts(anchor_ids), sampling)
        else:  # a point mass depends on the anchor alone, and twelve of those are soon drafted
            proposal = Proposal(self.head.propose(self.drafts(torch.arange(VOCAB))).token_ids[anchor_ids])
        before = torch.cat([anchor_ids[:, None], proposal.token_ids], dim=1)
        return proposal, verify(proposal, self.target[before], sampling)

    def run(self, anchor: int) -> dict[str, Tensor]:
        """`DRAWS` rows until each has three tokens, with what became of the first block."""
        found: dict[str, list[Tensor]] = {"drafts": [], "accepted": [], "next": [], "tokens": []}
        for start in range(0, DRAWS, CHUNK):
            anchors = torch.full((CHUNK,), anchor)
            done = torch.zeros(CHUNK, dtype=torch.long)
            tokens = torch.zeros(CHUNK, 3 + SLOTS + 1, dtype=torch.long)
            for step in range(3):
                proposal, verdict = self.block(anchors, start, done + 50)
                if step == 0:
                    found["drafts"].append(proposal.token_ids)
                    found["accepted"].append(verdict.num_accepted)
                    found["next"].append(verdict.next_ids)
                for slot in range(SLOTS + 1):
                    new = verdict.next_ids
                    if slot < SLOTS:
                        new = torch.where(slot < verdict.num_accepted, proposal.token_ids[:, slot], new)
                    place = (done + slot).clamp(max=tokens.shape[1] - 1)
                    tokens.scatter_(1, place[:, None], new[:, None])
                done = done + verdict.num_accepted + 1
                anchors = verdict.next_ids
                if int(done.min()) >= 3:
                    break
                done = done.clamp(max=3)
            found["tokens"].append(tokens[:, :3])
        return {name: torch.cat(parts) for name, parts in found.items()}


def make_law(form: str) -> Law:
    name, changes = FORMS[form]
    layout = HEADS[name].layouts[0]
    spec = BlockSpec(SLOTS + (layout == "in_place"), 4, VOCAB - 1, (1, 3), layout)
    torch.manual_seed(11)
    head = HEADS[name](
        from_dict(HEADS[name].Config, SMALL[name] | changes), make_shape(hidden_size=8, vocab_size=VOCAB), spec
    )
    for parameter in head.double().requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    hidden = torch.randn(1, SLOTS, 8, dtype=torch.float64)
    logits = 1.5 * torch.randn(1, SLOTS, VOCAB, dtype=torch.float64)
    context, embed = torch.randn(1, 8, dtype=torch.float64), torch.randn(VOCAB, 8, dtype=torch.float64)
    draft = DraftOutput(torch.zeros(1), hidden, logits, context, torch.ones(1, dtype=torch.bool), embed)
    if name == "lilicorr":  # its scores do not depend on the anchor's id: one block's serve all
        scores = head.scores(draft, candidates(draft, 4))
        head.scores = lambda draft, lattice: tuple(
            part.expand(len(draft.anchor_ids), *part.shape[1:]) for part in scores
        )
    if name == "dspark":  # let the token before a slot decide how confident it is
        head.confidence_head.proj.weight[:, :8] = 0
        head.confidence_head.proj.bias.zero_()
    law = Law(head, draft, 1.5 * torch.randn(VOCAB, VOCAB, dtype=torch.float64), form.endswith("sampled"))
    likeliest = head.propose(law.drafts(torch.tensor([ANCHOR]))).token_ids[0]
    for before, token in zip([ANCHOR, *likeliest[:-1].tolist()], likeliest.tolist()):
        law.target[before, token] += 2.0  # so that whole blocks are accepted often enough to be told apart
    return law


@functools.lru_cache
def drawn(form: str) -> tuple[Law, int, dict[str, Tensor]]:
    """A form's law, an anchor, and the draws behind it."""
    law = make_law(form)
    return law, ANCHOR, law.run(ANCHOR)


def assert_frequency(hits: Tensor, probability: float) -> None:
    """Within four standard deviations of a binomial."""
    error = 4 * (probability * (1 - probability) / len(hits)) ** 0.5 + 1e-9
    assert abs(float(hits.double().mean()) - probability) < error


def assert_law(ids: Tensor, law: Tensor) -> None:
    """Total variation below 0.01; of fewer than some 50,000 draws, below what they can tell."""
    assert len(ids) > 500
    assert total_variation(frequencies(ids), law / law.sum()) < max(0.01, 2.2 / len(ids) ** 0.5)


def draft_laws(law: Law, anchor: int) -> tuple[Tensor, Tensor]:
    """The head's law of slot 1, [12], and of slot 2 given slot 1, [12, 12]; rows that cannot be drafted stay 0."""
    count = 20_000
    proposal, _ = law.block(torch.full((count,), anchor), 0, torch.full((count,), 50))
    dense = torch.nn.functional.one_hot(proposal.token_ids, VOCAB).double()
    if proposal.probs is not None:
        support = torch.arange(VOCAB) if proposal.support_ids is None else proposal.support_ids
        dense = torch.zeros_like(dense).scatter_add(2, support.expand_as(proposal.probs), proposal.probs)
    second = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    second[proposal.token_ids[:, 0]] = dense[:, 1]
    return dense[0, 0], second


@pytest.mark.parametrize("form", LAW_FORMS)
def test_at_temperature_1_the_output_has_the_targets_law(form: str) -> None:
    """The first three tokens, and with them every pair, whatever was rejected where."""
    law, anchor, found = drawn(form)
    tokens, p = found["tokens"], law.target.softmax(-1)
    pairs = p[anchor][:, None] * p
    expected = (p[anchor], pairs.sum(0), pairs.sum(0) @ p)
    for place in range(3):
        assert total_variation(frequencies(tokens[:, place]), expected[place]) < 0.01
    assert total_variation(frequencies(tokens[:, 0], tokens[:, 1]), pairs) < 0.01
    assert total_variation(frequencies(tokens[:, 1], tokens[:, 2]), pairs.sum(0)[:, None] * p) < 0.01


@pytest.mark.parametrize("form", [form for form in LAW_FORMS if "trimmed" not in form])
def test_every_outcome_of_a_block_has_its_exact_law(form: str) -> None:
    """Acceptance 1 - TV(p, q), p(d) for a point mass; the token after a rejection at each slot; the bonus token."""
    law, anchor, found = drawn(form)
    p = law.target.softmax(-1)
    q_1, q_2 = draft_laws(law, anchor)
    accepted, after, drafts = found["accepted"], found["next"], found["drafts"]
    assert_law(drafts[:, 0], q_1)

    first = torch.minimum(p[anchor], q_1)  # probability that slot 1 holds x and is accepted
    assert float(first.sum()) == pytest.approx(1 - total_variation(p[anchor], q_1))
    assert_frequency(accepted >= 1, float(first.sum()))
    assert_law(after[accepted == 0], (p[anchor] - q_1).clamp(min=0))

    second = first[:, None] * torch.minimum(p, q_2)  # both are accepted, being x and y
    assert_frequency(accepted == 2, float(second.sum()))
    assert_law(after[accepted == 1], first @ (p - q_2).clamp(min=0))
    assert_law(after[accepted == 2], second.sum(0) @ p)
    if not form.endswith("sampled"):
        one, two = drafts[0].tolist()
        assert (drafts == drafts[0]).all()
        assert float(first.sum()) == pytest.approx(float(p[anchor, one]))
        assert_frequency(accepted[accepted >= 1] == 2, float(p[one, two]))


def test_a_trimmed_block_ends_where_the_head_is_not_confident() -> None:
    law = make_law("dspark trimmed sampled")
    anchors = torch.arange(20_000) % VOCAB
    proposal, verdict = law.block(anchors, 0, torch.full((20_000,), 50))
    confidence = law.head.confidence(law.drafts(anchors), proposal.token_ids).sigmoid()
    expected = torch.where(confidence[:, 0] < 0.5, 0, torch.where(confidence[:, 1] < 0.5, 1, 2))
    assert torch.equal(proposal.lengths, expected) and set(expected.tolist()) == {0, 1, 2}
    assert (verdict.num_accepted <= expected).all()
    for length in (0, 1):
        rows = (expected == length) & (verdict.num_accepted == length)
        before = anchors if length == 0 else proposal.token_ids[:, 0]
        p = law.target.softmax(-1)[before[rows]].mean(0)  # no slot was tested: p itself, not the residual
        assert total_variation(frequencies(verdict.next_ids[rows]), p) < 2.2 / int(rows.sum()) ** 0.5


def test_paths_are_enumerated_rightly() -> None:
    """The table of pairs used above, against a sum over all paths."""
    law = make_law("argmax")
    p = law.target.softmax(-1)
    third = torch.zeros(VOCAB, dtype=torch.float64)
    for x, y, z in itertools.product(range(VOCAB), repeat=3):
        third[z] += p[ANCHOR, x] * p[x, y] * p[y, z]
    assert torch.allclose((p[ANCHOR][:, None] * p).sum(0) @ p, third)
