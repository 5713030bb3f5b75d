"""How much of each block is verified when many rows decode: the drafts that are likeliest to be reached and accepted.

Verification runs the target on every position of every block. With few rows that costs no more than one position does,
with many it costs by the position, and the drafts behind the first few are mostly refused. With costs measured on the
machine (`EngineConfig.verify_costs`) a step verifies `width` positions a row in the mean: every anchor, and of all
rows' drafts together those with the largest product of confidences up to them (`Head.step_confidence`).

Place in the flow: before a step `engine` asks `Planner.width`; `step` cuts the target's pass by `choose`, between
proposal and verification and on the device; what came out goes to `Planner.observe`.

Exact: the tokens of a point mass's block are draws of the target itself, however many of them were verified at once
(see `verify`), so the choice changes when a token comes and never which. A proposal that was drawn makes its tokens
part of the draw, and where a block ends would change the answer: such heads are refused.

Paper: beyond it; the confidence is that of the walk, section 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lilicorr.config import EngineConfig
from lilicorr.draft_model import DraftModel

KEPT = 0.9  # share of the past in the running means


@dataclass(frozen=True)
class Packing:
    """Which M of the N * Q positions of a pass are run: those of the first `lengths` drafts behind every anchor."""

    lengths: Tensor  # [N] int64 drafts to verify
    order: Tensor  # [M] int64 places among the N * Q, ascending
    at: Tensor  # [N, Q] int64 place among the M; of a position that is not run, that of another one

    def pack(self, x: Tensor) -> Tensor:
        """[N, Q, ...] -> [M, ...]."""
        return x.flatten(0, 1).index_select(0, self.order)

    def spread(self, x: Tensor) -> Tensor:
        """[M, ...] -> [N, Q, ...], with anything where nothing was run."""
        return x.index_select(0, self.at.flatten()).unflatten(0, self.at.shape)


def survival_of(confidence: Tensor, lengths: Tensor | None, active: Tensor) -> Tensor:
    """Probability [N, S] that a draft is reached and accepted, from the confidence [N, S] of each given those before.

    0 behind a proposal's `lengths` [N], -1 in rows that are not `active` [N]: they come last.
    """
    product = confidence.float().cumprod(dim=-1)
    if lengths is not None:
        product = product.where(torch.arange(product.shape[1], device=product.device) < lengths[:, None], 0.0)
    return product.where(active[:, None], -1.0)


def choose(survival: Tensor, width: int) -> Packing:
    """The `width` * N positions to run: N anchors, and the drafts of the largest `survival` [N, S]."""
    num_rows, num_slots = survival.shape
    assert 1 <= width <= num_slots + 1, f"{width} positions a row of {num_slots + 1}"
    best = survival.flatten().topk((width - 1) * num_rows).indices
    chosen = torch.zeros(survival.numel(), dtype=torch.int64, device=survival.device).index_fill_(0, best, 1)
    # survival falls along a block, so these are the first ones of it; among equal ones their number counts
    lengths = chosen.view_as(survival).sum(dim=1)
    run = (torch.arange(num_slots + 1, device=survival.device) <= lengths[:, None]).flatten().int()
    order = run.argsort(descending=True, stable=True)[: width * num_rows]
    return Packing(lengths, order, (run.cumsum(0) - 1).view(num_rows, num_slots + 1))


class Planner:
    """Chooses the width of a step: most tokens for its time, as far as the steps before it tell.

    `costs` are (rows, width, milliseconds) of steps; a batch is taken for the largest listed one that it holds, and
    one smaller than all of them is verified whole. `num_tokens` are the positions of a whole block.

    Raises ValueError for a width that no block has, and for rows without the whole block.
    """

    def __init__(self, costs: tuple[tuple[float, ...], ...], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.costs: dict[int, dict[int, float]] = {}
        for rows, width, milliseconds in costs:
            if not 2 <= width <= num_tokens:
                raise ValueError(f"verify_costs: a width must be in 2..{num_tokens}, got {width:g}")
            self.costs.setdefault(int(rows), {})[int(width)] = milliseconds
        for rows, by_width in self.costs.items():
            if num_tokens not in by_width:
                raise ValueError(f"verify_costs: {rows} rows need the time of whole blocks, width {num_tokens}")
        self._expected: np.ndarray | None = None  # [num_tokens] accepted drafts of a row by width - 1, as the heads say
        self._said, self._accepted = 0.0, 0.0  # drafts of a row that were to be accepted, and were

    @property
    def widths(self) -> dict[int, tuple[int, ...]]:
        """The widths that may be chosen for batches from so many rows on, whole blocks left out."""
        return {rows: tuple(w for w in by_width if w < self.num_tokens) for rows, by_width in self.costs.items()}

    def width(self, num_rows: int) -> int | None:
        """Positions a row in the mean for the next step of `num_rows` rows; None: whole blocks."""
        listed = [rows for rows in self.costs if rows <= num_rows]
        if not listed or self._expected is None:
            return None
        by_width, trust = self.costs[max(listed)], self._accepted / self._said if self._said else 1.0
        best = max(by_width, key=lambda width: ((1 + trust * self._expected[width - 1]) / by_width[width], width))
        return None if best == self.num_tokens else best

    def observe(self, survival: np.ndarray, width: int | None, num_accepted: np.ndarray) -> None:
        """Take up one step: survival [n, S] of its rows, its width, and the drafts [n] that were accepted."""
        running = (survival >= 0).all(axis=1)  # a row that ended in the step before, or is NaN, has nothing to say
        survival, num_accepted = survival[running].astype(np.float64), num_accepted[running]
        if not len(survival):
            return
        num_rows, num_slots = survival.shape
        falling = np.sort(survival.flatten())[::-1]
        total = np.concatenate([[0.0], falling.cumsum()])
        expected = total[np.arange(num_slots + 1) * num_rows] / num_rows
        keep = 0.0 if self._expected is None else KEPT
        self._expected = expected if self._expected is None else keep * self._expected + (1 - keep) * expected
        said = expected[(width or self.num_tokens) - 1]
        self._said = keep * self._said + (1 - keep) * said
        self._accepted = keep * self._accepted + (1 - keep) * float(num_accepted.mean())


def make_planner(config: EngineConfig, draft_model: DraftModel | None, num_tokens: int) -> Planner | None:
    """What chooses how much is verified, where that is asked for; ValueError where it cannot be had."""
    if not config.verify_costs:
        return None
    if draft_model is None:
        raise ValueError("verify_costs is about the drafts of a block, and autoregression has none: leave it empty")
    if draft_model.head.samples:
        raise ValueError(
            f"verify_costs needs a head of the deterministic contract: where the blocks of {draft_model.head_name} end "
            "changes what its sampled contract draws"
        )
    return Planner(config.verify_costs, num_tokens)
