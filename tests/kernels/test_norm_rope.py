"""Norm, rotation and page write: the reference against the drafter's modules, the Triton version against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lilicorr.drafter import DrafterAttention, RMSNorm, Rotary
from lilicorr.kernels.norm_rope import norm_rope, norm_rope_reference, norm_rope_triton, plan_writing, rope_tables
from test_drafter import make_shape

PAGE, NUM_PAGES = 64, 3


def make_inputs(
    heads: int, kv_heads: int, width: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Views of one product and positions, tables; pages of NaN; slots that reach both ends of pages and nothing."""
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(7, (heads + 2 * kv_heads) * width, generator=generator).to(device, dtype)
    queries, keys, values = product.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    qkv = [x.unflatten(-1, (-1, width)) for x in (queries, keys, values)]
    positions = torch.tensor([0, 1, 63, 64, 65, 128, 299], device=device)
    inv_freq = 10_000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    slots = torch.tensor([0, 63, 64, -1, 127, 191, -7], device=device)
    return qkv, [positions, *rope_tables(inv_freq, 300, scaling=1.25)], slots


def empty_pages(kv_heads: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(like, torch.nan).new_full((2, NUM_PAGES, kv_heads, PAGE, width), torch.nan).unbind()


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


def test_reference_is_the_drafters_norm_and_rotation():
    torch.manual_seed(0)
    heads, kv_heads, width = 4, 2, 8
    norm, rotary = RMSNorm(width, 1e-5).double(), Rotary(width, 10_000.0)
    torch.nn.init.normal_(norm.weight)
    queries, keys, values = (torch.randn(5, n, width, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    positions = torch.tensor([3, 9, 4, 0, 70])
    cos, sin = rope_tables(10_000.0 ** -(torch.arange(0, width, 2).double() / width), 80)
    k_pages, v_pages = empty_pages(kv_heads, width, keys)
    slots = torch.tensor([130, -1, 0, 63, 64])
    with torch.no_grad():
        rotated = norm_rope(
            queries, keys, values, positions, cos, sin, k_pages, v_pages, slots, norm.weight, None, norm.eps
        )
        assert torch.allclose(rotated, rotary(norm(queries), positions[:, None]))
        expected = rotary(keys, positions[:, None])
    written = [0, 2, 3, 4]
    places = (slots[written] // PAGE, slice(None), slots[written] % PAGE)
    assert torch.allclose(k_pages[places], expected[written])
    assert torch.equal(v_pages[places], values[written])
    assert k_pages.isfinite().sum() == v_pages.isfinite().sum() == len(written) * kv_heads * width


def test_in_bf16_the_drafter_rounds_where_the_kernel_does():
    """Once, behind norm, weight and rotation; an fp32 sum in another order may still fall on the other side."""
    torch.manual_seed(0)
    attention, positions = DrafterAttention(make_shape(head_dim=32)).bfloat16(), torch.arange(60)
    torch.nn.init.normal_(attention.k_norm.weight)
    states = torch.randn(1, 60, 32).bfloat16()
    tables = rope_tables(attention.rotary.frequencies(states.device, torch.float32), 60)
    with torch.no_grad():
        keys, values = (project(states)[0].unflatten(-1, (2, 32)) for project in (attention.k_proj, attention.v_proj))
        pages = empty_pages(2, 32, keys)
        norm_rope(None, keys, values, positions, *tables, *pages, positions, None, attention.k_norm.weight)
        expected = attention.keys_values(states, positions)[0][0]
        twice = attention.rotary(attention.k_norm(keys), positions[:, None]).movedim(0, 1)
    found = pages[0][0, :, :60]
    share, of_twice = ((found != other).double().mean() for other in (expected, twice))
    assert share < 1e-3 < of_twice and same(found, expected, 0.01)


@pytest.mark.parametrize("slots", [[0, 63, 64, -1, 127, 191, -7], [0, 63, 64, 3, 127, 191, 7]])
def test_layers_may_share_what_follows_from_positions(slots: list[int]):
    qkv, tables, _ = make_inputs(4, 2, 8)
    places, weight = torch.tensor(slots), torch.rand(8)
    writing = plan_writing(*tables, places, empty_pages(2, 8, qkv[0])[0])
    for scale in (1.0, 3.0):  # two layers
        layer = [scale * x for x in qkv]
        found, expected = empty_pages(2, 8, qkv[0]), empty_pages(2, 8, qkv[0])
        shared = norm_rope(*layer, *tables, *found, places, None, weight, writing=writing)
        assert torch.equal(shared, norm_rope_reference(*layer, *tables, *expected, places, None, weight))
        assert same(found[0], expected[0], 0.0) and same(found[1], expected[1], 0.0)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(1, 1, 32), (9, 3, 64), (8, 2, 128)])
def test_triton_equals_reference(heads: int, kv_heads: int, width: int, normed: bool, device: str):
    qkv, tables, slots = make_inputs(heads, kv_heads, width, device)
    weights = [torch.rand(width, device=device) + 0.5 if normed else None for _ in range(2)]
    found, expected = empty_pages(kv_heads, width, qkv[0]), empty_pages(kv_heads, width, qkv[0])
    queries = norm_rope_triton(*qkv, *tables, *found, slots, *weights, 1e-5)
    assert same(queries, norm_rope_reference(*qkv, *tables, *expected, slots, *weights, 1e-5))
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert found[0].isfinite().sum() == 5 * kv_heads * width


def test_heads_of_zero_and_equal_heads(device: str):
    """A norm of nothing divides by the root of eps alone."""
    qkv, tables, slots = make_inputs(4, 2, 32, device)
    qkv = [x.clone() for x in qkv]
    for x in qkv:
        x[0], x[1] = 0.0, 0.25
    weights = [torch.rand(32, device=device) + 0.5 for _ in range(2)]
    found, expected = empty_pages(2, 32, qkv[0]), empty_pages(2, 32, qkv[0])
    queries = norm_rope_triton(*qkv, *tables, *found, slots, *weights)
    assert same(queries, norm_rope_reference(*qkv, *tables, *expected, slots, *weights))
    assert same(found[0], expected[0]) and not queries[0].any() and not found[0][0, :, 0].any()


def test_positions_and_slots_may_be_columns(device: str):
    """As of blocks of one position, which are cut out of wider ones."""
    qkv, (positions, *tables), slots = make_inputs(4, 2, 32, device)
    found, expected = empty_pages(2, 32, qkv[0]), empty_pages(2, 32, qkv[0])
    columns = [torch.stack([x, x + 1], dim=1)[:, 0] for x in (positions, slots)]
    queries = norm_rope_triton(*qkv, columns[0], *tables, *found, columns[1])
    assert same(queries, norm_rope_reference(*qkv, positions, *tables, *expected, slots))
    assert same(found[0], expected[0]) and same(found[1], expected[1])


def test_triton_without_queries_in_half_precision_and_without_tokens(device: str):
    (_, keys, values), tables, slots = make_inputs(4, 2, 32, device, torch.bfloat16)
    weight = torch.rand(32, device=device).bfloat16()
    found, expected = empty_pages(2, 32, keys), empty_pages(2, 32, keys)
    assert norm_rope_triton(None, keys, values, *tables, *found, slots, None, weight) is None
    norm_rope_reference(None, keys, values, *tables, *expected, slots, None, weight)
    assert same(found[0], expected[0], 0.02) and same(found[1], expected[1], 0.0)
    found = empty_pages(2, 32, keys)
    none = [x[:0] for x in (keys, values)]
    norm_rope_triton(None, *none, tables[0][:0], *tables[1:], *found, slots[:0])
    assert found[0].isnan().all()
