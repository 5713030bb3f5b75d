"""Target and drafter over the paged cache: the transformer layers of both, and where a pass writes and reads.

Place in the flow: `step` runs `PagedTarget.forward` on [anchor, drafts] or on pieces of prompts, `PagedDrafter.draft`
on [anchor, mask, ..., mask], and `PagedDrafter.append` on the target's features of what was committed. Target and
drafter keep their keys and values in tensors of their own, under the same page ids.

Both are stacks of one kind of layer, the Qwen3 one: Llama's has no norms of queries and keys, Qwen2's has biases. The
projections of queries, keys and values are one product, and so are gate and up. The fused weights replace the
modules' own, which become views of them. What a layer computes is `target`'s and `drafter`'s; the tests hold the
logits of three families against transformers.

Paper: section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from lilicorr.blocks import DraftOutput
from lilicorr.draft_model import DraftModel
from lilicorr.engine.pages import PAGE_SIZE
from lilicorr.engine.trim import Packing
from lilicorr.kernels.attention import Reading, check_width, paged_attention, plan_reading
from lilicorr.kernels.norm_rope import Writing, norm_rope, plan_writing, rope_tables
from lilicorr.kernels.topk_lse import check_candidates
from lilicorr.target import Target, TargetOutput, target_head_dim

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others change with the length of the sequence
NORMS = ("q_norm", "k_norm")
GIB = 2**30
CPU_GIB = 1.0
GPU_SHARE = 0.9


@dataclass(frozen=True)
class Places:
    """Where the N * Q positions of a pass stand, write, and read.

    With a packing only M of them are run: `positions` and `slots` are [M] then, and so is every state, but for queries.
    """

    positions: Tensor  # [N, Q] int64
    slots: Tensor  # [N, Q] int64 place in the pages, page * PAGE_SIZE + offset; negative: nothing is written
    page_table: Tensor  # [N, P] int32
    kv_lengths: Tensor  # [N] int64 keys of each row with the pass's own, 0 where there is nothing to do
    query_lengths: Tensor | None = None  # [N] int64 positions that are no padding; None: all Q
    packing: Packing | None = None

    def pack(self, x: Tensor) -> Tensor:
        """What is run of [N, Q, ...]."""
        return x if self.packing is None else self.packing.pack(x)

    def spread(self, x: Tensor) -> Tensor:
        """[N, Q, ...] of what was run."""
        return x if self.packing is None else self.packing.spread(x)


@dataclass(frozen=True)
class Pass:
    """What all layers of a stack share in one pass. The references' part is made once; kernels need none of it."""

    places: Places
    rope: tuple[Tensor, Tensor]  # cosines and sines [P, D / 2]
    eps: float
    causal: bool
    writing: Writing | None
    reading: Reading | None


def page_slots(page_table: Tensor, positions: Tensor, write: Tensor) -> Tensor:
    """The places [N, Q] of `positions` in the pages of their rows, -1 where not `write`."""
    columns = (positions // PAGE_SIZE).clamp_max(page_table.shape[1] - 1)
    return (page_table.long().gather(1, columns) * PAGE_SIZE + positions % PAGE_SIZE).where(write, -1)


def fused(parts: list[nn.Parameter]) -> Tensor:
    """The parts stacked along their first axis, of which they become views.

    Parts that another engine has fused are not copied again.
    """
    first = parts[0].data
    ends = [part.data_ptr() + part.nbytes for part in parts]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


def projections_of(layer: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """What makes a layer's queries, keys and values."""
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


class PagedLayer:
    """One pre-norm decoder layer, of the target or of the drafter, and its keys and values.

    `qkv` are the fused weights of `projections_of` the layer where they are part of a larger product.
    """

    def __init__(self, layer: nn.Module, head_dim: int, num_pages: int, qkv: Tensor | None = None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = projections_of(layer)
        self.head_dim = head_dim
        self.num_heads, self.num_kv_heads = (len(p.weight) // head_dim for p in projections[:2])
        self.qkv = fused([p.weight for p in projections]) if qkv is None else qkv
        self.qkv_bias = fused([p.bias for p in projections]) if attention.q_proj.bias is not None else None
        self.q_norm, self.k_norm = (getattr(getattr(attention, name, None), "weight", None) for name in NORMS)
        self.output = attention.o_proj
        self.gate_up = fused([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.gate_up_bias = fused([mlp.gate_proj.bias, mlp.up_proj.bias]) if mlp.gate_proj.bias is not None else None
        self.down = mlp.down_proj
        self.norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        shape = (num_pages, self.num_kv_heads, PAGE_SIZE, head_dim)
        self.k_pages, self.v_pages = self.qkv.new_zeros(shape), self.qkv.new_zeros(shape)
        if self.k_pages.is_cuda:
            check_width(head_dim)  # when the engine is made, not in its first pass

    def start(
        self, places: Places, rope: tuple[Tensor, Tensor], eps: float, causal: bool, num_queries: int | None
    ) -> Pass:
        """A pass over layers like this one, with so many queries a row; None: keys and values are written only."""
        if self.k_pages.is_cuda:
            return Pass(places, rope, eps, causal, None, None)
        writing = plan_writing(places.positions.flatten(), *rope, places.slots.flatten(), self.k_pages)
        reading = None
        if num_queries is not None:
            table = (places.page_table, places.kv_lengths)
            reading = plan_reading(*table, num_queries, self.num_heads, self.k_pages, causal, places.query_lengths)
        return Pass(places, rope, eps, causal, writing, reading)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """[N, Q, H] -> [N, Q, H] (or [M, H]); writes the pass's keys and values, then reads those of the whole rows."""
        places = run.places
        normed = rms_norm(x, x.shape[-1:], self.norms[0], run.eps)
        queries = self.write(linear(normed, self.qkv, self.qkv_bias), run)
        queries = places.spread(queries.view(*x.shape[:-1], self.num_heads, self.head_dim))
        table, lengths = (places.page_table, places.kv_lengths), places.query_lengths
        mixed = paged_attention(queries, self.k_pages, self.v_pages, *table, run.causal, lengths, reading=run.reading)
        x = x + self.output(places.pack(mixed).flatten(-2))
        normed = rms_norm(x, x.shape[-1:], self.norms[1], run.eps)
        gate, up = linear(normed, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)

    def write(self, projected: Tensor, run: Pass) -> Tensor | None:
        """Split [..., (q +) k + v] into heads, write keys and values, return the rotated queries [tokens, heads, d]."""
        heads = projected.view(-1, projected.shape[-1] // self.head_dim, self.head_dim)
        queries, keys, values = heads.tensor_split([-2 * self.num_kv_heads, -self.num_kv_heads], dim=1)
        return norm_rope(
            queries if queries.shape[1] else None,
            keys,
            values,
            run.places.positions.flatten(),
            *run.rope,
            self.k_pages,
            self.v_pages,
            run.places.slots.flatten(),
            self.q_norm,
            self.k_norm,
            run.eps,
            run.writing,
        )


class PagedTarget:
    """The target's forward pass; `num_positions` is how far passes may reach, padding included.

    Raises ValueError for a model whose layers are not of this kind.
    """

    def __init__(self, target: Target, num_pages: int, num_positions: int) -> None:
        config, body = target.config, target.model.base_model
        _check_family(config)
        self.embed, self.lm_head, self.layer_ids = target.embed, target.lm_head, target.layer_ids
        self.eps, self.norm = config.rms_norm_eps, body.norm.weight
        head_dim = target_head_dim(config)
        self.layers = [PagedLayer(layer, head_dim, num_pages) for layer in body.layers]
        rotary = body.rotary_emb
        self.rope = rope_tables(rotary.inv_freq.float(), num_positions, rotary.attention_scaling)

    def forward(self, token_ids: Tensor, places: Places) -> TargetOutput:
        """Run [N, Q] ids: hidden [N, Q, H] after the final norm, features [N, Q, C * H] of the captured layers.

        With a packing both are [M, ...].
        """
        x, captured = embedding(places.pack(token_ids), self.embed), []
        run = self.layers[0].start(places, self.rope, self.eps, True, token_ids.shape[1])
        for index, layer in enumerate(self.layers):
            x = layer.forward(x, run)
            if index in self.layer_ids:
                captured.append(x)
        hidden = rms_norm(x, x.shape[-1:], self.norm, self.eps)
        return TargetOutput(hidden, torch.cat(captured, dim=-1) if captured else hidden[..., :0])

    def logits(self, hidden: Tensor) -> Tensor:
        """lm_head of final states [..., H] -> [..., V] in the target's type: verification widens what it reads."""
        return linear(hidden, self.lm_head)


class PagedDrafter:
    """The drafter over the paged context, and the head behind it."""

    def __init__(self, draft_model: DraftModel, target: Target, num_pages: int, num_positions: int) -> None:
        if draft_model.spec.target_layer_ids != target.layer_ids:
            raise ValueError(
                f"the draft model reads target layers {draft_model.spec.target_layer_ids}, "
                f"the target captures {target.layer_ids}"
            )
        shape, drafter = draft_model.shape, draft_model.drafter
        if draft_model.embed.is_cuda and draft_model.head.format.candidates_field is not None:
            check_candidates(draft_model.spec.num_candidates)  # when the engine is made, as `check_width`
        self.draft_model, self.fuse = draft_model, drafter.fuse
        self.num_slots, self.block_size = draft_model.spec.num_slots, draft_model.spec.block_size
        self.eps, self.norm = shape.rms_norm_eps, drafter.norm.weight
        self.dtype, self.context_width = drafter.fc.weight.dtype, shape.hidden_size
        # one tensor for all layers, so that the context's keys and values of all layers are one product
        query_width = shape.num_heads * shape.head_dim
        weights = fused([p.weight for layer in drafter.layers for p in projections_of(layer)])
        weights = weights.view(shape.num_layers, -1, shape.hidden_size)
        self.layers = [
            PagedLayer(layer, shape.head_dim, num_pages, qkv)
            for layer, qkv in zip(drafter.layers, weights, strict=True)
        ]
        self.context_weights = weights[:, query_width:].transpose(1, 2)  # [L, H, kv_width], a view
        # rotating (1, ..., 1, 0, ..., 0) gives cosines and sines, whatever the module's frequencies are
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        unit = torch.arange(shape.head_dim, device=weights.device).lt(shape.head_dim // 2).to(kind)
        positions = torch.arange(num_positions, device=weights.device)
        rotated = drafter.layers[0].self_attn.rotary(unit.expand(len(positions), -1), positions)
        cos, sin = rotated.chunk(2, dim=-1)
        self.rope = (cos.contiguous(), sin.contiguous())  # the kernel reads them as two tables

    @property
    def head(self) -> Any:
        """What turns a `DraftOutput` into a `Proposal`."""
        return self.draft_model.head

    def draft(self, anchor_ids: Tensor, anchor_context: Tensor, places: Places) -> DraftOutput:
        """One block per row over its context: anchor_ids [N], anchor_context [N, H], places of B positions each."""
        hidden, valid = self.backbone(anchor_ids, places), torch.ones_like(anchor_ids, dtype=torch.bool)
        return self.draft_model.draft_output(anchor_ids, hidden, anchor_context, valid)

    def backbone(self, anchor_ids: Tensor, places: Places) -> Tensor:
        """The slots' states [N, S, H], the input of lm_head, of `draft`'s blocks.

        The block's own keys and values go to the places behind the context, where the context's own will stand.
        """
        model = self.draft_model
        block_ids = torch.full_like(places.positions, model.spec.mask_token_id)
        block_ids[:, 0] = anchor_ids
        x = embedding(block_ids, model.embed).to(self.dtype)
        run = self.layers[0].start(places, self.rope, self.eps, False, self.block_size)
        for layer in self.layers:
            x = layer.forward(x, run)
        return rms_norm(x[:, -self.num_slots :], (x.shape[-1],), self.norm, self.eps)

    def append(self, features: Tensor, places: Places) -> Tensor:
        """Write the context of the target's features [N, Q, C * H] (or [M, C * H]) to the pages; return it."""
        context = self.fuse(features.to(self.dtype))
        projected = torch.matmul(context.flatten(0, -2), self.context_weights)  # [L, N * Q, kv_width]
        run = self.layers[0].start(places, self.rope, self.eps, False, None)
        for layer, part in zip(self.layers, projected, strict=True):
            layer.write(part, run)
        return context


def num_pages_in(gib: float | None, target: Target, draft_model: DraftModel | None) -> int:
    """How many pages of target and drafter fit into `gib` (None: see `EngineConfig`).

    Raises ValueError where there is not room for one.
    """
    config = target.config
    width = 2 * config.num_key_value_heads * target_head_dim(config) * target.embed.element_size()
    page_bytes = PAGE_SIZE * config.num_hidden_layers * width
    if draft_model is not None:
        shape, size = draft_model.shape, draft_model.drafter.fc.weight.element_size()
        page_bytes += PAGE_SIZE * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * size
    if gib is None:
        gib = CPU_GIB
        if target.device.type == "cuda":
            gib = GPU_SHARE * torch.cuda.mem_get_info(target.device)[0] / GIB
    num_pages = int(gib * GIB) // page_bytes
    if num_pages < 1:
        raise ValueError(f"kv_gib must hold a page of {page_bytes} bytes, got {gib:.3g}")
    return num_pages


def _check_family(config: Any) -> None:
    """Raise ValueError for what the layers here would compute differently from transformers."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    sliding = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    for name, value, allowed in (
        ("model_type", config.model_type, FAMILIES),
        ("rope_type", rope, ROPE_TYPES),
        ("hidden_act", config.hidden_act, ("silu",)),
    ):
        if value not in allowed:
            raise ValueError(f"the engine's target must have {name} {' or '.join(allowed)}, got {value!r}")
    if sliding:
        raise ValueError(f"the engine's target must have full attention in all layers, got {', '.join(sliding)}")
