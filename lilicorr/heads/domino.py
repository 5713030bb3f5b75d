"""Domino: a recurrent cell over the committed prefix corrects every slot's logits (arXiv:2605.29707).

Place in the flow: the first of the two concurrent baselines. Training is teacher-forced, one pass of the cell over
the block's true tokens; drafting runs the cell once per slot. The correction is a bottleneck over the whole
vocabulary, or, as public servers offer, over the drafter's own top choices of the slot.

Paper: section 4.1 (baselines), Appendix A. Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lilicorr.blocks import (
    ANCHOR_FIRST,
    IN_PLACE,
    BlockLabels,
    BlockSpec,
    DraftOutput,
    LossTerm,
    Proposal,
)
from lilicorr.heads.base import (
    CONTRACTS,
    DETERMINISTIC,
    Head,
    HeadFormat,
    check_above_zero,
    check_choice,
    check_not_negative,
    check_shares,
    label_index,
    prefix_terms,
    previous_ids,
    roll_out,
)
from lilicorr.lattice import log_probs_at
from lilicorr.losses import block_cross_entropy
from lilicorr.verify import Sampling

if TYPE_CHECKING:
    from lilicorr.drafter import DrafterShape


@dataclass(frozen=True)
class DominoConfig:
    """Sizes, objective and decoding of the Domino head; sizes as in the released checkpoints."""

    gru_hidden_dim: int = 1024
    emb_dim: int = 256  # the bottleneck
    pure_draft_prefix_len: int = 1  # leading slots that keep the drafter's own logits
    decay: float = 7.0  # of the slots' weights, as beta of Eq. (6)
    base_start: float = 1.0  # weight of the uncorrected logits' loss in the first step
    base_fraction: float = 1.0  # share of the run over which that weight falls to 0
    pool: int = 0  # decoding: correct the drafter's best so many tokens of a slot only; 0: all of them, exactly
    contract: str = DETERMINISTIC  # deterministic | sampled


class DominoHead(Head):
    """Logits of slot s plus a correction that has seen the tokens before it."""

    Config = DominoConfig
    layouts = (ANCHOR_FIRST, IN_PLACE)
    format = HeadFormat(
        "DFlashDraftModel",
        projector_type="domino",
        also_read=("DominoDraftModel",),
        tensors=("prefix_gru.", "embed_proj."),
        older_names={r"^logit_head\.": ""},
        config_fields={name: name for name in ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")},
        layout_field="shift_label",
        at_top=("emb_dim",),
    )

    def __init__(self, config: DominoConfig, shape: DrafterShape, spec: BlockSpec) -> None:
        super().__init__(config, shape, spec)
        check_choice("contract", config.contract, CONTRACTS)
        check_above_zero(config, "gru_hidden_dim", "emb_dim")
        if not 0 <= config.pure_draft_prefix_len <= spec.num_slots:
            raise ValueError(
                f"pure_draft_prefix_len must be in 0..{spec.num_slots}, got {config.pure_draft_prefix_len}"
            )
        check_not_negative(config, "base_start")
        check_shares(config, "base_fraction")
        if not 0 <= config.pool <= shape.vocab_size:
            raise ValueError(f"pool must be in 0..{shape.vocab_size}, got {config.pool}")
        self.prefix_gru = nn.GRU(shape.hidden_size, config.gru_hidden_dim, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(shape.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, shape.vocab_size, bias=False),
        )
        for index in (0, 2):
            nn.init.normal_(self.embed_proj[index].weight, std=0.02)

    def propose(self, draft: DraftOutput, sampling: Sampling | None = None) -> Proposal:
        """One step of the cell per slot, each fed with the token just drafted."""
        table, state = draft.rows_of(self.embed_proj[2].weight), None

        def step(slot: int, _index: Tensor | None, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
            nonlocal state
            previous = draft.anchor_ids if token_ids is None else token_ids
            states, state = self.prefix_gru(self._embedded(draft, previous[:, None]), state)
            logits, ids, rows = draft.logits[:, slot], None, None
            if self.config.pool:
                logits = draft.proposable(logits)
                logits, rows = logits.topk(min(self.config.pool, logits.shape[-1]), dim=-1)
                ids = draft.token_ids(rows)
            if slot >= self.config.pure_draft_prefix_len:
                units = self._units(draft.hidden[:, slot], states[:, 0])
                logits = logits + (units @ table.T if rows is None else torch.einsum("ne,nje->nj", units, table[rows]))
            return logits, ids

        return roll_out(step, draft, self.config.contract, sampling)

    def _embedded(self, draft: DraftOutput, token_ids: Tensor) -> Tensor:
        """The target's embeddings of ids [N, S] in the head's type."""
        return draft.embed[token_ids].to(self.prefix_gru.weight_ih_l0.dtype)

    def _units(self, hidden: Tensor, states: Tensor) -> Tensor:
        """The bottleneck [..., E] of drafter states [..., H] and prefix states [..., G]."""
        return self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, states.to(hidden.dtype)], dim=-1)))

    def corrected(self, draft: DraftOutput, token_ids: Tensor) -> Tensor:
        """Logits [N, S, D] of every slot, given that the tokens before it are `token_ids` [N, S]."""
        states, _ = self.prefix_gru(self._embedded(draft, previous_ids(draft, token_ids)))
        start = self.config.pure_draft_prefix_len
        correction = (
            self._units(draft.hidden[:, start:], states[:, start:]) @ draft.rows_of(self.embed_proj[2].weight).T
        )
        return torch.cat([draft.logits[:, :start], draft.logits[:, start:] + correction], dim=1)

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        """Cross-entropy of the corrected logits, blended with that of the drafter's own, whose weight decays."""
        config = self.config
        index, valid = label_index(draft, labels)
        logits = self.corrected(draft, labels.token_ids)
        done = min(1.0, progress / config.base_fraction) if config.base_fraction else 1.0
        base_weight = min(1.0, max(0.0, config.base_start * (1 - done)))
        terms = {
            name: block_cross_entropy(log_probs_at(scores, index[..., None])[..., 0], valid, config.decay, weight)
            for name, scores, weight in (
                ("head_ce", logits, 1 - base_weight),
                ("drafter_ce", draft.logits, base_weight),
            )
        }
        return terms | prefix_terms({"selected_prefix": logits, "top1_prefix": draft.logits}, index, valid, labels)
