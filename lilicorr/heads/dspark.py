"""DSpark: a Markov head biases every slot by the token before it, and a confidence head says when to stop.

Place in the flow: the second of the two concurrent baselines (arXiv:2607.05147). Training is teacher-forced on the
leading run of labels: cross-entropy, distance to the target's own law, and for the confidence the acceptance
probability that follows from it. Drafting picks (deterministic contract) or draws (sampled contract) one slot
after the other. Paper: section 4.1 (baselines), Appendix A. Parameter names are DeepSpec's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lilicorr.blocks import ANCHOR_FIRST, BlockLabels, BlockSpec, DraftOutput, LossTerm, Proposal, prefix_length, wide
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
from lilicorr.losses import slot_weights, total_variation_loss, weighted_mean
from lilicorr.verify import Sampling

if TYPE_CHECKING:
    from lilicorr.drafter import DrafterShape

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig:
    """Sizes, objective and decoding of the DSpark head; weights as in its paper, decay as for the other heads."""

    markov_rank: int = 256
    markov_head_type: str = "vanilla"  # vanilla | gated | rnn
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True  # the confidence sees the token before its slot
    decay: float = 7.0  # of the slots' weights; 4 at block size 7
    ce_weight: float = 0.1
    distance_weight: float = 0.9
    confidence_weight: float = 1.0
    detach_confidence: bool = False  # keep the confidence's gradient out of the drafter
    confidence_threshold: float = 0.0  # decoding: verify up to the first slot less confident than this; 0: all
    contract: str = DETERMINISTIC  # deterministic | sampled


class MarkovHead(nn.Module):
    """The low-rank bias W2 u, where u is made of the previous token and, gated and rnn, of the slot's state."""

    def __init__(self, kind: str, rank: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, hidden: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """u [N, S, rank] of states [N, S, H] and previous ids [N, S]; the recurrent state goes in and out."""
        before = self.markov_w1(previous)
        if self.kind == "vanilla":
            return before, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, before], dim=-1))) * before, None
        state = torch.zeros_like(before[:, 0]) if state is None else state
        units = []
        for slot in range(hidden.shape[1]):
            joint = self.joint_proj(torch.cat([state, before[:, slot], hidden[:, slot]], dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            units.append(torch.tanh(out))
        return torch.stack(units, dim=1), state


class ConfidenceHead(nn.Module):
    """One logit per slot: whether its token will be accepted, judged before it is drafted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)


class DSparkHead(Head):
    """Markov-corrected logits, and confidences that may end a block early."""

    Config = DSparkConfig
    layouts = (ANCHOR_FIRST,)
    format = HeadFormat(
        "Qwen3DSparkModel",
        projector_type="dspark",
        also_read=("DFlashDraftModel", "DSparkDraftModel"),
        tensors=("markov_head.", "confidence_head."),
        older_names={
            r"^logit_head\.": "",
            r"^(markov_w\d|gate_proj|joint_proj)\.": r"markov_head.\1.",
            r"^confidence_proj\.": "confidence_head.proj.",
        },
        config_fields={
            name: name
            for name in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        },
        older_fields={"enable_confidence_head": "use_confidence_head"},
        layout_field="shift_label",
        without_head={"markov_rank": 0, "enable_confidence_head": False},
        at_top=(
            *("block_size", "mask_token_id", "target_layer_ids", "num_anchors"),
            *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        ),
        target_tables=True,
    )

    def __init__(self, config: DSparkConfig, shape: DrafterShape, spec: BlockSpec) -> None:
        super().__init__(config, shape, spec)
        check_choice("markov_head_type", config.markov_head_type, MARKOV_HEADS)
        check_choice("contract", config.contract, CONTRACTS)
        check_above_zero(config, "markov_rank")
        check_not_negative(config, "ce_weight", "distance_weight", "confidence_weight")
        check_shares(config, "confidence_threshold")
        if config.confidence_threshold and not config.enable_confidence_head:
            raise ValueError("confidence_threshold needs enable_confidence_head")
        rank = config.markov_rank
        self.markov_head = MarkovHead(config.markov_head_type, rank, shape.hidden_size, shape.vocab_size)
        if config.enable_confidence_head:
            seen = rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(shape.hidden_size + seen)

    def propose(self, draft: DraftOutput, sampling: Sampling | None = None) -> Proposal:
        """Slot after slot; with a threshold the proposal ends before the first slot that is not confident."""
        table, state = draft.rows_of(self.markov_head.markov_w2.weight), None

        def step(slot: int, _index: Tensor | None, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
            nonlocal state
            previous = draft.anchor_ids if token_ids is None else token_ids
            units, state = self.markov_head(draft.hidden[:, slot : slot + 1], previous[:, None], state)
            return draft.logits[:, slot] + units[:, 0] @ table.T, None

        proposal = roll_out(step, draft, self.config.contract, sampling)
        if not self.config.confidence_threshold:
            return proposal
        # A slot's confidence has seen the tokens before it and not its own: exactness needs no more.
        lengths = prefix_length(self.step_confidence(draft, proposal) >= self.config.confidence_threshold)
        return dataclasses.replace(proposal, lengths=lengths)

    def confidence(self, draft: DraftOutput, token_ids: Tensor) -> Tensor:
        """Confidence logits [N, S], at least fp32, given that the tokens before a slot are `token_ids` [N, S]."""
        seen = draft.hidden
        if self.config.confidence_head_with_markov:
            seen = torch.cat([seen, self.markov_head.markov_w1(previous_ids(draft, token_ids)).to(seen.dtype)], dim=-1)
        if self.config.detach_confidence:
            seen = seen.detach()
        return wide(self.confidence_head.proj(seen)[..., 0])

    def step_confidence(self, draft: DraftOutput, proposal: Proposal) -> Tensor:
        """The confidence head's word where there is one; see `Head`."""
        if not self.config.enable_confidence_head:
            return super().step_confidence(draft, proposal)
        return torch.sigmoid(self.confidence(draft, proposal.token_ids))

    def corrected(self, draft: DraftOutput, token_ids: Tensor) -> Tensor:
        """Logits [N, S, D] of every slot, given that the tokens before it are `token_ids` [N, S]."""
        units, _ = self.markov_head(draft.hidden, previous_ids(draft, token_ids), None)
        return draft.logits + units @ draft.rows_of(self.markov_head.markov_w2.weight).T

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        """0.1 cross-entropy + 0.9 distance to the target's law + confidence, on the leading run of labels.

        The confidence learns the acceptance probability 1 - TV(p, q) of its slot as it is now.
        """
        config = self.config
        index, valid = label_index(draft, labels)
        logits = self.corrected(draft, labels.token_ids)
        weights = slot_weights(labels.valid.cumprod(dim=-1).bool(), config.decay, wide(logits).dtype)
        log_probs = log_probs_at(logits, index[..., None])[..., 0]
        distance = total_variation_loss(logits, labels.target_logits().softmax(dim=-1), draft.vocab_ids)
        terms = {
            "head_ce": weighted_mean(-log_probs, weights * valid, config.ce_weight),
            "distance": weighted_mean(distance, weights, config.distance_weight),
        }
        if config.enable_confidence_head:
            accepted = 1 - 0.5 * distance.detach()
            surprise = nn.functional.binary_cross_entropy_with_logits(
                self.confidence(draft, labels.token_ids), accepted, reduction="none"
            )
            terms["confidence"] = weighted_mean(surprise, weights, config.confidence_weight)
        return terms | prefix_terms({"selected_prefix": logits, "top1_prefix": draft.logits}, index, valid, labels)
