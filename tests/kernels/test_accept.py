"""Accept: the Triton version must give the very tokens of `verify`, for every contract and mixed rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lilicorr.blocks import Proposal, Verdict
from lilicorr.kernels.accept import MAX_OWN, accept, accept_triton
from lilicorr.verify import DRAW_TILE, PROPOSAL_DRAW, Sampling, draw, uniform, verify
from test_verify import greedy_rows

NUM_ROWS, NUM_SLOTS = 6, 2


def make_sampling(device: str, filtered: bool = False) -> Sampling:
    """Rows that are greedy and of several temperatures, with and without filters, of any seed."""
    generator = torch.Generator().manual_seed(5)
    off = torch.zeros(NUM_ROWS, dtype=torch.int64)
    return Sampling(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.6, 0.0, 1.0], dtype=torch.float64).to(device),
        top_k=(torch.tensor([0, 3, 0, 5, 2, 0]) if filtered else off).to(device),
        top_p=(torch.tensor([1.0, 1.0, 0.7, 0.9, 0.5, 0.4]) if filtered else torch.ones(NUM_ROWS)).to(device),
        seeds=torch.randint(-(2**62), 2**62, (NUM_ROWS,), generator=generator).to(device),
        positions=torch.randint(0, 4000, (NUM_ROWS,), generator=generator).to(device),
        any_filtered=filtered,
        min_p=torch.tensor([0.5, 0.0, 0.0, 0.1, 0.0, 0.2], dtype=torch.float64).to(device) if filtered else None,
    )


def make_logits(vocab: int, device: str) -> Tensor:
    """Random rows, one all-equal, one half -inf, one with ties."""
    logits = 2 * torch.randn(NUM_ROWS, NUM_SLOTS + 1, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = 0.5
    logits[2, :, 1::2] = -math.inf
    logits[4] = logits[4].round()
    return logits.to(device)


def drawn_proposal(logits: Tensor, sampling: Sampling, num_own: int) -> Proposal:
    """Drafts drawn from a few of each slot's likeliest ids, near the target's own law, in no order."""
    best = logits[:, :-1].topk(num_own, dim=-1)
    probs = (best.values + 0.3 * torch.rand(best.values.shape, device=logits.device)).softmax(-1).flip(-1)
    support_ids = best.indices.flip(-1)
    positions = sampling.positions[:, None] + torch.arange(NUM_SLOTS, device=logits.device)
    ranks = draw(probs, uniform(sampling.seeds[:, None].expand_as(positions), positions, PROPOSAL_DRAW))
    return Proposal(support_ids.gather(-1, ranks[..., None])[..., 0], probs, support_ids)


def assert_same(found: Verdict, expected: Verdict) -> None:
    assert torch.equal(found.num_accepted, expected.num_accepted), (found, expected)
    assert torch.equal(found.next_ids, expected.next_ids), (found, expected)


@pytest.mark.parametrize("vocab", [1, 7, 1000, DRAW_TILE + 1, 4097])
@pytest.mark.parametrize("filtered", [False, True])
def test_point_masses_get_the_same_verdicts(vocab: int, filtered: bool, device: str):
    logits, sampling = make_logits(vocab, device), make_sampling(device, filtered)
    drafts = logits[:, :-1].argmax(-1)
    drafts[0, 1] = vocab // 2
    assert_same(accept_triton(Proposal(drafts), logits, sampling), verify(Proposal(drafts), logits, sampling))


@pytest.mark.parametrize("vocab", [7, DRAW_TILE + 1, 9000])
@pytest.mark.parametrize("filtered", [False, True])
def test_sparse_proposals_get_the_same_verdicts(vocab: int, filtered: bool, device: str):
    torch.manual_seed(vocab)
    logits, sampling = make_logits(vocab, device), make_sampling(device, filtered)
    lengths = set()
    for num_own, shift in ((1, 0), (5, 1), (5, 2)):
        here = replace(sampling, positions=sampling.positions + shift)
        proposal = drawn_proposal(logits, here, num_own)
        verdict = accept_triton(proposal, logits, here)
        assert_same(verdict, verify(proposal, logits, here))
        lengths |= set(verdict.num_accepted.tolist())
    assert len(lengths) > 1


@pytest.mark.parametrize("vocab", [7, DRAW_TILE + 1])
def test_slots_behind_the_length_are_not_tested(vocab: int, device: str):
    torch.manual_seed(vocab)
    logits, sampling = 3 * make_logits(vocab, device), make_sampling(device)
    lengths = torch.tensor([0, 1, 2, 0, 1, 1], device=device)
    point, sparse = Proposal(logits[:, :-1].argmax(-1)), drawn_proposal(logits, sampling, 3)
    for proposal in (point, sparse):
        proposal = replace(proposal, lengths=lengths)
        verdict = accept_triton(proposal, logits, sampling)
        assert_same(verdict, verify(proposal, logits, sampling))
        assert (verdict.num_accepted <= lengths).all() and verdict.num_accepted.any()


def test_greedy_rows_and_ties(device: str):
    logits = torch.zeros(3, 3, 2 * DRAW_TILE, device=device)
    logits[:, :, [DRAW_TILE + 5, DRAW_TILE + 9, 40]] = torch.tensor([2.0, 2.0, 1.0], device=device)
    drafts = torch.tensor([[DRAW_TILE + 5] * 2, [DRAW_TILE + 9] * 2, [DRAW_TILE + 5, 40]], device=device)
    verdict = accept_triton(Proposal(drafts), logits, greedy_rows(3, device))
    assert verdict.num_accepted.tolist() == [2, 0, 1]
    assert verdict.next_ids.tolist() == [DRAW_TILE + 5] * 3


def test_zero_slots_no_rows_and_half_precision(device: str):
    logits, sampling = make_logits(2000, device).bfloat16(), make_sampling(device)
    first = logits[:, :1].contiguous()
    empty = Proposal(torch.empty(NUM_ROWS, 0, dtype=torch.int64, device=device))
    verdict = accept_triton(empty, first, sampling)
    assert_same(verdict, verify(empty, first, sampling))
    assert not verdict.num_accepted.any()
    nobody = greedy_rows(0, device)
    assert accept_triton(Proposal(empty.token_ids[:0]), first[:0], nobody).next_ids.shape == (0,)


def test_a_vanishing_residual_falls_back_to_the_target(device: str):
    vocab, num_rows = DRAW_TILE + 40, 12
    logits = torch.full((1, 2, vocab), -math.inf)
    logits[0, :, [5, vocab - 1]] = 0.0
    support = torch.tensor([[[3, 5, vocab - 1, 9]]]).expand(num_rows, -1, -1).to(device)
    probs = torch.tensor([[[1e-12, 0.5 - 1e-12, 0.5, 0.0]]], dtype=torch.float64).expand(num_rows, -1, -1).to(device)
    proposal = Proposal(torch.full((num_rows, 1), 3, device=device), probs, support)
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    ones = torch.ones(num_rows, device=device)
    sampling = Sampling(ones, zeros, ones, zeros, zeros + torch.arange(num_rows, device=device), any_filtered=False)
    logits = logits.to(device).expand(num_rows, -1, -1).contiguous()
    verdict = accept_triton(proposal, logits, sampling)
    assert_same(verdict, verify(proposal, logits, sampling))
    assert not verdict.num_accepted.any() and set(verdict.next_ids.tolist()) == {5, vocab - 1}


@pytest.mark.parametrize("own_ids", [None, MAX_OWN + 1])
def test_laws_of_many_ids_have_the_reference_only(device: str, own_ids: int | None):
    vocab = MAX_OWN + 9
    logits, sampling = make_logits(vocab, device), make_sampling(device)
    if own_ids is None:
        proposal = Proposal(logits[:, :-1].argmax(-1), logits[:, :-1].softmax(-1))
    else:
        proposal = drawn_proposal(logits, sampling, own_ids)
    assert_same(accept(proposal, logits, sampling), verify(proposal, logits, sampling))
    with pytest.raises(AssertionError, match="no kernel for a law of"):
        accept_triton(proposal, logits, sampling)
    greedy = greedy_rows(len(logits), device)  # asks for no law
    assert_same(accept_triton(proposal, logits, greedy), verify(proposal, logits, greedy))


@pytest.mark.parametrize("vocab", [7, DRAW_TILE + 1, 3 * DRAW_TILE - 5])
@pytest.mark.parametrize("filtered", [False, True])
def test_broken_rows_draw_tokens_of_the_vocabulary_and_harm_no_other(vocab: int, filtered: bool, device: str):
    torch.manual_seed(vocab)
    logits, sampling = make_logits(vocab, device), make_sampling(device, filtered)
    point, sparse = Proposal(logits[:, :-1].argmax(-1)), drawn_proposal(logits, sampling, 3)
    broken = logits.clone()
    broken[0, :, ::2] = broken[1] = broken[3, 1, vocab - 1] = math.nan
    broken[2, 0, 3] = math.inf
    for proposal in (point, sparse):
        expected, verdict = verify(proposal, logits, sampling), accept_triton(proposal, broken, sampling)
        assert ((verdict.next_ids >= 0) & (verdict.next_ids < vocab)).all()
        assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= NUM_SLOTS)).all()
        for found in (verdict, verify(proposal, broken, sampling)):
            rows = [4, 5]
            assert_same(
                Verdict(found.num_accepted[rows], found.next_ids[rows]),
                Verdict(expected.num_accepted[rows], expected.next_ids[rows]),
            )


@pytest.mark.parametrize("vocab", [7, DRAW_TILE + 1])
@pytest.mark.parametrize("filtered", [False, True])
def test_rows_of_minus_infinity_draw_tokens_of_the_vocabulary(vocab: int, filtered: bool, device: str):
    """They are no law of a token; the request ends for it, once its token has been looked up."""
    logits, sampling = make_logits(vocab, device), make_sampling(device, filtered)
    point, sparse = Proposal(logits[:, :-1].argmax(-1)), drawn_proposal(logits, sampling, 3)
    nothing = torch.full_like(logits, -math.inf)
    for proposal in (point, sparse):
        verdict = accept_triton(proposal, nothing, sampling)
        assert ((verdict.next_ids >= 0) & (verdict.next_ids < vocab)).all()
        assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= NUM_SLOTS)).all()
    greedy = greedy_rows(NUM_ROWS, device)
    assert_same(accept_triton(point, nothing, greedy), verify(point, nothing, greedy))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_blocks_may_be_cut_out_of_wider_passes(num_rows: int, device: str):
    """As in passes of one shape; `contiguous` leaves the strides of a single block as they are."""
    wide, sampling = make_logits(40, device), make_sampling(device)
    sampling = replace(
        sampling, **{name: getattr(sampling, name)[:num_rows] for name in ("temperature", "seeds", "positions")}
    )
    for num_queries in (1, NUM_SLOTS):
        logits = wide[:num_rows, :num_queries].contiguous()
        assert num_rows > 1 or logits.stride(0) != num_queries * logits.stride(1)
        proposal = Proposal(logits[:, :-1].argmax(-1))
        assert_same(accept_triton(proposal, logits, sampling), verify(proposal, logits.clone(), sampling))


def test_nothing_of_a_law_that_is_nan_is_accepted(device: str):
    logits, sampling = make_logits(40, device), make_sampling(device)
    proposal = drawn_proposal(logits, sampling, 4)
    proposal = replace(proposal, probs=proposal.probs * math.nan)
    nobody = Proposal(proposal.token_ids[:, :0])
    drawn = sampling.temperature > 0
    for version in (accept_triton, verify):
        verdict = version(proposal, logits, sampling)
        assert not verdict.num_accepted[drawn].any()
        assert torch.equal(verdict.next_ids[drawn], verify(nobody, logits[:, :1], sampling).next_ids[drawn])
