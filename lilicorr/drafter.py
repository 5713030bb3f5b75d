"""The DFlash drafter: a few transformer layers that fill a block of mask tokens in one pass.

Place in the flow: `fuse` turns the target's captured features into the context, `context_kv` into keys and
values of every layer, and `forward` runs blocks [anchor, mask, ..., mask] over them. Training runs all anchors
of whole rows at once; decoding runs one block per row over a `ContextCache`. Both are the same code, and the
tests hold them equal.

A block anchored at position a sees the context of positions before a, never a's own: the target has not been
run on the anchor yet. Inside the block attention is bidirectional. Paper: section 3.1 and reference (4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from lilicorr.blocks import IN_PLACE, BlockSpec, check_layer_ids, wide
from lilicorr.config import DrafterConfig, YarnConfig
from lilicorr.target import Target, default_layer_ids, rope_theta, target_head_dim

SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "num_captured_layers")
SCORE_BYTES = 256 << 20  # of attention scores in fp32 that exist at once
LayerKV = tuple[Tensor, Tensor]  # keys and values of one layer, each [R, kv heads, T, head width]
Attend = Callable[[Tensor, LayerKV, LayerKV, Tensor], Tensor]  # as `block_attention`


@dataclass(frozen=True)
class DrafterShape:
    """The drafter's resolved sizes, as a checkpoint's config.json states them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_captured_layers: int
    vocab_size: int
    num_target_layers: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    yarn: YarnConfig | None = None  # at inference only

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a drafter must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads {self.num_heads}, got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")


def captured_layer_ids(config: DrafterConfig, num_target_layers: int) -> tuple[int, ...]:
    """The layers of a target, 0-based and ascending, that the drafter reads: those that are set, else by DFlash's rule.

    Raises ValueError for layers that the target does not have, and where there are more or fewer than is set.
    """
    ids, number = config.target_layer_ids, config.num_captured_layers
    if ids is None:
        return default_layer_ids(num_target_layers, config.num_layers if number is None else number)
    check_layer_ids(ids)
    if ids[-1] >= num_target_layers:
        raise ValueError(f"target_layer_ids {list(ids)} are past the target's {num_target_layers} layers")
    if number not in (None, len(ids)):
        raise ValueError(f"num_captured_layers is {number}, target_layer_ids are {len(ids)}: {list(ids)}")
    return ids


def drafter_shape(config: DrafterConfig, target_config: Any) -> DrafterShape:
    """Resolve a `DrafterConfig` against the transformers config of its target."""
    num_heads = config.num_heads or target_config.num_attention_heads
    return DrafterShape(
        hidden_size=target_config.hidden_size,
        num_layers=config.num_layers,
        num_heads=num_heads,
        num_kv_heads=config.num_kv_heads or target_config.num_key_value_heads,
        head_dim=config.head_dim or target_head_dim(target_config),
        intermediate_size=config.intermediate_size or target_config.intermediate_size,
        num_captured_layers=len(captured_layer_ids(config, target_config.num_hidden_layers)),
        vocab_size=target_config.vocab_size,
        num_target_layers=target_config.num_hidden_layers,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_theta=rope_theta(target_config),
        max_position_embeddings=target_config.max_position_embeddings,
    )


def block_spec(config: DrafterConfig, target_config: Any, mask_token_id: int, layout: str = IN_PLACE) -> BlockSpec:
    """What target, drafter and head agree on about a block."""
    layer_ids = captured_layer_ids(config, target_config.num_hidden_layers)
    return BlockSpec(config.block_size, config.num_candidates, mask_token_id, layer_ids, layout)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in at least fp32 and rounded once, with the weight in it.

    The engine calls the same function, so both draft from the same numbers in bf16 too.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        kind = torch.promote_types(x.dtype, self.weight.dtype)  # under autocast a weight may be the wider of the two
        return rms_norm(x.to(kind), self.weight.shape, self.weight.to(kind), self.eps)


class Rotary(nn.Module):
    """Rotary position embedding in the half-split convention of Qwen3 and Llama, by YaRN where that is given."""

    def __init__(self, head_dim: int, theta: float, yarn: YarnConfig | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.yarn = head_dim, theta, yarn
        self.scale = 1.0  # of cosine and sine
        if yarn is not None:
            automatic = 0.1 * math.log(yarn.factor) + 1
            self.scale = automatic if yarn.attention_factor is None else yarn.attention_factor

    def frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Angle per position of every pair of channels, [d / 2].

        YaRN divides the slow ones by its factor and leaves the fast ones: those that turn more often than
        beta_fast, and less often than beta_slow, within the training length; in between it blends linearly.
        """
        steps = torch.arange(0, self.head_dim, 2, device=device, dtype=dtype) / self.head_dim
        plain = self.theta**-steps
        if self.yarn is None:
            return plain

        def channel(turns: float) -> float:
            length = self.yarn.original_max_position_embeddings
            return self.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(channel(self.yarn.beta_fast)), 0)
        high = min(math.ceil(channel(self.yarn.beta_slow)), self.head_dim - 1)
        ramp = torch.arange(len(plain), device=device, dtype=dtype) - low
        slow = (ramp / max(high - low, 1e-3)).clamp(0, 1)
        return plain * (1 - slow) + plain / self.yarn.factor * slow

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [..., d] by `positions`, whose shape must broadcast against x's without the last axis."""
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = positions[..., None].to(kind) * self.frequencies(x.device, kind)
        cos, sin = (self.scale * angles.cos()).to(x.dtype), (self.scale * angles.sin()).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def block_attention(queries: Tensor, block_kv: LayerKV, context_kv: LayerKV, anchors: Tensor) -> Tensor:
    """Attention of every block over the context before its anchor and over itself.

    queries [R, h, A, B, d]; block keys and values [R, kv, A, B, d]; context ones [R, kv, T, d]; anchors [R, A].
    Returns [R, h, A, B, d]. The two parts share one softmax, so that no [A * B, A * B] scores ever exist.
    """
    rows, heads, num_anchors, size, width = queries.shape
    (block_keys, block_values), (keys, values) = block_kv, context_kv
    num_kv, length = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(rows, num_kv, heads // num_kv, num_anchors, size, width) * width**-0.5
    flat = grouped.reshape(rows, num_kv, -1, width)
    context_scores = (flat @ keys.transpose(-1, -2)).view(*grouped.shape[:-1], length)
    hidden = torch.arange(length, device=keys.device) >= anchors[..., None]
    context_scores = context_scores.masked_fill(hidden[:, None, None, :, None, :], float("-inf"))
    block_scores = grouped @ block_keys[:, :, None].transpose(-1, -2)
    scores = torch.cat([context_scores, block_scores], dim=-1)
    weights = wide(scores).softmax(dim=-1)
    context_weights, block_weights = weights.to(values.dtype).split([length, size], dim=-1)
    mixed = (context_weights.reshape(rows, num_kv, -1, length) @ values).view(grouped.shape)
    mixed = mixed + block_weights @ block_values[:, :, None]
    return mixed.reshape(queries.shape)


def chunked_attention(queries: Tensor, block_kv: LayerKV, context_kv: LayerKV, anchors: Tensor) -> Tensor:
    """`block_attention` over as many anchors at once as `SCORE_BYTES` of scores allow; shapes and values as there.

    Where that takes more than one chunk, each is recomputed in the backward pass. At the paper's size (512 anchors
    of a row of 3,072 tokens, 32 heads) the scores of one layer are 3.2 GB, and those of all layers were kept.
    """
    num_anchors = queries.shape[2]
    scores = 4 * queries[..., 0].numel() * (context_kv[0].shape[2] + queries.shape[3])
    if scores <= SCORE_BYTES:
        return block_attention(queries, block_kv, context_kv, anchors)
    parts, size = [], max(1, num_anchors * SCORE_BYTES // scores)
    for first in range(0, num_anchors, size):
        end = first + size
        own_kv = tuple(part[:, :, first:end] for part in block_kv)
        arguments = (queries[:, :, first:end], own_kv, context_kv, anchors[:, first:end])
        if torch.is_grad_enabled():
            parts.append(checkpoint(block_attention, *arguments, use_reentrant=False))
        else:
            parts.append(block_attention(*arguments))
    return torch.cat(parts, dim=2)


class DrafterAttention(nn.Module):
    """Grouped-query attention whose keys and values come from the context and from the block alike."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta, shape.yarn)

    def _heads(self, x: Tensor) -> Tensor:
        """[R, ..., heads * d] -> [R, heads, ..., d]."""
        return x.unflatten(-1, (-1, self.head_dim)).movedim(-2, 1)

    def keys_values(self, x: Tensor, positions: Tensor) -> LayerKV:
        """Keys and values of states [R, ..., H] at `positions` -> two of [R, kv, ..., d]."""
        return self._rotated(self._heads(self.k_proj(x)), self.k_norm, positions), self._heads(self.v_proj(x))

    def _rotated(self, heads: Tensor, norm: RMSNorm, positions: Tensor) -> Tensor:
        """Heads [..., d] normalised and rotated, rounded once behind both as in `kernels.norm_rope`."""
        return self.rotary(norm(wide(heads)), positions).to(heads.dtype)

    def forward(self, x: Tensor, context_kv: LayerKV, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        queries = self._rotated(self._heads(self.q_proj(x)), self.q_norm, positions)
        mixed = attend(queries, self.keys_values(x, positions), context_kv, anchors)
        return self.o_proj(mixed.movedim(1, -2).flatten(-2))


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP; the context is not passed through the layer's input norm."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DrafterAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = DrafterMLP(shape)

    def forward(
        self, x: Tensor, context: LayerKV | Tensor, anchors: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """`context` is the layer's keys and values of it, or the fused states [R, T, H] to make them of."""
        if isinstance(context, Tensor):
            context = self.self_attn.keys_values(context, torch.arange(context.shape[1], device=context.device))
        x = x + self.self_attn(self.input_layernorm(x), context, anchors, positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class ContextCache:
    """Context keys and values of the rows being decoded; `length` positions count, setting it forgets the rest."""

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self.last: Tensor | None = None  # [R, H] fused context of the newest position
        self._layers: list[LayerKV | None] = [None] * num_layers

    def append(self, kv: list[LayerKV], context: Tensor) -> None:
        """Add keys and values of the fused `context` [R, t, H] behind what is there."""
        end = self.length + context.shape[1]
        assert end <= self.max_length, f"context cache of {self.max_length} positions asked to hold {end}"
        for i, (keys, values) in enumerate(kv):
            if self._layers[i] is None:
                room = (*keys.shape[:2], self.max_length, keys.shape[3])
                self._layers[i] = (keys.new_empty(room), values.new_empty(room))
            for buffer, new in zip(self._layers[i], (keys, values), strict=True):
                buffer[:, :, self.length : end] = new
        self.length = end
        self.last = context[:, -1]

    def kv(self) -> list[LayerKV]:
        """Per layer, the keys and values that count."""
        return [(keys[:, :, : self.length], values[:, :, : self.length]) for keys, values in self._layers]


class Drafter(nn.Module):
    """The DFlash transformer; its parameter names are those of the published checkpoints."""

    def __init__(self, shape: DrafterShape, layout: str = IN_PLACE) -> None:
        super().__init__()
        self.shape, self.layout = shape, layout
        self.fc = nn.Linear(shape.num_captured_layers * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's captured features [R, T, C * H] as context [R, T, H]."""
        return self.hidden_norm(self.fc(features))

    def context_kv(self, context: Tensor, start: int = 0) -> list[LayerKV]:
        """Per layer, keys and values of `context` [R, t, H], whose first position is `start`."""
        positions = start + torch.arange(context.shape[1], device=context.device)
        return [layer.self_attn.keys_values(context, positions) for layer in self.layers]

    def forward(
        self,
        embeds: Tensor,
        anchors: Tensor,
        context: Sequence[LayerKV] | Tensor,
        attend: Attend = chunked_attention,
    ) -> Tensor:
        """Hidden states of the slots.

        embeds [R, A, B, H] of [anchor, mask, ..., mask]; anchors [R, A] absolute positions; context from `fuse`, whose
        first position is 0, or what `context_kv` or a `ContextCache` made of it, per layer. Returns [R, A, S, H]
        after the final norm, the input of lm_head; in place the anchor's own state predicts nothing and is left out.
        """
        # [R, 1, A, B]: one axis for the heads
        positions = (anchors[..., None] + torch.arange(embeds.shape[2], device=embeds.device))[:, None]
        x = embeds
        # a layer makes its keys and values itself, so that all of its weights are used inside its forward
        contexts = [context] * len(self.layers) if isinstance(context, Tensor) else context
        for layer, own in zip(self.layers, contexts, strict=True):
            x = layer(x, own, anchors, positions, attend)
        return self.norm(x[:, :, 1:] if self.layout == IN_PLACE else x)


@torch.no_grad()
def copy_target_layers(drafter: Drafter, target: Target) -> None:
    """Start from the target's last layers and final norm instead of from noise (docs/training.md).

    The context is set to the last captured layer's state, so that it holds for the copied layers what they saw
    in the target; the weights of the target's input norms move into the matrices behind them, since the context
    passes no layer's norm. Raises ValueError if the shapes differ or the target has biases there.
    """
    if len(drafter.layers) > len(target.layers):
        raise ValueError(f"num_layers is {len(drafter.layers)}, the target has {len(target.layers)} layers to copy")
    layers = list(target.layers)[-len(drafter.layers) :]
    for ours, theirs in zip(drafter.layers, layers, strict=True):
        for block, norm in (("self_attn", "input_layernorm"), ("mlp", "post_attention_layernorm")):
            source, scale = dict(getattr(theirs, block).named_parameters()), getattr(theirs, norm).weight
            for name, parameter in getattr(ours, block).named_parameters():
                if name not in source and name.endswith("_norm.weight"):  # Llama does not norm queries and keys
                    continue
                weight = source.pop(name, None)
                if weight is None or weight.shape != parameter.shape:
                    found = "has none" if weight is None else f"has {list(weight.shape)}"
                    raise ValueError(f"{block}.{name} of the drafter is {list(parameter.shape)}, the target {found}")
                inward = name.removesuffix("_proj.weight") in ("q", "k", "v", "gate", "up")
                parameter.copy_(wide(weight) * wide(scale) if inward else weight)
            if source:
                raise ValueError(f"the drafter has no place for the target's {block}.{next(iter(source))}")
            getattr(ours, norm).weight.fill_(1.0)
    drafter.norm.weight.copy_(target.final_norm.weight)
    width = drafter.shape.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -width:].fill_diagonal_(1.0)
