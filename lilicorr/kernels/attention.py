"""Attention of blocks of queries over a paged key-value cache.

Place in the flow: every layer of the target and of the drafter in the engine, for verification (causal in the
block), drafting (bidirectional in the block) and prefill (causal, long blocks). The block's own keys and values are
written into the pages before (`norm_rope`), so all keys are read in one way. Paper: section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lilicorr.kernels.language import ceil_div, jit, next_power, tl

TILE_ROWS = 64  # query rows of one program: positions times the heads that share keys
MIN_PROGRAMS = 264  # two for every multiprocessor of a large GPU: with fewer, the keys are split further
MAX_SPLITS = 16
HEAD_WIDTHS = (32, 64, 128)
LOG2_E = 1.4426950408889634


def last_visible(num_queries: int, kv_lengths: Tensor, causal: bool, query_lengths: Tensor | None) -> Tensor:
    """The last position each query sees, [N, Q]; -1 for a query that is padding or has no keys."""
    index = torch.arange(num_queries, device=kv_lengths.device)
    lengths = torch.full_like(kv_lengths, num_queries) if query_lengths is None else query_lengths
    last = kv_lengths[:, None] - 1
    seen = last - lengths[:, None] + 1 + index if causal else last.expand(-1, num_queries)
    return seen.masked_fill(index >= lengths[:, None], -1)


@dataclass(frozen=True)
class Reading:
    """What the reference needs besides queries and pages; the same for all layers of a pass (see `plan_reading`)."""

    rows: Tensor  # [N * kv heads * P] rows of the pages seen as [pages * kv heads, page size * D]
    unwritten: Tensor  # [N, 1, L, 1] bool, the last L places of the table, true behind a row's length
    bias: Tensor  # [N, 1, group * Q, P * page size] 0 where a query sees a key, else -inf
    unseeing: Tensor | None  # [N, Q, 1, 1] bool, queries without a key; None: there is none

    def gather(self, pages: Tensor) -> Tensor:
        """The pages of every row as one [N, kv heads, P * page size, D], a copy; what was never written is 0 there."""
        num_kv_heads, page_size, width = pages.shape[1:]
        rows = pages.view(-1, page_size * width).index_select(0, self.rows)
        whole = rows.view(len(self.unwritten), num_kv_heads, -1, width)
        # it may be NaN, which no mask of the scores hides
        whole[:, :, whole.shape[2] - self.unwritten.shape[2] :].masked_fill_(self.unwritten, 0)
        return whole


def plan_reading(
    page_table: Tensor,
    kv_lengths: Tensor,
    num_queries: int,
    num_heads: int,
    pages: Tensor,
    causal: bool,
    query_lengths: Tensor | None = None,
) -> Reading:
    """What the reference's calls with these arguments share; `pages` is any layer's."""
    num_kv_heads, page_size = pages.shape[1:3]
    heads = torch.arange(num_kv_heads, device=pages.device)[:, None]
    rows = page_table.clamp_min(0).long()[:, None] * num_kv_heads + heads
    # the whole table, whatever the lengths: the shapes, and with them the rounding, are the caller's choice
    places = torch.arange(page_table.shape[1] * page_size, device=pages.device)
    seen = last_visible(num_queries, kv_lengths, causal, query_lengths)
    bias = torch.zeros(len(seen), num_queries, len(places), dtype=pages.dtype, device=pages.device)
    bias.masked_fill_(places > seen[..., None], float("-inf"))
    # the heads that share keys are rows of one product
    bias = bias[:, None].expand(-1, num_heads // num_kv_heads, -1, -1).flatten(1, 2)[:, None]
    shortest = int(kv_lengths.min()) if len(kv_lengths) else 0
    unwritten = (places[shortest:] >= kv_lengths[:, None])[:, None, :, None]
    unseeing = (seen < 0)[..., None, None]
    return Reading(rows.flatten(), unwritten, bias, unseeing if unseeing.any() else None)


def paged_attention_reference(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    causal: bool,
    query_lengths: Tensor | None = None,
    scale: float | None = None,
    reading: Reading | None = None,
) -> Tensor:
    """The definition of `paged_attention`."""
    num_queries, num_heads = queries.shape[1:3]
    if reading is None:
        shape = (num_queries, num_heads, k_pages)
        reading = plan_reading(page_table, kv_lengths, *shape, causal, query_lengths)
    grouped = queries.transpose(1, 2).unflatten(1, (k_pages.shape[1], -1)).flatten(2, 3)  # [N, kv, group * Q, D]
    keys, values = reading.gather(k_pages), reading.gather(v_pages)
    mixed = nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=reading.bias, scale=scale)
    mixed = mixed.unflatten(2, (-1, num_queries)).flatten(1, 2).transpose(1, 2)
    return mixed if reading.unseeing is None else mixed.masked_fill(reading.unseeing, 0)


@jit
def _attend_kernel(
    queries,
    k_pages,
    v_pages,
    page_table,
    kv_lengths,
    query_lengths,
    out,
    norms,
    num_queries,
    num_heads,
    max_pages,
    scale,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A tile of queries of the heads that share keys, over one split of the row's pages.

    A split takes every SPLITS-th page, whatever the row's length: pages that a query does not see add zeros to the
    sums, and group nothing differently.
    """
    num_tiles = (num_queries + TILE - 1) // TILE
    block, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lengths + block).to(tl.int32)
    num_real = num_queries
    if query_lengths is not None:
        num_real = tl.load(query_lengths + block).to(tl.int32)
    rows, entries, places = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    query = tile * TILE + rows // GROUP
    exists = (rows < TILE * GROUP) & (query < num_queries)
    # the first place that a row does not see, and that none does
    end = tl.where(exists & (query < num_real), length - (num_real - 1 - query if CAUSAL else query * 0), 0)
    num_pages = (tl.max(end, axis=0) + PAGE - 1) // PAGE
    rows_at = (block * num_queries + query) * num_heads + kv_head * GROUP + rows % GROUP
    q = tl.load(queries + rows_at[:, None] * WIDTH + entries[None, :], mask=exists[:, None], other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    num_kv_heads = tl.num_programs(1)
    for number in range(split, num_pages, SPLITS):
        page = tl.load(page_table + block * max_pages + number).to(tl.int64)
        at = ((page * num_kv_heads + kv_head) * PAGE + places[:, None]) * WIDTH + entries[None, :]
        place = number * PAGE + places
        written = (place < length)[:, None]
        keys = tl.load(k_pages + at, mask=written, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(place[None, :] < end[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(largest - shift)
        total = total * kept + tl.sum(weights, axis=1)
        values = tl.load(v_pages + at, mask=written, other=0.0)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * kept[:, None], input_precision="ieee")
        largest = new_largest
    mixed /= tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + rows_at[:, None] * WIDTH + entries[None, :], mixed, mask=exists[:, None])
    else:
        parts_at = rows_at * SPLITS + split
        tl.store(out + parts_at[:, None] * WIDTH + entries[None, :], mixed, mask=exists[:, None])
        tl.store(norms + parts_at, largest + tl.log2(total), mask=exists)


@jit
def _reduce_kernel(parts, norms, out, num_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """The splits of some query rows, weighted by their normalisers."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    splits, entries, exists = tl.arange(0, SPLITS), tl.arange(0, WIDTH), rows < num_rows
    at = rows[:, None] * SPLITS + splits[None, :]
    norm = tl.load(norms + at, mask=exists[:, None], other=float("-inf"))
    largest = tl.max(norm, axis=1)
    weights = tl.exp2(norm - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    weights /= tl.where(largest == float("-inf"), 1.0, tl.sum(weights, axis=1))[:, None]
    mixed = tl.load(parts + at[:, :, None] * WIDTH + entries[None, None, :], mask=exists[:, None, None], other=0.0)
    mixed = tl.sum(mixed * weights[:, :, None], axis=1)
    tl.store(out + rows[:, None] * WIDTH + entries[None, :], mixed, mask=exists[:, None])


def check_width(width: int) -> None:
    """Raise ValueError for a head width [D] that the kernel does not take."""
    if width not in HEAD_WIDTHS:
        raise ValueError(f"the width of a head on a GPU must be 32, 64 or 128, got {width}")


def paged_attention_triton(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    causal: bool,
    query_lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The Triton version of `paged_attention`; the number of splits depends on shapes alone, never on lengths."""
    num_blocks, num_queries, num_heads, width = queries.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    check_width(width)
    assert page_size == next_power(page_size) and page_size >= 16, f"page size {page_size} is no power of two >= 16"
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and page_table.is_contiguous()
    queries, kv_lengths = queries.contiguous(), kv_lengths.contiguous()
    query_lengths = None if query_lengths is None else query_lengths.contiguous()
    out = torch.empty_like(queries)
    if not out.numel():
        return out
    group, max_pages = num_heads // num_kv_heads, page_table.shape[1]
    tile = min(next_power(num_queries), max(1, TILE_ROWS // group))
    programs = num_blocks * ceil_div(num_queries, tile) * num_kv_heads
    splits = max(1, min(MAX_SPLITS, next_power(ceil_div(MIN_PROGRAMS, programs)), next_power(max_pages)))
    num_rows = num_blocks * num_queries * num_heads
    if splits == 1:
        parts, norms = out, None
    else:
        parts = torch.empty(num_rows, splits, width, device=queries.device)
        norms = torch.empty(num_rows, splits, device=queries.device)
    sizes = (num_queries, num_heads, max_pages, (width**-0.5 if scale is None else scale) * LOG2_E)
    shape = (causal, group, tile, max(16, next_power(tile * group)), width, page_size, splits)
    _attend_kernel[(num_blocks * ceil_div(num_queries, tile), num_kv_heads, splits)](
        queries, k_pages, v_pages, page_table, kv_lengths, query_lengths, parts, norms, *sizes, *shape
    )
    if splits > 1:
        rows = TILE_ROWS // splits
        _reduce_kernel[(ceil_div(num_rows, rows),)](parts, norms, out, num_rows, rows, width, splits)
    return out


def paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    causal: bool,
    query_lengths: Tensor | None = None,
    scale: float | None = None,
    reading: Reading | None = None,
) -> Tensor:
    """Softmax attention of queries [N, Q, heads, D] over the keys and values of their rows' pages: same shape.

    k_pages and v_pages [pages, kv heads, page size, D]; page_table [N, max pages] int32, entries behind a row's
    length are not read; kv_lengths [N] int counts a row's keys with the block's own, which are the last of them.
    `causal`: query i stands `query_lengths - 1 - i` places before the last key and sees nothing behind itself;
    otherwise every query sees every key. query_lengths [N] int, None for all Q: the queries behind it are padding
    and give 0, as does a row of length 0. `scale` is 1 / sqrt(D) where None. `reading` is `plan_reading` of the same
    arguments, which calls on a CPU may share; the kernel reads the table itself.
    """
    arguments = (queries, k_pages, v_pages, page_table, kv_lengths, causal, query_lengths, scale)
    return paged_attention_triton(*arguments) if queries.is_cuda else paged_attention_reference(*arguments, reading)
