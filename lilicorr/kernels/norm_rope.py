"""Head norms, rotary embedding and the write into the pages, for the rows of a query-key-value product.

Place in the flow: between that product and `attention`, in every layer of the target and of the drafter, and without
queries for the drafter's context. Paper: section 3.1 (target and drafter are Qwen3 or Llama layers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lilicorr.blocks import wide


def rope_tables(inv_freq: Tensor, num_positions: int, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, D / 2] of the angles position * inv_freq [D / 2], times YaRN's attention scaling."""
    angles = torch.arange(num_positions, device=inv_freq.device, dtype=inv_freq.dtype)[:, None] * inv_freq
    return angles.cos() * scaling, angles.sin() * scaling


def _norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm over the head where there is a weight, then rotation in the half-split convention: [T, heads, D]."""
    full = wide(x)
    if weight is not None:
        full = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps) * weight
    first, second = full.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def norm_rope_reference(
    queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | None:
    """The definition of `norm_rope`."""
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    written = slots >= 0
    page_size = k_pages.shape[2]
    pages, places = slots[written] // page_size, slots[written] % page_size
    k_pages[pages, :, places] = _norm_rotate(keys, k_weight, eps, cos, sin)[written].to(k_pages.dtype)
    v_pages[pages, :, places] = values[written].to(v_pages.dtype)
    return None if queries is None else _norm_rotate(queries, q_weight, eps, cos, sin)


def norm_rope(
    queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | None:
    """Normalise and rotate queries and keys, write keys and values into the pages, return the queries.

    queries [T, heads, D] (None: there are none), keys and values [T, kv heads, D], which may be views of one
    product as long as a head is contiguous; positions [T] int64 into cos and sin [P, D / 2] of `rope_tables`.
    k_pages and v_pages [pages, kv heads, page size, D] are written in place: token t goes to place slots[t] %
    page size of page slots[t] // page size; slots [T] int64, a negative one is not written. q_weight and k_weight
    [D] are Qwen3's head norms, None for Llama. Returns [T, heads, D] contiguous, or None. Sums are at least fp32.
    """
    return norm_rope_reference(
        queries, keys, values, positions, cos, sin, k_pages, v_pages, slots, q_weight, k_weight, eps
    )
