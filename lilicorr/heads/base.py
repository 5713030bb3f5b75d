"""What a head is: it turns the drafter's view of N blocks into proposals and into losses.

Place in the flow: `DraftModel` holds one; drafter, verifier, decoder, trainer and benches call only these two
functions and do not know which head they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lilicorr.blocks import BlockLabels, BlockSpec, DraftOutput, LossTerm, Proposal

if TYPE_CHECKING:
    from lilicorr.drafter import DrafterShape


class Head(nn.Module):
    """A head; `Config` is its dataclass, `config` the instance it was made with."""

    Config: ClassVar[type]

    def __init__(self, config: Any, shape: DrafterShape, spec: BlockSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec

    def fit_table(self, embed: Tensor) -> None:
        """Fit fresh weights to the target's embedding table [V, H]; most heads have nothing to fit."""

    def propose(self, draft: DraftOutput, sampling: Any = None) -> Proposal:
        """Draft the S tokens of every block."""
        raise NotImplementedError

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        """The terms of the objective on these blocks; `progress` is the share of the run that is done, in [0, 1]."""
        raise NotImplementedError


def label_index(draft: DraftOutput, labels: BlockLabels) -> tuple[Tensor, Tensor]:
    """Where every label stands in the draft vocabulary, and which slots have one.

    Returns [N, S] indices into the logits and [N, S] valid: a label outside the draft vocabulary has none.
    """
    if draft.vocab_ids is None:
        return labels.token_ids, labels.valid
    index = torch.searchsorted(draft.vocab_ids, labels.token_ids).clamp(max=len(draft.vocab_ids) - 1)
    return index, labels.valid & (draft.vocab_ids[index] == labels.token_ids)
