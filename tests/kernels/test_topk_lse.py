"""Top-K and normaliser: the reference against a full sort, the Triton version against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lilicorr.kernels import topk_lse as topk_lse_file
from lilicorr.kernels.topk_lse import LANES, MAX_STEPS, topk_lse, topk_lse_reference, topk_lse_triton


def make_logits(vocab: int, seed: int = 0) -> Tensor:
    """Random, tied, all-equal, partly and wholly -inf, ascending and descending rows."""
    logits = 3 * torch.randn(7, vocab, generator=torch.Generator().manual_seed(seed))
    logits[1] = logits[1].round()
    logits[2] = 0.25
    logits[3, 3:] = -math.inf
    logits[4] = -math.inf
    logits[5] = torch.arange(vocab)
    logits[6] = -torch.arange(vocab)
    return logits


@pytest.mark.parametrize("vocab", [1, 7, 1000, 1025])
def test_reference_is_a_stable_sort(vocab: int):
    logits = make_logits(vocab)
    num_candidates = min(4, vocab)
    values, ids, lse = topk_lse_reference(logits, num_candidates)
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, ordered.values[:, :num_candidates])
    assert torch.equal(ids, ordered.indices[:, :num_candidates])
    assert torch.equal(lse, logits.logsumexp(-1)) and lse[4] == -math.inf


def test_reference_has_gradients_of_values_and_normaliser():
    logits = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    values, ids, lse = topk_lse(logits, 2)
    (values - lse[:, None]).sum().backward()
    expected = torch.zeros_like(logits).scatter_(1, ids, 1.0) - 2 * logits.detach().softmax(-1)
    assert torch.allclose(logits.grad, expected)


@pytest.mark.parametrize("num_candidates", [1, 6, 8, 16, 23, 32])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1025, 4097])
def test_triton_equals_reference(vocab: int, num_candidates: int, device: str):
    num_candidates = min(num_candidates, vocab)
    logits = make_logits(vocab).to(device)
    values, ids, lse = topk_lse_triton(logits, num_candidates)
    expected = topk_lse_reference(logits, num_candidates)
    assert torch.equal(values, expected[0]) and torch.equal(ids, expected[1])
    assert torch.allclose(lse, expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few_rows", [0, 64])
def test_triton_merges_slices_of_both_lengths(few_rows: int, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(topk_lse_file, "FEW_ROWS", few_rows)
    logits = make_logits(LANES * MAX_STEPS + 3).to(device)[[1, 2, 4, 6]]
    expected = topk_lse_reference(logits, 8)
    values, ids, lse = topk_lse_triton(logits, 8)
    assert torch.equal(values, expected[0]) and torch.equal(ids, expected[1])
    assert torch.allclose(lse, expected[2], rtol=1e-5, atol=1e-5)


def test_columns_behind_num_ids_do_not_count(device: str):
    logits = torch.randn(3, 1500, device=device)
    logits[:, 1200:] = 100.0
    for version in (topk_lse_reference, topk_lse_triton):
        values, ids, lse = version(logits, 4, num_ids=1200)
        assert torch.equal(values, logits[:, :1200].sort(dim=-1, descending=True).values[:, :4]) and ids.max() < 1200
        assert torch.allclose(lse, logits[:, :1200].logsumexp(-1))


def test_half_precision_and_strided_rows(device: str):
    logits = torch.randn(4, 3000, device=device).bfloat16()[::2]
    expected = topk_lse_reference(logits, 8)
    for found, wanted in zip(topk_lse_triton(logits, 8), expected, strict=True):
        assert torch.allclose(found.double(), wanted.double(), rtol=1e-5)
    assert topk_lse_triton(logits[:0], 8)[1].shape == (0, 8)


def test_limits_of_the_kernel(device: str):
    for wrong in (0, 33):
        with pytest.raises(ValueError, match=f"num_candidates must be in 1..32 on a GPU, got {wrong}"):
            topk_lse_triton(torch.zeros(1, 99, device=device), wrong)
    with pytest.raises(AssertionError, match="no gradient"):
        topk_lse_triton(torch.zeros(1, 9, device=device, requires_grad=True), 2)


@pytest.mark.parametrize("vocab", [9, 1500])
def test_broken_rows_have_ids_of_the_vocabulary(vocab: int, device: str):
    """They are looked up before anyone learns that the row is broken."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    expected = topk_lse_reference(logits[3:], 8)[1]
    logits[0] = logits[1, ::2] = math.nan
    logits[2, 5] = math.inf
    ids = topk_lse_triton(logits.to(device), 8)[1].cpu()
    assert ((ids >= 0) & (ids < vocab)).all() and torch.equal(ids[3:], expected)
