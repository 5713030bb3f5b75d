"""Vanilla DFlash: every slot takes its own most likely token (paper, section 3.1).

Place in the flow: the baseline head. It has no parameters and trains the drafter by Eq. (6) alone.
"""

from __future__ import annotations

from lilicorr.blocks import ANCHOR_FIRST, IN_PLACE, BlockLabels, DraftOutput, LossTerm, Proposal
from lilicorr.config import ArgmaxConfig
from lilicorr.heads.base import Head, HeadFormat, label_index, prefix_terms
from lilicorr.lattice import log_probs_at
from lilicorr.losses import block_cross_entropy
from lilicorr.verify import Sampling


class ArgmaxHead(Head):
    """The point mass on each slot's top choice."""

    Config = ArgmaxConfig
    layouts = (IN_PLACE, ANCHOR_FIRST)
    format = HeadFormat("DFlashDraftModel")

    def propose(self, draft: DraftOutput, sampling: Sampling | None = None) -> Proposal:
        """Each slot's argmax, whatever the temperature: the deterministic contract."""
        return Proposal(draft.token_ids(draft.proposable(draft.logits).argmax(dim=-1)))

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        """Eq. (6), and the mean prefix the argmax would have had accepted on blocks that have every label."""
        index, valid = label_index(draft, labels)
        log_probs = log_probs_at(draft.logits, index[..., None])[..., 0]
        terms = {
            "drafter_ce": block_cross_entropy(log_probs, valid, self.config.decay, dpace_alpha=self.config.dpace_alpha)
        }
        return terms | prefix_terms({"top1_prefix": draft.logits}, index, valid, labels)
