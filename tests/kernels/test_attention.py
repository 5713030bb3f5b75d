"""Paged attention: the reference against the drafter's block attention and plain softmax, Triton against it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lilicorr.drafter import block_attention
from lilicorr.kernels import attention
from lilicorr.kernels.attention import (
    paged_attention,
    paged_attention_reference,
    paged_attention_triton,
    plan_reading,
)

PAGE = 64


def make_pages(
    lengths: list[int], kv_heads: int, width: int, max_pages: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pages in mixed order, NaN wherever no key was written; table entries behind a row's length are no pages."""
    generator = torch.Generator().manual_seed(1)
    needed = [math.ceil(length / PAGE) for length in lengths]
    order = (torch.randperm(sum(needed) + 2, generator=generator) if needed else torch.arange(2)).tolist()
    k_pages = torch.full((len(order), kv_heads, PAGE, width), math.nan, dtype=dtype)
    v_pages = k_pages.clone()
    table = torch.full((len(lengths), max_pages), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(needed[row]):
            page = table[row, index] = order.pop()
            count = min(PAGE, length - index * PAGE)
            k_pages[page, :, :count] = torch.randn(kv_heads, count, width, generator=generator).to(dtype)
            v_pages[page, :, :count] = torch.randn(kv_heads, count, width, generator=generator).to(dtype)
    return k_pages, v_pages, table, torch.tensor(lengths, dtype=torch.int32)


def sequence(pages: Tensor, table: Tensor, row: int, length: int) -> Tensor:
    """One row's keys or values [kv heads, length, D]."""
    return pages[table[row, : math.ceil(length / PAGE)].long()].transpose(0, 1).flatten(1, 2)[:, :length]


def test_reference_is_softmax_attention_row_by_row():
    lengths, real, num_queries = [5, 64, 130], [5, 2, 4], 5
    k_pages, v_pages, table, kv_lengths = make_pages(lengths, 2, 8, 4, torch.float64)
    queries = torch.randn(3, num_queries, 6, 8, dtype=torch.float64)
    for causal in (True, False):
        found = paged_attention_reference(
            queries, k_pages, v_pages, table, kv_lengths, causal, torch.tensor(real), scale=0.2
        )
        for row, length in enumerate(lengths):
            keys, values = (sequence(x, table, row, length) for x in (k_pages, v_pages))
            for query in range(num_queries):
                seen = length - real[row] + 1 + query if causal else length
                for head in range(6):
                    weights = (0.2 * keys[head // 3, :seen] @ queries[row, query, head]).softmax(-1)
                    expected = weights @ values[head // 3, :seen] * (query < real[row])
                    assert torch.allclose(found[row, query, head], expected), (causal, row, query, head)


@pytest.mark.parametrize("causal", [True, False])
def test_layers_may_share_what_follows_from_the_table(causal: bool):
    lengths, num_queries = [70, 0, 128], 3
    for real in (None, torch.tensor([3, 0, 2])):
        reading = None
        for dtype in (torch.float32, torch.float32):  # two layers
            k_pages, v_pages, table, kv_lengths = make_pages(lengths, 2, 16, 3, dtype)
            pages = (k_pages * torch.randn(16), v_pages * torch.randn(16))
            queries = torch.randn(3, num_queries, 4, 16)
            if reading is None:
                reading = plan_reading(table, kv_lengths, num_queries, 4, k_pages, causal, real)
            arguments = (queries, *pages, table, kv_lengths, causal, real)
            found = paged_attention(*arguments, reading=reading)
            assert torch.equal(found, paged_attention_reference(*arguments)) and found.isfinite().all()
            assert not found[1].any()


def test_reference_equals_the_drafters_block_attention():
    length, size = 70, 4
    k_pages, v_pages, table, kv_lengths = make_pages([length], 2, 8, 2, torch.float64)
    queries = torch.randn(1, size, 4, 8, dtype=torch.float64)
    keys, values = (sequence(x, table, 0, length)[None] for x in (k_pages, v_pages))
    start = length - size
    expected = block_attention(
        queries.transpose(1, 2)[:, :, None],
        (keys[:, :, None, start:], values[:, :, None, start:]),
        (keys[:, :, :start], values[:, :, :start]),
        torch.tensor([[start]]),
    )
    found = paged_attention(queries, k_pages, v_pages, table, kv_lengths, causal=False)
    assert torch.allclose(found, expected[:, :, 0].transpose(1, 2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "num_queries"), [(32, 2, 2, 1), (64, 6, 2, 16), (128, 4, 1, 5), (32, 8, 1, 16)]
)
def test_triton_equals_reference(width: int, heads: int, kv_heads: int, num_queries: int, causal: bool, device: str):
    """Lengths at the edges of pages, and rows that do not exist."""
    lengths = [max(num_queries, length) for length in (1, 63, 64, 65)] + [0, 200]
    pages = [x.to(device) for x in make_pages(lengths, kv_heads, width, 5)]
    queries = torch.randn(len(lengths), num_queries, heads, width, generator=torch.Generator().manual_seed(2))
    queries = queries.to(device)
    found = paged_attention_triton(queries, *pages, causal)
    assert torch.allclose(found, paged_attention_reference(queries, *pages, causal), atol=1e-5)
    assert not found[4].any()


def test_prefill_with_padded_queries(device: str):
    """Several tiles of queries a row; a fresh prompt, a later chunk, a single token and nothing."""
    lengths, real = [70, 150, 1, 0], [70, 40, 1, 0]
    pages = [x.to(device) for x in make_pages(lengths, 2, 32, 4)]
    queries = torch.randn(4, 70, 4, 32, generator=torch.Generator().manual_seed(3)).to(device)
    real_lengths = torch.tensor(real, device=device)
    found = paged_attention_triton(queries, *pages, True, real_lengths, scale=0.1)
    expected = paged_attention_reference(queries, *pages, True, real_lengths, scale=0.1)
    assert torch.allclose(found, expected, atol=1e-5)
    for row, count in enumerate(real):
        assert not found[row, count:].any() and found[row, :count].all()


@pytest.mark.parametrize("min_programs", [1, 1000])
def test_with_and_without_splits_and_empty_tables(min_programs: int, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "MIN_PROGRAMS", min_programs)
    pages = [x.to(device) for x in make_pages([130, 0], 1, 32, 3)]
    queries = torch.randn(2, 2, 1, 32, generator=torch.Generator().manual_seed(4)).to(device)
    found = paged_attention_triton(queries, *pages, True)
    assert torch.allclose(found, paged_attention_reference(queries, *pages, True), atol=1e-5)
    empty = paged_attention_triton(queries, *pages[:2], pages[2][:, :0], pages[3] * 0, False)
    assert not empty.any()
    assert paged_attention_triton(queries[:0], *pages[:2], pages[2][:0], pages[3][:0], True).shape == (0, 2, 1, 32)


@pytest.mark.parametrize("min_programs", [1, 1000])
def test_equal_scores_give_the_mean_and_large_ones_do_not_overflow(
    min_programs: int, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "MIN_PROGRAMS", min_programs)
    length = 130
    k_pages, v_pages, *rest = (x.to(device) for x in make_pages([length], 2, 32, 3))
    values = sequence(v_pages, rest[0], 0, length)
    nothing = torch.zeros(1, 1, 4, 32, device=device)
    found = paged_attention_triton(nothing, k_pages, v_pages, *rest, True)[0, 0]
    assert torch.allclose(found, values.mean(1).repeat_interleave(2, dim=0), atol=1e-5)
    queries = 1e4 * torch.randn(1, 3, 4, 32, generator=torch.Generator().manual_seed(7)).to(device)
    found = paged_attention_triton(queries, k_pages, v_pages, *rest, True)
    # scores of some ten thousand are known to a few thousandths
    assert torch.allclose(found, paged_attention_reference(queries, k_pages, v_pages, *rest, True), atol=0.02)
    keys = sequence(k_pages, rest[0], 0, length)
    best = (keys[0] @ queries[0, 2, 0]).argmax()
    assert torch.allclose(found[0, 2, 0], values[0, best], atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_position_has_the_same_bits_at_every_length(splits: int, device: str, monkeypatch: pytest.MonkeyPatch):
    """What stands behind a query in its block, and how far the row's pages go, may not change its sums."""
    monkeypatch.setattr(attention, "MIN_PROGRAMS", 16 * splits)
    monkeypatch.setattr(attention, "MAX_SPLITS", splits)
    num_queries, position = 70, 4 * PAGE - 2  # the next queries reach the fifth and the sixth page
    k_pages, v_pages, table, _ = (x.to(device) for x in make_pages([6 * PAGE], 1, 32, 6))
    query = torch.randn(32, generator=torch.Generator().manual_seed(6)).to(device)
    found = []
    for place, behind in ((0, 0), (0, 2), (3, 0), (3, 40), (0, 69), (1, 66)):
        queries = torch.zeros(1, num_queries, 1, 32, device=device)
        queries[0, place] = query
        lengths, real = (torch.tensor([count], device=device) for count in (position + 1 + behind, place + behind + 1))
        mixed = paged_attention_triton(queries, k_pages, v_pages, table, lengths, True, real)
        found.append(mixed[0, place])
    assert all(torch.equal(one, found[0]) for one in found) and found[0].isfinite().all()


def test_half_precision(device: str, half: torch.dtype):
    pages = [x.to(device) for x in make_pages([100, 20], 2, 64, 2, half)]
    queries = torch.randn(2, 16, 4, 64, generator=torch.Generator().manual_seed(5)).to(device, half)
    found = paged_attention_triton(queries, *pages, True)
    expected = paged_attention_reference(queries.float(), *(x.float() for x in pages[:2]), *pages[2:], True)
    assert found.dtype == half and torch.allclose(found.float(), expected, atol=0.02)


def test_odd_head_widths_are_named(device: str):
    pages = [x.to(device) for x in make_pages([3], 1, 8, 1)]
    with pytest.raises(ValueError, match="32, 64 or 128, got 8"):
        paged_attention_triton(torch.zeros(1, 1, 1, 8, device=device), *pages, True)
