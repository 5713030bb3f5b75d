"""Head norms, rotary embedding and the write into the pages, for the rows of a query-key-value product.

Place in the flow: between that product and `attention`, in every layer of the target and of the drafter, and without
queries for the drafter's context. Paper: section 3.1 (target and drafter are Qwen3 or Llama layers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from lilicorr.blocks import wide
from lilicorr.kernels.language import jit, next_power, tl


def rope_tables(inv_freq: Tensor, num_positions: int, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, D / 2] of the angles position * inv_freq [D / 2], times YaRN's attention scaling."""
    angles = torch.arange(num_positions, device=inv_freq.device, dtype=inv_freq.dtype)[:, None] * inv_freq
    return angles.cos() * scaling, angles.sin() * scaling


@dataclass(frozen=True)
class Writing:
    """What the reference needs besides heads and pages; the same for all layers of a pass (see `plan_writing`)."""

    cos: Tensor  # [T, 1, D], at least fp32
    sin: Tensor  # [T, 1, D], negative in the first half
    written: Tensor | None  # [W] tokens that are written; None: all
    rows: Tensor  # [W * kv heads] their rows of the pages seen as [pages * kv heads * page size, D]


def plan_writing(positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor) -> Writing:
    """What the reference's calls with these arguments share; `pages` is any layer's."""
    kind = wide(pages[:0]).dtype
    cos, sin = (table.index_select(0, positions).to(kind)[:, None] for table in (cos, sin))
    num_kv_heads, page_size = pages.shape[1:3]
    written = (slots >= 0).nonzero()[:, 0]
    everything = len(written) == len(slots)
    slots = slots if everything else slots.index_select(0, written)
    heads = torch.arange(num_kv_heads, device=slots.device)
    rows = (slots // page_size * num_kv_heads)[:, None].add(heads) * page_size + (slots % page_size)[:, None]
    full = (torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))
    return Writing(*full, None if everything else written, rows.flatten())


def _norm_rotate(x: Tensor, weight: Tensor | None, eps: float, writing: Writing) -> Tensor:
    """RMSNorm over the head where there is a weight, then rotation in the half-split convention: [T, heads, D]."""
    full = wide(x)
    if weight is not None:
        full = rms_norm(full, weight.shape, weight.to(full.dtype), eps)
    swapped = full.roll(full.shape[-1] // 2, dims=-1)  # (second half, first half)
    return (full * writing.cos).addcmul_(swapped, writing.sin).to(x.dtype)


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
    writing: Writing | None = None,
) -> Tensor | None:
    """The definition of `norm_rope`."""
    writing = plan_writing(positions, cos, sin, slots, k_pages) if writing is None else writing
    width = k_pages.shape[-1]
    for pages, new in ((k_pages, _norm_rotate(keys, k_weight, eps, writing)), (v_pages, values)):
        new = new if writing.written is None else new.index_select(0, writing.written)
        # copying whole rows is what the CPU does fast
        pages.view(-1, width).index_copy_(0, writing.rows, new.reshape(-1, width).to(pages.dtype))
    return None if queries is None else _norm_rotate(queries, q_weight, eps, writing)


@jit
def _rotated(x, token_stride, token, weight, eps, cos, sin, num_heads, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Both halves of one token's heads, [HEADS, HALF] each, normalised where there is a weight and rotated."""
    heads, half = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    at = x + token * token_stride + heads * 2 * HALF + half
    first = tl.load(at, mask=heads < num_heads, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=heads < num_heads, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(weight + half).to(tl.float32)
        second = second * scale * tl.load(weight + HALF + half).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@jit
def _norm_rope_kernel(
    queries,
    keys,
    values,
    positions,
    cos,
    sin,
    k_pages,
    v_pages,
    slots,
    q_weight,
    k_weight,
    out,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    num_kv_heads,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One token: program 0 writes its keys and values, program 1 its queries."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    cosines, sines = tl.load(cos + position * HALF + half), tl.load(sin + position * HALF + half)
    cosines, sines = cosines.to(tl.float32), sines.to(tl.float32)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            first, second = _rotated(keys, k_stride, token, k_weight, eps, cosines, sines, num_kv_heads, KV_HEADS, HALF)
            heads = tl.arange(0, KV_HEADS)[:, None]
            exists = (heads < num_kv_heads) & (half >= 0)
            place = ((slot // PAGE * num_kv_heads + heads) * PAGE + slot % PAGE) * 2 * HALF + half
            tl.store(k_pages + place, first, mask=exists)
            tl.store(k_pages + place + HALF, second, mask=exists)
            at = values + token * v_stride + heads * 2 * HALF + half
            tl.store(v_pages + place, tl.load(at, mask=exists, other=0.0), mask=exists)
            tl.store(v_pages + place + HALF, tl.load(at + HALF, mask=exists, other=0.0), mask=exists)
    elif queries is not None:
        first, second = _rotated(queries, q_stride, token, q_weight, eps, cosines, sines, num_heads, HEADS, HALF)
        heads = tl.arange(0, HEADS)[:, None]
        exists = (heads < num_heads) & (half >= 0)
        at = out + (token * num_heads + heads) * 2 * HALF + half
        tl.store(at, first, mask=exists)
        tl.store(at + HALF, second, mask=exists)


def norm_rope_triton(
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
    """The Triton version of `norm_rope`: one kernel, a program for the keys and one for the queries of a token."""
    num_tokens, num_kv_heads, width = keys.shape
    for x in (keys, values) if queries is None else (queries, keys, values):
        assert x.stride(2) == 1 and x.stride(1) == width, f"heads of strides {x.stride()} are not side by side"
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert width == next_power(width) and cos.shape[1] == width // 2, (width, cos.shape)
    num_heads = 0 if queries is None else queries.shape[1]
    out = None if queries is None else torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    positions, slots = positions.contiguous(), slots.contiguous()
    if num_tokens:
        strides = (0 if queries is None else queries.stride(0), keys.stride(0), values.stride(0))
        shape = (next_power(num_heads), next_power(num_kv_heads), width // 2, k_pages.shape[2])
        _norm_rope_kernel[(num_tokens, 1 if queries is None else 2)](
            queries,
            keys,
            values,
            positions,
            cos,
            sin,
            k_pages,
            v_pages,
            slots,
            q_weight,
            k_weight,
            out,
            *strides,
            num_heads,
            num_kv_heads,
            eps,
            *shape,
        )
    return out


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
    writing: Writing | None = None,
) -> Tensor | None:
    """Normalise and rotate queries and keys, write keys and values into the pages, return the queries.

    queries [T, heads, D] (None: there are none), keys and values [T, kv heads, D], which may be views of one
    product as long as a head is contiguous; positions [T] int64 into cos and sin [P, D / 2] of `rope_tables`.
    k_pages and v_pages [pages, kv heads, page size, D] are written in place: token t goes to place slots[t] %
    page size of page slots[t] // page size; slots [T] int64, a negative one is not written. q_weight and k_weight
    [D] are Qwen3's head norms, None for Llama. Returns [T, heads, D] contiguous, or None. Sums are at least fp32.
    `writing` is `plan_writing` of the same arguments, which calls on a CPU may share; the kernel needs none.
    """
    arguments = (queries, keys, values, positions, cos, sin, k_pages, v_pages, slots, q_weight, k_weight, eps)
    return norm_rope_triton(*arguments) if keys.is_cuda else norm_rope_reference(*arguments, writing)
