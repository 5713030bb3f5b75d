"""What holds of every head: shapes, losses, gradients, batches, losslessness, and the law at temperature 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lilicorr.blocks import BlockLabels, DraftOutput, Proposal
from lilicorr.config import DrafterConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.kernels.match_walk import match_scores
from lilicorr.losses import total_loss
from lilicorr.target import Target
from lilicorr.verify import Sampling
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
    shared = {"embed": draft.embed, "vocab_ids": draft.vocab_ids, "num_ids": draft.num_ids}
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


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_padding_rows_are_never_proposed(form: str, narrow: bool) -> None:
    """Not even where the drafter finds them the likeliest; a drawn proposal's law has nothing there."""
    head, (draft, labels) = make_form(form), make_blocks()
    draft = narrowed(draft, labels) if narrow else draft
    num_ids = int((draft.token_ids(torch.arange(draft.logits.shape[-1])) < 60).sum())
    logits = draft.logits.clone()
    logits[..., num_ids:] += 50
    draft = replace(draft, logits=logits, num_ids=num_ids)
    assert (head.propose(replace(draft, num_ids=None)).token_ids >= 60).any()
    for sampling in (None, mixed_sampling(7)):
        proposal = head.propose(draft, sampling)
        assert (proposal.token_ids < 60).all()
        if proposal.probs is not None:
            ids = torch.arange(67).expand_as(proposal.probs) if proposal.support_ids is None else proposal.support_ids
            assert ids.shape == proposal.probs.shape and not proposal.probs[ids >= 60].any()
            assert torch.allclose(proposal.probs.sum(-1), torch.ones(7, 5, dtype=torch.float64))
    assert torch.isfinite(total_loss(head.loss(draft, labels, progress=0.5)))


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
    whole = head.loss(*blocks, 0.5)
    exact = float(total_loss(whole).detach())
    head.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = head.loss(half, labels, 0.5)
        loss = total_loss(terms)
    assert {number.dtype for term in terms.values() for number in (term.sum, term.count)} == {torch.float32}
    assert all(float(terms[name].count) == float(whole[name].count) for name in terms if name.endswith("_prefix"))
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


def test_scores_and_the_targets_logits_are_whole_under_autocast() -> None:
    """Their differences are what Eq. (3) and (4) are about; in bfloat16 they would be steps of 0.03 and 0.125."""
    torch.manual_seed(0)
    start, out, into = torch.randn(3, 8), torch.randn(3, 5, 4, 8), torch.randn(3, 5, 4, 8)
    _, labels = converted(*make_blocks(), torch.float32)
    ids = torch.randint(0, 67, (*labels.token_ids.shape, 4))
    plain = (*match_scores(start, out, into, 8.0, 1e-4), labels.target_logits_at(ids))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = (*match_scores(start, out, into, 8.0, 1e-4), labels.target_logits_at(ids))
    assert all(torch.equal(one, other) for one, other in zip(plain, found))
