"""The draft model: a drafter and a head over the frozen tables of their target.

Place in the flow: `forward` is one training micro-batch (features of whole rows in, loss terms out, the
vocabulary product recomputed chunk by chunk); `draft` is one decoding step (a block per row over the context
cache), whose `DraftOutput` the head turns into a proposal. Paper: sections 3.2 to 3.5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lilicorr.anchors import block_labels
from lilicorr.block_mask import attention_under
from lilicorr.blocks import BlockSpec, DraftOutput, LossTerm, TrainBatch, add_terms
from lilicorr.config import DrafterConfig, RunConfig, TrainConfig, from_dict
from lilicorr.drafter import ContextCache, Drafter, DrafterShape, block_spec
from lilicorr.heads import HEADS
from lilicorr.target import Target

CHUNK_BYTES = 512 << 20  # of vocabulary logits in fp32 that exist at once, where no number of blocks is given


def blocks_at_once(num_slots: int, vocab_size: int) -> int:
    """Blocks whose logits fill `CHUNK_BYTES` in fp32, at least one."""
    return max(1, CHUNK_BYTES // (4 * num_slots * vocab_size))


class DraftModel(nn.Module):
    """Drafter, head, and the target's embedding and output tables [V, H], which are frozen and never saved.

    `vocab_ids` [D], ascending, restricts what is drafted to these target ids. Of the tables' rows only the first
    `num_ids` are tokens (None: all): what is behind them pads the tables and is never drafted.
    """

    def __init__(
        self,
        shape: DrafterShape,
        spec: BlockSpec,
        head: str,
        head_config: dict[str, Any],
        embed: Tensor,
        lm_head: Tensor,
        vocab_ids: Tensor | None = None,
        num_ids: int | None = None,
    ) -> None:
        super().__init__()
        if head not in HEADS:
            raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
        if spec.mask_token_id >= embed.shape[0]:
            raise ValueError(
                f"mask token id {spec.mask_token_id} is outside the target's {embed.shape[0]} embedding rows"
            )
        if len(spec.target_layer_ids) != shape.num_captured_layers:
            raise ValueError(f"{shape.num_captured_layers} captured layers expected, got ids {spec.target_layer_ids}")
        if spec.layout not in HEADS[head].layouts:
            raise ValueError(f"layout of the head {head} must be {' or '.join(HEADS[head].layouts)}, got {spec.layout}")
        self.shape, self.spec, self.head_name = shape, spec, head
        self.drafter = Drafter(shape, spec.layout)
        self.head = HEADS[head](from_dict(HEADS[head].Config, head_config), shape, spec)
        self.register_buffer("embed", embed.detach(), persistent=False)
        self.register_buffer("lm_head", lm_head.detach(), persistent=False)
        self.register_buffer("vocab_ids", vocab_ids, persistent=False)
        if num_ids is not None and vocab_ids is not None:
            num_ids = int((vocab_ids < num_ids).sum())
        size = embed.shape[0] if vocab_ids is None else len(vocab_ids)
        self.num_ids = None if num_ids is None or num_ids >= size else num_ids  # of the draft vocabulary
        most = self.num_ids or size
        # of a head that takes no candidates a checkpoint names no number
        if HEADS[head].format.candidates_field is not None and spec.num_candidates > most:
            raise ValueError(f"num_candidates must be at most {most}, all there are, got {spec.num_candidates}")
        draft_rows = lm_head.detach() if vocab_ids is None else lm_head.detach()[vocab_ids]
        self.register_buffer("draft_rows", draft_rows, persistent=False)

    def drafter_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the drafter's optimizer group."""
        return self.drafter.parameters()

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the head's optimizer group; none for a head without a network."""
        return self.head.parameters()

    def forward(
        self,
        features: Tensor,
        final_hidden: Tensor,
        batch: TrainBatch,
        anchors: Tensor,
        keep: Tensor,
        progress: float,
        chunk_blocks: int | None,
        attention: str = "parts",
    ) -> dict[str, LossTerm]:
        """Loss terms of the kept blocks.

        features [R, T, C * H] and final_hidden [R, T, H] of the target; anchors and keep [R, A]; progress in
        [0, 1]. Vocabulary logits of at most `chunk_blocks` blocks exist at once (None: `blocks_at_once`); with more
        blocks than that, each chunk is recomputed in the backward pass. `attention` is one of `block_mask`.
        """
        context, hidden = self.block_states(features, batch, anchors, attention)
        rows, columns = keep.nonzero(as_tuple=True)
        blocks = (hidden[rows, columns], rows, anchors[rows, columns])
        return self.block_terms(*blocks, context, final_hidden, batch, progress, chunk_blocks)

    def block_states(
        self, features: Tensor, batch: TrainBatch, anchors: Tensor, attention: str = "parts"
    ) -> tuple[Tensor, Tensor]:
        """The fused context [R, T, H], and the states [R, A, S, H] of the slots of all blocks."""
        context = self.drafter.fuse(features.to(self.drafter.fc.weight.dtype))
        block_ids = torch.full((*anchors.shape, self.spec.block_size), self.spec.mask_token_id, device=anchors.device)
        block_ids[..., 0] = batch.input_ids.gather(1, anchors)
        embeds = self.embed[block_ids].to(context.dtype)
        attend = attention_under(attention, anchors, self.spec.block_size, context.shape[1])
        return context, self.drafter(embeds, anchors, context, attend)

    def block_terms(
        self,
        hidden: Tensor,
        rows: Tensor,
        anchors: Tensor,
        context: Tensor,
        final_hidden: Tensor,
        batch: TrainBatch,
        progress: float,
        chunk_blocks: int | None,
    ) -> dict[str, LossTerm]:
        """Loss terms of N blocks: hidden [N, S, H], their rows and anchors [N]; the rest as in `forward`."""
        if chunk_blocks is None:
            chunk_blocks = blocks_at_once(self.spec.num_slots, len(self.draft_rows))

        def chunk_terms(hidden: Tensor, context: Tensor, rows: Tensor, anchors: Tensor) -> dict[str, LossTerm]:
            labels = block_labels(batch, rows, anchors, self.spec.num_slots, final_hidden, self.lm_head)
            draft = self.draft_output(batch.input_ids[rows, anchors], hidden, context[rows, anchors - 1], anchors > 0)
            terms = self.head.loss(draft, labels, progress)
            # No backward pass goes through a term without weight: what a recomputed chunk keeps for it would stay.
            return {
                n: term if term.weight else dataclasses.replace(term, sum=term.sum.detach())
                for n, term in terms.items()
            }

        if len(rows) <= chunk_blocks:
            return chunk_terms(hidden, context, rows, anchors)
        terms: dict[str, LossTerm] = {}
        for chunk in torch.arange(len(rows), device=rows.device).split(chunk_blocks):
            arguments = (hidden[chunk], context, rows[chunk], anchors[chunk])
            terms = add_terms(terms, checkpoint(chunk_terms, *arguments, use_reentrant=False))
        return terms

    def draft_output(self, anchor_ids: Tensor, hidden: Tensor, context: Tensor, valid: Tensor) -> DraftOutput:
        """What a head sees of N blocks: hidden [N, S, H] of the slots, context [N, H] before the anchors [N]."""
        # autocast casts the table itself; widening it first would copy it in every chunk
        autocast = torch.is_autocast_enabled(hidden.device.type)
        rows = self.draft_rows if autocast else self.draft_rows.to(hidden.dtype)
        logits = nn.functional.linear(hidden, rows)
        return DraftOutput(anchor_ids, hidden, logits, context, valid, self.embed, self.vocab_ids, self.num_ids)

    def new_context(self, max_length: int) -> ContextCache:
        """An empty context cache for `max_length` positions."""
        return ContextCache(self.shape.num_layers, max_length)

    @torch.no_grad()
    def extend_context(self, cache: ContextCache, features: Tensor) -> None:
        """Append the target's features [R, t, C * H] of committed positions."""
        context = self.drafter.fuse(features.to(self.drafter.fc.weight.dtype))
        cache.append(self.drafter.context_kv(context, start=cache.length), context)

    @torch.no_grad()
    def draft(self, anchor_ids: Tensor, cache: ContextCache) -> DraftOutput:
        """One block per row, anchored behind the cached context: anchor_ids [R] -> DraftOutput of N = R blocks."""
        shape, device = (len(anchor_ids), 1, self.spec.block_size), anchor_ids.device
        block_ids = torch.full(shape, self.spec.mask_token_id, device=device)
        block_ids[:, 0, 0] = anchor_ids
        anchors = torch.full(shape[:2], cache.length, device=device)
        embeds = self.embed[block_ids].to(self.drafter.fc.weight.dtype)
        hidden = self.drafter(embeds, anchors, cache.kv())[:, 0]
        return self.draft_output(anchor_ids, hidden, cache.last, torch.ones_like(anchor_ids, dtype=torch.bool))


def _blocks(run: RunConfig, config: DrafterConfig) -> tuple[str, int]:
    """Layout and block size of a run: its own, else its head's usual layout and the drafter's size."""
    return run.block_layout or HEADS[run.head].layouts[
        0
    ], config.block_size if run.block_size is None else run.block_size


def check_blocks(name: str, config: TrainConfig) -> None:
    """Raise ValueError if the run's head cannot have its layout, or the run before it cuts blocks another way.

    A checkpoint that the run starts from is read, and held against it, where its target is at hand.
    """
    run = config.runs[name]
    layouts, start = HEADS[run.head].layouts, config.runs.get(run.start_from or name, run)
    if run.block_layout not in (None, *layouts):
        raise ValueError(f"train.runs.{name}.block_layout must be {' or '.join(layouts)}, got {run.block_layout!r}")
    ours, theirs = _blocks(run, config.drafter), _blocks(start, config.drafter)
    if ours != theirs:
        raise ValueError(f"train.runs.{name} has blocks {ours}, its start {run.start_from} has {theirs}")


def run_block_spec(config: DrafterConfig, run: RunConfig, target_config: Any, mask_token_id: int) -> BlockSpec:
    """The blocks of a training run: the drafter's, in the run's own or its head's usual layout."""
    layout, block_size = _blocks(run, config)
    return block_spec(dataclasses.replace(config, block_size=block_size), target_config, mask_token_id, layout)


def build_draft_model(
    shape: DrafterShape,
    spec: BlockSpec,
    head: str,
    head_config: dict[str, Any],
    target: Target,
    vocab_ids: Tensor | None = None,
) -> DraftModel:
    """A freshly initialised draft model on the target's tables and device."""
    tables = (target.embed, target.lm_head)
    model = DraftModel(shape, spec, head, head_config, *tables, vocab_ids, target.num_ids).to(target.device)
    model.head.fit_table(target.embed)
    return model
