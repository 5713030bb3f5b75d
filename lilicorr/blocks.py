"""The records that flow through lilicorr, and the one legend of their dimensions.

Place in the flow: every other module speaks in these records. A row of tokens becomes blocks
(`anchors`), the drafter turns blocks into a `DraftOutput`, a head turns that into a `Proposal` (serving)
or `LossTerm`s (training), and `verify` turns a proposal into a `Verdict`.

Dimensions, used in every shape comment of the project:

    R  rows: sequences of a training batch, or requests of the running batch
    T  tokens of a row
    A  anchors per row
    N  blocks, N = R * A in training and N = R in serving
    B  block size: input tokens of a block, anchor included
    S  slots of a block, the tokens it drafts: B - 1 in place, B anchor-first (`LAYOUTS`); index s of an
       [N, S] tensor is the paper's slot s + 1, the token s + 1 positions behind the anchor, in both
    K  candidates kept per slot
    H  hidden width of target and drafter
    C  captured target layers
    V  target vocabulary (embedding rows); D is the draft vocabulary where it is a subset
    E  width of the in and out vectors

Paper: sections 3.1 (blocks, slots, anchor) and 3.2 (candidates).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Which input token of a block [anchor, mask, ..., mask] predicts which position. In place, a mask predicts its own
# position and the anchor nothing (DFlash, LiLiCorr); anchor-first, every token predicts the position behind its own.
IN_PLACE, ANCHOR_FIRST = "in_place", "anchor_first"
LAYOUTS = (IN_PLACE, ANCHOR_FIRST)


def wide(x: Tensor) -> Tensor:
    """`x` in at least fp32: half precisions are widened, fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def prefix_length(matches: Tensor) -> Tensor:
    """Length of the leading run of true along the last axis, [..., S] -> [...] int64."""
    return matches.long().cumprod(dim=-1).sum(dim=-1)


@dataclass(frozen=True)
class BlockSpec:
    """What target, drafter and head must agree on about a block."""

    block_size: int
    num_candidates: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layout: str = IN_PLACE

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.num_slots < 1:
            least = 2 if self.layout == IN_PLACE else 1
            raise ValueError(f"block_size must be at least {least} {self.layout}, got {self.block_size}")
        if self.num_candidates < 1:
            raise ValueError(f"num_candidates must be at least 1, got {self.num_candidates}")
        if self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must not be negative, got {self.mask_token_id}")
        check_layer_ids(self.target_layer_ids)

    @property
    def num_slots(self) -> int:
        """Drafted tokens per block, the drafted width."""
        return self.block_size - (self.layout == IN_PLACE)


def check_layer_ids(ids: tuple[int, ...]) -> None:
    """Raise ValueError for captured layers that are none, or not in the order in which they are captured."""
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ValueError(f"target_layer_ids must be ascending, distinct and >= 0, got {ids}")


@dataclass(frozen=True)
class TrainBatch:
    """Right-padded rows of a training step."""

    input_ids: Tensor  # [R, T] int64
    loss_mask: Tensor  # [R, T] bool, true where the target generated the token
    lengths: Tensor  # [R] int64, tokens of each row without padding
    sample_ids: Tensor  # [R] int64, identity of the row in the training set


@dataclass(frozen=True)
class DraftOutput:
    """What the drafter knows of N blocks; the whole input of a head."""

    anchor_ids: Tensor  # [N] int64, the last committed token of each block
    hidden: Tensor  # [N, S, H] drafter states after its final norm
    logits: Tensor  # [N, S, D] lm_head of `hidden`
    anchor_context: Tensor  # [N, H] fused target features of the position before the anchor
    anchor_valid: Tensor  # [N] bool, false where there is no position before the anchor
    embed: Tensor  # [V, H] the target's input embedding, frozen
    vocab_ids: Tensor | None = None  # [D] target id of each draft-vocabulary row, None when D = V
    num_ids: int | None = None  # columns of `logits` that are tokens; those behind pad the tables. None: all D

    def proposable(self, columns: Tensor) -> Tensor:
        """The columns [..., D] that may be drafted: a padding row is no token, however likely the drafter finds it."""
        return columns if self.num_ids is None else columns[..., : self.num_ids]

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to the target's, any shape."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]

    def rows_of(self, table: Tensor) -> Tensor:
        """The rows of the draft vocabulary in a table of the target's, [V, ...] -> [D, ...]."""
        return table if self.vocab_ids is None else table[self.vocab_ids]


def full_precision(x: Tensor) -> torch.autocast:
    """A context in which products of fp32 tensors on x's device are fp32; autocast would take them in bfloat16."""
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class BlockLabels:
    """What N training blocks should have been; the target's view of them."""

    token_ids: Tensor  # [N, S] int64 ground truth
    valid: Tensor  # [N, S] bool, true where the token exists and was generated by the target
    target_hidden: Tensor  # [N, S, H] the target's final state that predicted the label
    lm_head: Tensor  # [V, H] the target's output projection, frozen

    def target_logits_at(self, token_ids: Tensor) -> Tensor:
        """The target's logits of `token_ids` [N, S, K] -> [N, S, K], without a vocabulary pass; at least fp32."""
        with full_precision(self.lm_head):
            return torch.einsum("nskh,nsh->nsk", wide(self.lm_head[token_ids]), wide(self.target_hidden))

    def target_logits(self) -> Tensor:
        """All the target's logits [N, S, V], for the losses that need its whole law."""
        return wide(torch.nn.functional.linear(self.target_hidden, self.lm_head))


@dataclass(frozen=True)
class Proposal:
    """The drafted tokens of N blocks and how they were made.

    `probs is None`: a point mass, the deterministic contract. Otherwise the tokens were drawn, slot
    after slot, from `probs`; with `support_ids` the K columns of `probs` are those target ids, without
    it they are the V ids themselves. With `lengths` only that many slots of a block are to be verified; whether
    a slot is must not depend on the token drafted in it or behind it.
    """

    token_ids: Tensor  # [N, S] int64
    probs: Tensor | None = None  # [N, S, K] or [N, S, V]
    support_ids: Tensor | None = None  # [N, S, K] int64
    lengths: Tensor | None = None  # [N] int64, 0..S; None: every slot
    confidence: Tensor | None = None  # [N, S] how sure the head is of each token given those before it, where it says

    def trimmed(self) -> Proposal:
        """Without the slots that no row wants verified; reads `lengths` on the host."""
        if self.lengths is None:
            return self
        width = int(self.lengths.max())
        if width == 0:
            return Proposal(self.token_ids[:, :0])
        parts = (self.token_ids, self.probs, self.support_ids)
        return Proposal(*(part if part is None else part[:, :width] for part in parts), self.lengths)


@dataclass(frozen=True)
class Verdict:
    """What the target made of a proposal: the accepted run and the token after it."""

    num_accepted: Tensor  # [N] int64, 0..S
    next_ids: Tensor  # [N] int64, the correction or the bonus token


@dataclass(frozen=True)
class LossTerm:
    """A weighted mean kept as sum and count, so that it adds up exactly over chunks and ranks.

    Its part of the loss is `weight * sum / count`. A term of weight 0 is a diagnostic.
    """

    sum: Tensor  # scalar
    count: Tensor  # scalar, without gradient
    weight: float

    def __add__(self, other: LossTerm) -> LossTerm:
        assert self.weight == other.weight, f"terms of different weight: {self.weight} and {other.weight}"
        return LossTerm(self.sum + other.sum, self.count + other.count, self.weight)


def add_terms(first: dict[str, LossTerm], second: dict[str, LossTerm]) -> dict[str, LossTerm]:
    """Add two sets of terms by name; both must hold the same names (or `first` be empty)."""
    if not first:
        return dict(second)
    assert first.keys() == second.keys(), f"terms differ: {sorted(first)} and {sorted(second)}"
    return {name: term + second[name] for name, term in first.items()}
