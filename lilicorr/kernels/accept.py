"""Verification in one pass over the target's logits: `lilicorr.verify.verify` on the device, without a dense law.

Place in the flow: the last kernel of the engine's step. `verify` is the definition and the reference.
Paper: sections 3.1 (verification) and 4 (temperature 1).
"""

from __future__ import annotations

from torch import Tensor

from lilicorr.blocks import Proposal, Verdict
from lilicorr.verify import Sampling, verify


def accept(proposal: Proposal, target_logits: Tensor, sampling: Sampling) -> Verdict:
    """The verdict of `verify`, which see for shapes: point masses and proposals drawn from K ids at once.

    The proposal's tokens must be a contiguous [N, S] int64 tensor; a sparse proposal's ids must differ within a
    slot. A proposal with dense probabilities is verified by the reference on every device.
    """
    return verify(proposal, target_logits, sampling)
