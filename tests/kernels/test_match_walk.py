"""Matching and walks: the reference against cosines by hand, the Triton version against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lilicorr.kernels.match_walk import match_scores, match_walk_reference, match_walk_triton
from lilicorr.lattice import WALKS

SCALE, EPS = 8.0, 1e-6


def make_vectors(blocks: int, slots: int, candidates: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out, into = torch.randn(2, blocks, slots, candidates, width, generator=generator)
    return torch.randn(blocks, width, generator=generator), out, into


def test_reference_is_cosines_and_a_softmax():
    start, out, into = (x.double() for x in make_vectors(3, 4, 2, 5))
    anchor_scores, pair_scores = match_scores(start, out, into, SCALE, EPS)
    cosine = torch.nn.functional.cosine_similarity
    for block in range(3):
        for there in range(2):
            expected = SCALE * cosine(start[block], into[block, 0, there], dim=0)
            assert torch.allclose(anchor_scores[block, there], expected)
            for here in range(2):
                expected = SCALE * cosine(out[block, 2, here], into[block, 3, there], dim=0)
                assert torch.allclose(pair_scores[block, 2, here, there], expected)
    ranks, confidence = match_walk_reference(start, out, into, SCALE, EPS)
    assert torch.equal(ranks, WALKS["greedy"](anchor_scores, pair_scores))
    assert torch.allclose(confidence[:, 0], anchor_scores.softmax(-1).max(-1).values)
    assert torch.allclose(confidence[1, 3], pair_scores[1, 2, ranks[1, 2]].softmax(-1)[ranks[1, 3]])


@pytest.mark.parametrize("walk", sorted(WALKS))
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 16), (3, 2, 2, 33), (5, 15, 8, 64), (2, 7, 16, 130), (4, 6, 3, 20), (2, 4, 20, 32)]
)
def test_triton_equals_reference(shape: tuple[int, int, int, int], walk: str, device: str):
    vectors = [x.to(device) for x in make_vectors(*shape)]
    ranks, confidence = match_walk_triton(*vectors, SCALE, EPS, walk)
    expected = match_walk_reference(*vectors, SCALE, EPS, walk)
    assert torch.equal(ranks, expected[0])
    assert torch.allclose(confidence, expected[1], atol=1e-5)


@pytest.mark.parametrize("walk", sorted(WALKS))
def test_ties_go_to_the_lower_rank_and_vectors_of_zero_are_no_nan(walk: str, device: str):
    start, out, into = (x.to(device) for x in make_vectors(3, 6, 4, 32))
    out[0], into[0] = out[0, :, :1], into[0, :, :1]  # all candidates of a slot are alike
    out[1], into[2], start[2] = 0, 0, 0
    for version in (match_walk_reference, match_walk_triton):
        ranks, confidence = version(start, out, into, SCALE, EPS, walk)
        assert not ranks[0].any() and not ranks[2].any() and not ranks[1, 1:].any()
        assert torch.allclose(confidence[0], torch.full_like(confidence[0], 0.25))
        assert torch.allclose(confidence[2], torch.full_like(confidence[2], 0.25))


def test_half_precision_vectors_are_summed_in_full(device: str, half: torch.dtype):
    vectors = [x.to(device, half) for x in make_vectors(4, 5, 8, 256)]
    ranks, confidence = match_walk_triton(*vectors, SCALE, EPS)
    expected = match_walk_reference(*(x.float() for x in vectors), SCALE, EPS)
    assert torch.equal(ranks, expected[0]) and torch.allclose(confidence, expected[1], atol=1e-5)


def test_a_walk_without_a_kernel_goes_over_the_scores(monkeypatch: pytest.MonkeyPatch, device: str):
    monkeypatch.setitem(WALKS, "worst", lambda anchor, pairs: WALKS["greedy"](-anchor, -pairs))
    vectors = [x.to(device) for x in make_vectors(2, 4, 4, 16)]
    ranks, confidence = match_walk_triton(*vectors, SCALE, EPS, "worst")
    expected = match_walk_reference(*vectors, SCALE, EPS, "worst")
    assert torch.equal(ranks, expected[0]) and torch.allclose(confidence, expected[1], atol=1e-5)
    assert not torch.equal(ranks, match_walk_triton(*vectors, SCALE, EPS)[0])


@pytest.mark.parametrize("walk", sorted(WALKS))
def test_scores_below_those_of_a_missing_candidate_are_chosen(walk: str, device: str):
    """Of three candidates none may lose to the fourth that only fills the kernel up: all scores are negative."""
    start, out, into = (x.abs().to(device) for x in make_vectors(3, 5, 3, 16))
    ranks, confidence = match_walk_triton(-start, -out, into, SCALE, EPS, walk)
    expected = match_walk_reference(-start, -out, into, SCALE, EPS, walk)
    assert torch.equal(ranks, expected[0]) and torch.allclose(confidence, expected[1], atol=1e-5)


@pytest.mark.parametrize("walk", sorted(WALKS))
def test_broken_vectors_have_ranks_of_the_lattice(walk: str, device: str):
    """They are looked up before anyone learns that the draft is broken."""
    start, out, into = (x.to(device) for x in make_vectors(2, 5, 6, 16))
    out[0], into[0] = float("nan"), float("nan")
    ranks, _ = match_walk_triton(start, out, into, SCALE, EPS, walk)
    assert ((ranks >= 0) & (ranks < 6)).all()
    assert torch.equal(ranks[1:], match_walk_reference(start[1:], out[1:], into[1:], SCALE, EPS, walk)[0])


def test_no_blocks(device: str):
    nobody = [x[:0].to(device) for x in make_vectors(1, 5, 4, 16)]
    assert [x.shape for x in match_walk_triton(*nobody, SCALE, EPS)] == [(0, 5), (0, 5)]
