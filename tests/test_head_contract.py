"""What holds of every head: shapes, losses, gradients, batches, losslessness, and the law at temperature 1."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lilicorr.blocks import BlockLabels, BlockSpec, DraftOutput, Proposal
from lilicorr.config import DrafterConfig, from_dict
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.losses import total_loss
from lilicorr.target import Target
from lilicorr.verify import Sampling, verify
from test_drafter import make_shape
from test_heads import SMALL, make_blocks, make_head

# Every head, in every form that drafts differently; one that is missing here is a failure.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "argmax": ("argmax", {}),
    "domino": ("domino", {}),
    "domino pool": ("domino", {"pool": 5}),
    "domino sampled": ("domino", {"contract": "sampled"}),
    "domino pool sampled": ("domino", {"pool": 5, "contract": "sampled"}),
    "dspark": ("dspark", {}),
    "dspark gated": ("dspark", {"markov_head_type": "gated"}),
    "dspark rnn": ("dspark", {"markov_head_type": "rnn"}),
    "dspark sampled": ("dspark", {"contract": "sampled"}),
    "dspark gated sampled": ("dspark", {"markov_head_type": "gated", "contract": "sampled"}),
    "dspark rnn sampled": ("dspark", {"markov_head_type": "rnn", "contract": "sampled"}),
    "dspark trimmed": ("dspark", {"confidence_threshold": 0.5}),
    "dspark trimmed sampled": ("dspark", {"confidence_threshold": 0.5, "contract": "sampled"}),
    "lilicorr": ("lilicorr", {}),
    "lilicorr exact": ("lilicorr", {"walk": "exact"}),
    "lilicorr lookahead": ("lilicorr", {"walk": "lookahead"}),
    "lilicorr sampled": ("lilicorr", {"contract": "sampled"}),
}
NARROW = torch.arange(0, 67, 2)  # a draft vocabulary of every second id


def make_form(form: str) -> torch.nn.Module:
    name, changes = FORMS[form]
    return make_head(name, **changes)


def narrowed(draft: DraftOutput, labels: BlockLabels) -> DraftOutput:
    """The draft over a part of the vocabulary."""
    return replace(draft, logits=draft.hidden @ labels.lm_head[NARROW].T, vocab_ids=NARROW)


def take_blocks(draft: DraftOutput, rows: slice | Tensor) -> DraftOutput:
    """Some blocks of a draft."""
    shared = {"embed": draft.embed, "vocab_ids": draft.vocab_ids}
    own = {f.name: getattr(draft, f.name)[rows] for f in fields(draft) if f.name not in shared}
    return DraftOutput(**own, **shared)


def take_rows(sampling: Sampling, rows: slice) -> Sampling:
    return Sampling(*(getattr(sampling, f.name)[rows] for f in fields(sampling)[:5]))


def mixed_sampling(num_rows: int) -> Sampling:
    """Greedy and sampled rows, filtered and not, each with its own seed and place."""
    rows = torch.arange(num_rows)
    return Sampling(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.5])[rows % 4].double(),
        top_k=torch.tensor([0, 3])[rows % 2],
        top_p=torch.tensor([1.0, 0.8, 0.9])[rows % 3].double(),
        seeds=100 + rows,
        positions=7 + 3 * rows,
    )


def test_every_head_has_its_forms_here() -> None:
    assert {name for name, _ in FORMS.values()} == set(HEADS) == set(SMALL)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_shapes_and_finite_losses(form: str, narrow: bool) -> None:
    head, (draft, labels) = make_form(form), make_blocks()
    draft = narrowed(draft, labels) if narrow else draft
    proposal = head.propose(draft)
    assert proposal.token_ids.shape == (7, 5) and proposal.token_ids.dtype == torch.long
    assert proposal.probs is None  # without a temperature every contract is a point mass
    drawn = head.propose(draft, mixed_sampling(7))
    assert (drawn.probs is not None) == form.endswith("sampled")
    if narrow:
        assert torch.isin(torch.cat([proposal.token_ids, drawn.token_ids]), NARROW).all()
    terms = head.loss(draft, labels, progress=0.5)
    assert torch.isfinite(total_loss(terms)) and float(total_loss(terms).detach()) > 0
    trained = [term for term in terms.values() if term.weight]
    assert trained and all(float(term.count) > 0 for term in trained)
    assert {"top1_prefix"} <= {name for name, term in terms.items() if not term.weight}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_the_drafter(form: str) -> None:
    head, (draft, labels) = make_form(form), make_blocks()
    hidden = draft.hidden.clone().requires_grad_()
    terms = head.loss(replace(draft, hidden=hidden, logits=hidden @ labels.lm_head.T), labels, 1.0)
    total_loss(terms).backward()
    assert (hidden.grad.abs().amax(dim=-1) > 0).all()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def converted(draft: DraftOutput, labels: BlockLabels, kind: torch.dtype) -> tuple[DraftOutput, BlockLabels]:
    """Blocks in another type, as a drafter and a target of that type would give them."""
    head = labels.lm_head.to(kind)
    hidden, context, embed = (getattr(draft, name).to(kind) for name in ("hidden", "anchor_context", "embed"))
    draft = replace(draft, hidden=hidden, logits=hidden @ head.T, anchor_context=context, embed=embed)
    return draft, replace(labels, target_hidden=labels.target_hidden.to(kind), lm_head=head)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision(form: str) -> None:
    """Training under autocast with fp32 parameters on a bf16 target, and decoding in bf16."""
    head, blocks = make_form(form), make_blocks()
    half, labels = converted(*blocks, torch.bfloat16)
    exact = float(total_loss(head.loss(*blocks, 0.5)).detach())
    head.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = total_loss(head.loss(half, labels, 0.5))
    assert float(loss.detach()) == pytest.approx(exact, rel=0.1)
    if loss.requires_grad:
        loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())
    proposal = head.bfloat16().propose(half, mixed_sampling(7))
    assert proposal.token_ids.shape == (7, 5)
    if proposal.probs is not None:
        assert torch.allclose(proposal.probs.sum(-1), torch.ones(7, 5, dtype=proposal.probs.dtype), atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_supervised_without_labels(form: str) -> None:
    head, (draft, labels) = make_form(form), make_blocks()
    empty = replace(labels, valid=torch.zeros_like(labels.valid))
    terms = head.loss(draft, empty, 1.0)
    assert all(float(t.sum.detach()) == float(t.count) == 0.0 for n, t in terms.items() if n != "score_spread")
    assert float(total_loss(terms).detach()) == 0.0


@pytest.mark.parametrize("form", FORMS)
def test_blocks_without_labels_change_no_loss(form: str) -> None:
    head, (draft, labels) = make_form(form), make_blocks()
    valid = labels.valid.clone()
    valid[4:] = False
    some = head.loss(draft, replace(labels, valid=valid), 0.5)
    short = BlockLabels(labels.token_ids[:4], valid[:4], labels.target_hidden[:4], labels.lm_head)
    alone = head.loss(take_blocks(draft, slice(4)), short, 0.5)
    for name in alone.keys() - {"score_spread"}:
        assert float(some[name].sum.detach()) == pytest.approx(float(alone[name].sum.detach()), abs=1e-12), name
        assert float(some[name].count) == pytest.approx(float(alone[name].count)), name


@pytest.mark.parametrize("form", FORMS)
def test_proposals_do_not_depend_on_the_batch(form: str) -> None:
    head, (draft, _) = make_form(form), make_blocks(n=8)
    sampling = mixed_sampling(8)
    whole = head.propose(draft, sampling)
    for row in range(8):
        rows = slice(row, row + 1)
        alone = head.propose(take_blocks(draft, rows), take_rows(sampling, rows))
        for part in ("token_ids", "probs", "support_ids", "lengths"):
            one, other = getattr(alone, part), getattr(whole, part)
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_decoding_is_the_targets_own(target_factory: Callable[..., Target], form: str) -> None:
    """fp32, against autoregression; and the sampled contract still draws something else than its argmax."""
    target = target_factory(dtype=torch.float32)
    name, changes = FORMS[form]
    config = DrafterConfig(num_layers=2, block_size=5, num_candidates=4)
    spec = block_spec(config, target.config, target.mask_token_id, HEADS[name].layouts[0])
    torch.manual_seed(5)
    model = build_draft_model(drafter_shape(config, target.config), spec, name, SMALL[name] | changes, target)
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    prompt = [3, 14, 15, 9, 26]
    expected = Decoder(target, None).generate(prompt, SamplingParams(40)).token_ids
    decoded = Decoder(target, model.eval()).generate(prompt, SamplingParams(40))
    assert decoded.token_ids == expected
    warm = [Decoder(target, model).generate(prompt, SamplingParams(40, temperature=1.0, seed=s)) for s in (1, 1, 2)]
    assert warm[0].token_ids == warm[1].token_ids != warm[2].token_ids


# The law at temperature 1: a target whose next token depends on the one before it, over twelve tokens, so that
# every path can be enumerated; two slots a block, so that three tokens take a rejection or a bonus token somewhere.
VOCAB, SLOTS, DRAWS, CHUNK = 12, 2, 400_000, 40_000


# One of every way to propose: the verifier cannot tell the others apart.
LAW_FORMS = (
    *("argmax", "lilicorr", "lilicorr sampled", "domino", "domino sampled", "domino pool sampled"),
    *("dspark sampled", "dspark rnn sampled", "dspark trimmed sampled"),
)


@dataclass(frozen=True, eq=False)
class Law:
    """Blocks of one head against the table `target` [12, 12] of logits of the next token."""

    head: torch.nn.Module
    draft: DraftOutput  # of one block
    target: Tensor

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
        proposal = self.head.propose(self.drafts(anchor_ids), sampling)
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
    for parameter in head.double().parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    hidden = torch.randn(1, SLOTS, 8, dtype=torch.float64)
    logits = 1.5 * torch.randn(1, SLOTS, VOCAB, dtype=torch.float64)
    context, embed = torch.randn(1, 8, dtype=torch.float64), torch.randn(VOCAB, 8, dtype=torch.float64)
    draft = DraftOutput(torch.zeros(1), hidden, logits, context, torch.ones(1, dtype=torch.bool), embed)
    return Law(head, draft, 1.5 * torch.randn(VOCAB, VOCAB, dtype=torch.float64))


@functools.lru_cache
def drawn(form: str) -> tuple[Law, int, dict[str, Tensor]]:
    """A form's law, an anchor, and the draws behind it."""
    law, anchor = make_law(form), 5
    return law, anchor, law.run(anchor)


def frequencies(*columns: Tensor) -> Tensor:
    """Of 12 tokens, or of their pairs."""
    index = sum(column * VOCAB**power for power, column in enumerate(reversed(columns)))
    return torch.bincount(index, minlength=VOCAB ** len(columns)).double().view([VOCAB] * len(columns)) / len(index)


def total_variation(first: Tensor, second: Tensor) -> float:
    return 0.5 * float((first - second).abs().sum())


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


def test_trimming_cuts_what_no_row_wants() -> None:
    tokens = torch.arange(12).view(3, 4)
    probs, lengths = torch.rand(3, 4, 5), torch.tensor([2, 0, 1])
    cut = Proposal(tokens, probs, None, lengths).trimmed()
    assert torch.equal(cut.token_ids, tokens[:, :2]) and torch.equal(cut.probs, probs[:, :2])
    assert cut.lengths is lengths
    none = Proposal(tokens, probs, None, torch.zeros(3, dtype=torch.long)).trimmed()
    assert none.token_ids.shape == (3, 0) and none.probs is None
    whole = Proposal(tokens)
    assert whole.trimmed() is whole


def test_greedy_rows_of_a_sampled_batch_take_the_argmax() -> None:
    for form in (form for form in FORMS if form.endswith("sampled")):
        head, (draft, _) = make_form(form), make_blocks(n=8)
        drawn = head.propose(draft, mixed_sampling(8)).token_ids
        assert torch.equal(drawn[::4], head.propose(draft).token_ids[::4]), form


def test_paths_are_enumerated_rightly() -> None:
    """The table of pairs used above, against a sum over all paths."""
    law = make_law("argmax")
    p = law.target.softmax(-1)
    third = torch.zeros(VOCAB, dtype=torch.float64)
    for x, y, z in itertools.product(range(VOCAB), repeat=3):
        third[z] += p[5, x] * p[x, y] * p[y, z]
    assert torch.allclose((p[5][:, None] * p).sum(0) @ p, third)
