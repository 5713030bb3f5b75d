"""Who sees whom in a training pass of the drafter, and the three ways to compute attention under it.

Place in the flow: `DraftModel.block_states` asks `attention_under` once per micro-batch and hands what it gets to every
layer of the drafter. Decoding has one block a row and needs no mask: `drafter.chunked_attention` serves it.

A row's queries are the A * B positions of its blocks; its keys are the T positions of the context and behind them those
of the blocks again. A query sees the context before its block's anchor and, in both directions, its own block, never
another one. `mask_mod` says that of one (query, key) as flex attention asks it, `dense_mask` of all at once. A block
that only fills up a row is anchored at 0 and sees itself alone, so no row of scores is masked whole.

    flex    fused, blocks of the mask that are empty are skipped; CUDA only, where its backward pass compiles
    sdpa    scaled_dot_product_attention with the dense mask [R, A * B, T + A * B]: any device, most of it masked
    parts   `drafter.chunked_attention`, context and own block apart under one softmax: any device, no mask

Paper: section 3.1 and reference (4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lilicorr.drafter import Attend, LayerKV, chunked_attention

ATTENTIONS = ("auto", "flex", "sdpa", "parts")
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def choose_attention(name: str, device: torch.device) -> str:
    """The attention that `train.attention` means on a device: `auto` is flex on CUDA and parts elsewhere.

    Raises ValueError for one that is none, and for flex where it has no backward pass.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"train.attention must be one of {', '.join(ATTENTIONS)}, got {name!r}")
    if name == "auto":
        return "flex" if device.type == "cuda" else "parts"
    if name == "flex" and device.type != "cuda":
        raise ValueError(
            f"train.attention flex has a backward pass on CUDA only, the workers are on {device.type}: "
            "set auto, sdpa or parts"
        )
    return name


def attention_under(name: str, anchors: Tensor, block_size: int, length: int) -> Attend:
    """Attention of blocks of `block_size` at `anchors` [R, A] over `length` positions of context.

    Takes and returns what `drafter.block_attention` does; the mask is made here, once for all layers.
    """
    if name == "parts":
        return chunked_attention
    if name == "sdpa":
        return functools.partial(_sdpa, dense_mask(anchors, block_size, length))
    assert name == "flex", f"attention {name!r} has no function"
    rows, num_queries = len(anchors), anchors.shape[1] * block_size
    seen = mask_mod(anchors, block_size, length)
    mask = create_block_mask(seen, rows, None, num_queries, length + num_queries, device=anchors.device)
    return functools.partial(_flex, mask)


def mask_mod(anchors: Tensor, block_size: int, length: int) -> MaskMod:
    """Whether a query of a row sees a key, as `create_block_mask` asks: (row, head, query, key) -> bool."""
    # a tensor: a number would be a constant of the compiled kernel, one for every length of a row
    border = torch.tensor(length, device=anchors.device)

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        before_anchor = (key < border) & (key < anchors[row, block])
        own_block = (key >= border) & ((key - border) // block_size == block)
        return before_anchor | own_block

    return seen


def dense_mask(anchors: Tensor, block_size: int, length: int) -> Tensor:
    """The whole mask [R, A * B, T + A * B], true where a query sees a key."""
    device, num_anchors = anchors.device, anchors.shape[1]
    context = torch.arange(length, device=device) < anchors[..., None]
    own = torch.eye(num_anchors, dtype=torch.bool, device=device).expand(len(anchors), -1, -1)
    return torch.cat([context, own.repeat_interleave(block_size, dim=2)], dim=2).repeat_interleave(block_size, dim=1)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """Flex attention as a kernel. Called plainly it would hold all scores and have no backward pass.

    `dynamic`: the lengths of rows and their numbers of anchors differ from micro-batch to micro-batch. `fullgraph`:
    what does not compile, or compiles too often, is an error and not the plain call.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _flex(mask: BlockMask, queries: Tensor, block_kv: LayerKV, context_kv: LayerKV, anchors: Tensor) -> Tensor:
    keys, values = _all_keys(block_kv, context_kv)
    # one type for all three: autocast does not reach into it, and the norms give queries and keys in fp32
    flat = queries.flatten(2, 3).to(values.dtype)
    mixed = compiled_flex()(flat, keys.to(values.dtype), values, block_mask=mask, enable_gqa=True)
    return mixed.view(queries.shape)


def _sdpa(mask: Tensor, queries: Tensor, block_kv: LayerKV, context_kv: LayerKV, anchors: Tensor) -> Tensor:
    # heads are repeated here: `enable_gqa` with a mask leaves only the kernel that holds all scores
    groups = queries.shape[1] // context_kv[0].shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1) for part in _all_keys(block_kv, context_kv))
    flat = queries.flatten(2, 3).to(values.dtype)
    mixed = scaled_dot_product_attention(flat, keys.to(values.dtype), values, attn_mask=mask[:, None])
    return mixed.view(queries.shape)


def _all_keys(block_kv: LayerKV, context_kv: LayerKV) -> LayerKV:
    """Keys and values of the context and behind them those of the blocks, two of [R, kv, T + A * B, d]."""
    keys, values = (torch.cat([c, b.flatten(2, 3)], dim=2) for c, b in zip(context_kv, block_kv, strict=True))
    return keys, values
