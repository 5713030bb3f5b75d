"""What a head is: it turns the drafter's view of N blocks into proposals and into losses.

Place in the flow: `DraftModel` holds one; drafter, verifier, decoder, trainer, checkpoints and benches know it by
what stands here: its two functions, the layouts it can have, and how a checkpoint spells it. A head is one file
and one line in `HEADS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lilicorr.blocks import IN_PLACE, BlockLabels, BlockSpec, DraftOutput, LossTerm, Proposal, prefix_length, wide
from lilicorr.kernels.topk_lse import topk_lse
from lilicorr.losses import diagnostic
from lilicorr.verify import PROPOSAL_DRAW, Sampling, draw, target_probs, uniform

if TYPE_CHECKING:
    from lilicorr.drafter import DrafterShape

DETERMINISTIC, SAMPLED = "deterministic", "sampled"
CONTRACTS = (DETERMINISTIC, SAMPLED)

# What one slot may hold, given the slot before it: (slot, index there, token id there; None for slot 0) -> logits
# [N, J] and the target ids [N, J] they stand for, None where they are the draft vocabulary in order.
Step = Callable[[int, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class HeadFormat:
    """How a head is spelled in a checkpoint."""

    architecture: str
    projector_type: str | None = None  # field of dflash_config, where the architecture alone does not say it
    also_read: tuple[str, ...] = ()  # other architectures of the same head
    prefix: str = ""  # put before the head's tensor names
    tensors: tuple[str, ...] = ()  # how the head's tensor names begin in a checkpoint
    names: dict[str, str] = field(default_factory=dict)  # patterns of our tensor names -> what a checkpoint calls them
    older_names: dict[str, str] = field(default_factory=dict)  # patterns of other tensor names -> ours
    config_fields: dict[str, str] = field(default_factory=dict)  # field of dflash_config -> field of the head's config
    older_fields: dict[str, str] = field(default_factory=dict)  # field of dflash_config -> another spelling of it
    candidates_field: str | None = None  # field of dflash_config that holds K
    layout_field: str | None = None  # bool field of dflash_config, true for anchor-first
    without_head: dict[str, Any] = field(default_factory=dict)  # values of fields that mean: the drafter alone
    at_top: tuple[str, ...] = ()  # fields that stand outside dflash_config as well
    target_tables: bool = False  # holds copies of the target's embedding and output tables


class Head(nn.Module):
    """A head; `Config` is its dataclass, `config` the instance it was made with."""

    Config: ClassVar[type]
    format: ClassVar[HeadFormat]
    layouts: ClassVar[tuple[str, ...]] = (IN_PLACE,)  # those it can have, the usual one first

    def __init__(self, config: Any, shape: DrafterShape, spec: BlockSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        if hasattr(config, "decay"):
            check_above_zero(config, "decay")
        if getattr(config, "dpace_alpha", None) is not None:
            check_shares(config, "dpace_alpha")

    def fit_table(self, embed: Tensor) -> None:
        """Fit fresh weights to the target's embedding table [V, H]; most heads have nothing to fit."""

    def propose(self, draft: DraftOutput, sampling: Sampling | None = None) -> Proposal:
        """Draft the S tokens of every block."""
        raise NotImplementedError

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        """The terms of the objective on these blocks; `progress` is the share of the run that is done, in [0, 1]."""
        raise NotImplementedError

    @property
    def samples(self) -> bool:
        """Whether its proposals may be drawn: the sampled contract."""
        return getattr(self.config, "contract", DETERMINISTIC) == SAMPLED

    def step_confidence(self, draft: DraftOutput, proposal: Proposal) -> Tensor:
        """How likely each drafted token is accepted once those before it are, [N, S] in [0, 1], at least fp32.

        What the proposal says of itself, else the drafter's own probability of its likeliest token.
        """
        if proposal.confidence is not None:
            return proposal.confidence
        values, _, lse = topk_lse(draft.logits.flatten(0, 1), 1, draft.num_ids)
        return (values[:, 0] - lse).exp().view(proposal.token_ids.shape)


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise ValueError for a config value that is none of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_above_zero(config: Any, *names: str) -> None:
    """Raise ValueError for numbers of a head's config that are not above 0, or without end."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{name} of the head must be a number above 0, got {getattr(config, name)}")


def check_not_negative(config: Any, *names: str) -> None:
    """Raise ValueError for numbers of a head's config that are below 0, or without end."""
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name} of the head must not be negative, got {getattr(config, name)}")


def check_shares(config: Any, *names: str) -> None:
    """Raise ValueError for numbers of a head's config outside [0, 1]."""
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} of the head must be in [0, 1], got {getattr(config, name)}")


def label_index(draft: DraftOutput, labels: BlockLabels) -> tuple[Tensor, Tensor]:
    """Where every label stands in the draft vocabulary, and which slots have one.

    Returns [N, S] indices into the logits and [N, S] valid: a label outside the draft vocabulary has none.
    """
    if draft.vocab_ids is None:
        return labels.token_ids, labels.valid
    index = torch.searchsorted(draft.vocab_ids, labels.token_ids).clamp(max=len(draft.vocab_ids) - 1)
    return index, labels.valid & (draft.vocab_ids[index] == labels.token_ids)


def prefix_terms(scores: dict[str, Tensor], index: Tensor, valid: Tensor, labels: BlockLabels) -> dict[str, LossTerm]:
    """Diagnostics by name: mean prefix that the top choice of each logits [N, S, D] gets right, of full blocks.

    A maximum is several times cheaper than an argmax, so a tie for the top counts as right. Of logits under teacher
    forcing it is the prefix of the roll-out: up to its first error that has the true tokens before it.
    """
    terms = {}
    for name, logits in scores.items():
        logits = logits.detach()
        right = valid & (logits.gather(-1, index[..., None])[..., 0] >= logits.amax(dim=-1))
        terms[name] = diagnostic(prefix_length(right), labels.valid.all(dim=-1))
    return terms


def previous_ids(draft: DraftOutput, token_ids: Tensor) -> Tensor:
    """The token before every slot: the anchor, then `token_ids` [N, S] but the last -> [N, S]."""
    return torch.cat([draft.anchor_ids[:, None], token_ids[:, :-1]], dim=1)


def roll_out(step: Step, draft: DraftOutput, contract: str, sampling: Sampling | None) -> Proposal:
    """Draft slot after slot, each given the one before it.

    Deterministic, or without a row of temperature above 0: the argmax of every slot, a point mass. Sampled: a draw
    from the softmax of `step`'s logits at the row's own temperature and filters; the proposal then holds
    exactly these laws.
    """
    drawn = contract == SAMPLED and sampling is not None and sampling.any_sampled
    tokens, laws, supports = [], [], []
    index = token_ids = None
    everything = None
    if draft.vocab_ids is not None:
        everything = draft.proposable(draft.vocab_ids).expand(len(draft.anchor_ids), -1)
    for slot in range(draft.hidden.shape[1]):
        logits, support = step(slot, index, token_ids)
        if support is None:
            logits, support = draft.proposable(logits), everything
        if drawn:
            law = target_probs(wide(logits)[:, None], sampling)[:, 0]
            index = draw(law, uniform(sampling.seeds, sampling.positions + slot, PROPOSAL_DRAW))
            laws.append(law)
            supports.append(support)
        else:
            index = logits.argmax(dim=-1)
        token_ids = index if support is None else support.gather(-1, index[:, None])[:, 0]
        tokens.append(token_ids)
    proposal = torch.stack(tokens, dim=1)
    if not drawn:
        return Proposal(proposal)
    probs = torch.stack(laws, dim=1)
    if supports[0] is None:  # the law of all target ids; that of a padding row is 0
        return Proposal(proposal, nn.functional.pad(probs, (0, draft.logits.shape[-1] - probs.shape[-1])))
    return Proposal(proposal, probs, torch.stack(supports, dim=1))
