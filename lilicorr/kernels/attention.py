"""Attention of blocks of queries over a paged key-value cache.

Place in the flow: every layer of the target and of the drafter in the engine, for verification (causal in the
block), drafting (bidirectional in the block) and prefill (causal, long blocks). The block's own keys and values are
written into the pages before (`norm_rope`), so all keys are read in one way. Paper: section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def last_visible(num_queries: int, kv_lengths: Tensor, causal: bool, query_lengths: Tensor | None) -> Tensor:
    """The last position each query sees, [N, Q]; -1 for a query that is padding or has no keys."""
    index = torch.arange(num_queries, device=kv_lengths.device)
    lengths = torch.full_like(kv_lengths, num_queries) if query_lengths is None else query_lengths
    last = kv_lengths[:, None] - 1
    seen = last - lengths[:, None] + 1 + index if causal else last.expand(-1, num_queries)
    return seen.masked_fill(index >= lengths[:, None], -1)


def paged_attention_reference(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    causal: bool,
    query_lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition of `paged_attention`."""
    num_kv_heads, page_size = k_pages.shape[1:3]
    num_queries, num_heads = queries.shape[1:3]
    # the whole table, whatever the lengths: the shapes, and with them the rounding, are the caller's choice
    pages = page_table.clamp_min(0).long()
    keys, values = (x[pages].transpose(1, 2).flatten(2, 3) for x in (k_pages, v_pages))
    places = torch.arange(page_table.shape[1] * page_size, device=queries.device)
    # what was never written may be NaN, which no mask of the scores hides
    unwritten = (places >= kv_lengths[:, None])[:, None, :, None]
    keys, values = keys.masked_fill(unwritten, 0), values.masked_fill(unwritten, 0)
    seen = last_visible(num_queries, kv_lengths, causal, query_lengths)
    # the heads that share keys become rows of one product: [N, kv, group * Q, D]
    grouped = queries.transpose(1, 2).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    mask = (places <= seen[..., None]).repeat(1, num_heads // num_kv_heads, 1)[:, None]
    mixed = nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    mixed = mixed.unflatten(2, (-1, num_queries)).flatten(1, 2).transpose(1, 2)
    return mixed.masked_fill(seen[..., None, None] < 0, 0)


def paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    causal: bool,
    query_lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of queries [N, Q, heads, D] over the keys and values of their rows' pages: same shape.

    k_pages and v_pages [pages, kv heads, page size, D]; page_table [N, max pages] int32, entries behind a row's
    length are not read; kv_lengths [N] int counts a row's keys with the block's own, which are the last of them.
    `causal`: query i stands `query_lengths - 1 - i` places before the last key and sees nothing behind itself;
    otherwise every query sees every key. query_lengths [N] int, None for all Q: the queries behind it are padding
    and give 0, as does a row of length 0. `scale` is 1 / sqrt(D) where None.
    """
    return paged_attention_reference(queries, k_pages, v_pages, page_table, kv_lengths, causal, query_lengths, scale)
