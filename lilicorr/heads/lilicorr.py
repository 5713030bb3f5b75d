"""The LiLiCorr head: one pass over the lattice of candidates gives every candidate an in and an out vector.

Place in the flow: `scores` is the network (section 3.2, Appendix A), `propose` walks over its scores (section
3.5), `loss` is the objective of Eq. (7) with the margin of Appendix G. Parameter names and initialisation are
those of the published training code; `format` translates the names for the public servers when a checkpoint is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lilicorr.blocks import BlockLabels, BlockSpec, DraftOutput, LossTerm, Proposal, prefix_length
from lilicorr.config import LiLiCorrConfig
from lilicorr.heads.base import (
    CONTRACTS,
    SAMPLED,
    Head,
    HeadFormat,
    check_above_zero,
    check_choice,
    check_not_negative,
    check_shares,
    label_index,
    roll_out,
)
from lilicorr.kernels.match_walk import match_scores, match_walk
from lilicorr.kernels.nodes import NodeBuild, NodeWeights, build_nodes, build_nodes_reference
from lilicorr.lattice import (
    WALKS,
    Lattice,
    build_lattice,
    candidates,
    log_probs_at,
    oracle_prefix,
    scores_along,
    top_index,
)
from lilicorr.losses import (
    block_cross_entropy,
    diagnostic,
    distractor_penalty,
    lattice_cross_entropy,
    margin_hinge,
)
from lilicorr.verify import Sampling

if TYPE_CHECKING:
    from lilicorr.drafter import DrafterShape


class LatticeAttention(nn.Module):
    """Multi-head attention of every candidate over every candidate, with an additive bias."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [N, S * K, width], bias [heads, S * K, S * K] -> x's shape."""
        projected = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        queries, keys, values = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias.to(x.dtype)[None])
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


class LatticeLayer(nn.Module):
    """Pre-norm attention and a plain SiLU feed-forward."""

    def __init__(self, width: int, num_heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(width, eps=eps)
        self.attn = LatticeAttention(width, num_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorrHead(Head):
    """In and out vectors for every candidate, and the greedy walk over their cosines."""

    Config = LiLiCorrConfig
    format = HeadFormat(
        "LiLiCorrDraftModel",
        prefix="lilicorr.",
        tensors=("lilicorr.",),
        # released servers name the parts of the two MLPs, as newer exports do; older ones number them
        names={
            r"\.feature_mlp\.0\.": ".feature_norm.",
            r"mlp\.([01])\.": "mlp.up_proj.",
            r"mlp\.([23])\.": "mlp.down_proj.",
        },
        older_names={
            r"\.feature_norm\.": ".feature_mlp.0.",
            r"\.feature_mlp\.up_proj\.": ".feature_mlp.1.",
            r"\.feature_mlp\.down_proj\.": ".feature_mlp.3.",
            r"^(lilicorr\.layers\.\d+\.mlp)\.up_proj\.": r"\1.0.",
            r"^(lilicorr\.layers\.\d+\.mlp)\.down_proj\.": r"\1.2.",
        },
        config_fields={
            "lilicorr_hidden_size": "hidden_size",
            "lilicorr_num_layers": "num_layers",
            "lilicorr_num_heads": "num_heads",
            "lilicorr_mlp_ratio": "mlp_ratio",
            "lilicorr_factor_dim": "factor_dim",
            "lilicorr_vector_eps": "vector_eps",
            "lilicorr_logit_scale": "logit_scale",
        },
        candidates_field="lilicorr_candidate_topk",
        without_head={"lilicorr_enabled": False},
    )

    def __init__(self, config: LiLiCorrConfig, shape: DrafterShape, spec: BlockSpec) -> None:
        super().__init__(config, shape, spec)
        check_choice("walk", config.walk, WALKS)
        check_choice("contract", config.contract, CONTRACTS)
        if config.contract == SAMPLED and config.walk != "greedy":
            raise ValueError(f"the sampled contract draws along the greedy walk, got walk {config.walk!r}")
        check_above_zero(config, "mlp_ratio", "factor_dim", "vector_eps", "logit_scale")
        check_not_negative(config, "head_weight", "distractor_weight", "margin")
        check_shares(config, "margin_blend", "ramp_fraction")
        if config.hidden_size < 0 or config.num_layers < 0:
            sizes = f"hidden_size {config.hidden_size} and num_layers {config.num_layers}"
            raise ValueError(f"{sizes} of the head must not be negative")
        width, outer, slots = config.hidden_size or shape.hidden_size, shape.hidden_size, spec.num_slots
        if config.num_heads < 1 or width % config.num_heads:
            raise ValueError(f"num_heads must divide the head's hidden_size {width}, got {config.num_heads}")
        if config.token_scale < 0 or (config.token_scale and width == outer):
            raise ValueError(
                f"token_scale must not be negative, and 0 for a head of the drafter's width {outer}, which projects no "
                f"tokens, got {config.token_scale} with hidden_size {config.hidden_size}"
            )
        # A head as wide as the drafter takes the embedding as it is, as in the public servers.
        self.token_proj = nn.Identity() if width == outer else nn.Linear(outer, width)
        self.pass_hidden_proj = nn.Linear(outer, width)
        self.context_proj = nn.Linear(outer, width)
        self.feature_mlp = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, width), nn.SiLU(), nn.Linear(width, width))
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, spec.num_candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.num_heads, 2 * spec.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.num_heads))
        inner = int(width * config.mlp_ratio)
        eps = shape.rms_norm_eps
        self.layers = nn.ModuleList(LatticeLayer(width, config.num_heads, inner, eps) for _ in range(config.num_layers))
        self.output_norm = nn.RMSNorm(width, eps=eps)
        self.anchor_norm = nn.RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, config.factor_dim)
        self.in_head = nn.Linear(width, config.factor_dim)
        self.anchor_out_head = nn.Linear(width, config.factor_dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    @torch.no_grad()
    def fit_table(self, embed: Tensor) -> None:
        """With `token_scale`, scale `token_proj` so that the projected table has this root mean square.

        Small target embeddings are otherwise lost beside the drafter's state, which all candidates of a slot
        share, and the head first has to grow the weights that tell them apart (docs/training.md).
        """
        if self.config.token_scale:
            projected = nn.functional.linear(embed.to(self.token_proj.weight.dtype), self.token_proj.weight)
            self.token_proj.weight.mul_(self.config.token_scale / projected.square().mean().sqrt())

    def propose(self, draft: DraftOutput, sampling: Sampling | None = None) -> Proposal:
        """The walk's tokens, whatever the temperature: the deterministic contract of section 4.1.

        In the sampled contract every step of the walk is a draw from the softmax over the K continuations, which
        are all the proposal's law holds.
        """
        lattice = candidates(draft, self.spec.num_candidates)
        if self.config.contract == SAMPLED:
            anchor_scores, pair_scores = self.scores(draft, lattice)
            blocks = torch.arange(len(anchor_scores), device=anchor_scores.device)

            def step(slot: int, rank: Tensor | None, _token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
                scores = anchor_scores if rank is None else pair_scores[blocks, slot - 1, rank]
                return scores, lattice.token_ids[:, slot]

            return roll_out(step, draft, SAMPLED, sampling)
        vectors = self._vectors(draft, lattice, build_nodes)
        ranks, confidence = match_walk(*vectors, self.config.logit_scale, self.config.vector_eps, self.config.walk)
        return Proposal(lattice.token_ids.gather(-1, ranks[..., None])[..., 0], confidence=confidence)

    def scores(self, draft: DraftOutput, lattice: Lattice) -> tuple[Tensor, Tensor]:
        """Eq. (1): sigma times the cosine of every out vector with the in vectors of the next slot; differentiable.

        Returns anchor scores [N, K] and pair scores [N, S - 1, K, K] (from, to), at least fp32.
        """
        vectors = self._vectors(draft, lattice, build_nodes_reference)
        return match_scores(*vectors, self.config.logit_scale, self.config.vector_eps)

    def _vectors(self, draft: DraftOutput, lattice: Lattice, build: NodeBuild) -> tuple[Tensor, Tensor, Tensor]:
        """The anchor's out vector [N, E], and out and in vectors [N, S, K, E] of the candidates."""
        anchor = self.anchor_norm(self.context_proj(draft.anchor_context) * draft.anchor_valid[:, None])
        fused = self._attend(draft, lattice, build)
        context = anchor[:, None, None]
        joined = torch.cat([fused, context.expand_as(fused), fused * context], dim=-1)
        units = nn.functional.silu(self.factor_input_proj(joined))
        return self.anchor_out_head(anchor), self.out_head(units), self.in_head(units)

    def _attend(self, draft: DraftOutput, lattice: Lattice, build: NodeBuild) -> Tensor:
        """The nodes, [N, S, K, width], after attention over the whole lattice."""
        norm, up, _silu, down = self.feature_mlp
        features = (norm.weight, norm.bias, norm.eps, up.weight, up.bias, down.weight, down.bias)
        weights = NodeWeights(*features, self.slot_embedding[0, 0, :, 0], self.rank_embedding[0, 0, 0])
        nodes = build(lattice, *self._token_table(draft.embed, lattice), self.pass_hidden_proj(draft.hidden), weights)
        x, bias = nodes.flatten(1, 2), self._attention_bias(nodes.shape[1])
        for layer in self.layers:
            x = layer(x, bias)
        return self.output_norm(x).view_as(nodes)

    def _token_table(self, embed: Tensor, lattice: Lattice) -> tuple[Tensor, Tensor]:
        """Projected embeddings and the row of every candidate: of all tokens where there are fewer than candidates."""
        kind = self.rank_embedding.dtype  # the target's table may be of a narrower type than the head
        token_ids = lattice.token_ids
        if token_ids.numel() > embed.shape[0]:
            return self.token_proj(embed.to(kind)), token_ids
        rows = torch.arange(token_ids.numel(), device=token_ids.device).view_as(token_ids)
        return self.token_proj(embed[token_ids.flatten()].to(kind)), rows

    def _attention_bias(self, num_slots: int) -> Tensor:
        """[heads, S * K, S * K]: one value per signed slot distance, one for candidates of the same slot."""
        slots = torch.arange(num_slots, device=self.same_slot_bias.device)
        distance = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distance + self.spec.block_size - 1]
        bias = bias + self.same_slot_bias[:, None, None] * (distance == 0)
        num_candidates = self.spec.num_candidates
        return bias.repeat_interleave(num_candidates, dim=1).repeat_interleave(num_candidates, dim=2)

    def loss(self, draft: DraftOutput, labels: BlockLabels, progress: float) -> dict[str, LossTerm]:
        """Eq. (7) with Appendix G: the drafter's loss, and on the oracle prefix the three terms of the head."""
        config = self.config
        index, valid = label_index(draft, labels)
        top = top_index(draft.proposable(draft.logits), self.spec.num_candidates)
        log_probs = log_probs_at(draft.logits, torch.cat([index[..., None], top], dim=-1))
        lattice = build_lattice(draft.token_ids(top), log_probs[..., 1:])
        anchor_scores, pair_scores = self.scores(draft, lattice)
        gold_rank, supervised = oracle_prefix(lattice.token_ids, labels)
        full = labels.valid.all(dim=-1)
        chosen = supervised & full[:, None] if config.full_blocks_only else supervised
        scores = scores_along(anchor_scores, pair_scores, gold_rank)
        target_logits = labels.target_logits_at(lattice.token_ids)
        ramp = min(1.0, progress / config.ramp_fraction) if config.ramp_fraction else 1.0
        weight = ramp * config.head_weight
        terms = {
            "drafter_ce": block_cross_entropy(log_probs[..., 0], valid, config.decay, dpace_alpha=config.dpace_alpha),
            "head_ce": lattice_cross_entropy(scores, gold_rank, chosen, weight * (1 - config.margin_blend)),
            "distractor": distractor_penalty(
                scores, target_logits, gold_rank, chosen, weight * config.distractor_weight
            ),
            "margin": margin_hinge(scores, gold_rank, chosen, config.margin, weight * config.margin_blend),
        }
        return terms | self._diagnostics(lattice, anchor_scores, pair_scores, labels, supervised, full)

    def _diagnostics(
        self,
        lattice: Lattice,
        anchor_scores: Tensor,
        pair_scores: Tensor,
        labels: BlockLabels,
        supervised: Tensor,
        full: Tensor,
    ) -> dict[str, LossTerm]:
        """Mean prefixes and the share begun wrong, of blocks that have every label; the spread of all blocks' scores.

        The spread is 0 when the head has collapsed, see `tracking.alarm`.
        """
        ranks = WALKS[self.config.walk](anchor_scores.detach(), pair_scores.detach())
        walked = lattice.token_ids.gather(-1, ranks[..., None])[..., 0] == labels.token_ids
        top1 = lattice.token_ids[..., 0] == labels.token_ids
        # population deviation without std(), which warns when a batch holds no block
        scores = torch.cat([anchor_scores[:, None], pair_scores.flatten(1, 2)], dim=1)
        spread = (scores - scores.mean(dim=-1, keepdim=True)).square().mean(dim=-1).sqrt().mean(dim=-1)
        selected = prefix_length(walked)
        terms = {
            "selected_prefix": diagnostic(selected, full),
            "zero_prefix_rate": diagnostic(selected == 0, full),
            "top1_prefix": diagnostic(prefix_length(top1), full),
            "oracle_prefix": diagnostic(prefix_length(supervised), full),
        }
        if self.spec.num_candidates > 1:  # one candidate is always told apart
            terms["score_spread"] = diagnostic(spread, torch.ones_like(full))
        return terms
