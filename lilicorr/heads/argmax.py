"""Vanilla DFlash: every slot takes its own most likely token (paper, section 3.1).

Place in the flow: the baseline head. It has no parameters and trains the drafter by Eq. (6) alone.
"""

from __future__ import annotations

from typing import Any

from lilicorr.blocks import BlockLabels, DraftOutput, LossTerm, Proposal, prefix_length
from lilicorr.config import ArgmaxConfig
from lilicorr.heads.base import Head, label_index
from lilicorr.lattice import log_probs_at
from lilicorr.losses import block_cross_entropy, diagnostic


class ArgmaxHead(Head):
    """The point mass on each slot's top choice."""

    Config = ArgmaxConfig

    def propose(self, draft: DraftOutput, sampling: Any = None) -> Proposal:
        """Each slot's argmax, whatever the temperature: the deterministic contract."""
        return Proposal(draft.token_ids(draft.logits.argmax(dim=-1)))

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        """Eq. (6), and the mean prefix the argmax would have had accepted on blocks that have every label."""
        index, valid = label_index(draft, labels)
        log_probs = log_probs_at(draft.logits, index[..., None])[..., 0]
        # a maximum is several times cheaper than an argmax; a tie for the top counts as a match here
        logits = draft.logits.detach()
        matches = valid & (logits.gather(-1, index[..., None])[..., 0] >= logits.amax(dim=-1))
        return {
            "drafter_ce": block_cross_entropy(log_probs, valid, self.config.decay),
            "top1_prefix": diagnostic(prefix_length(matches), labels.valid.all(dim=-1)),
        }
