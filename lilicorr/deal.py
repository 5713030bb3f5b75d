"""Which worker trains on which of a step's rows, and in which micro-batches.

Place in the flow: `training` deals what the sampler names. Shares follow from the rows and the number of workers
alone, so all ranks find the same ones without talking, and gradients do not depend on them but for the order of
additions. Paper: none; Table 4 has the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lilicorr.corpus import TrainingSet

# What one more anchor costs, in tokens of a row. `--estimate` counts 108 TFLOP for the 512 anchors of a mean row of
# LiLiCorr on Qwen3-8B (drafter, loss, backward pass, what is done again) and 14 for its 1,000 tokens (the target):
# 0.211 an anchor over 0.014 a token; on Qwen3-4B it is 17. That it follows no model is no loss: where an anchor costs
# 8 or 60 tokens instead, a simulated step's busiest worker has the same to do as if its own number had been dealt by.
ANCHOR_COST = 15


def row_costs(training_set: TrainingSet, rows: Sequence[int], max_anchors: int) -> list[int]:
    """What a pass over each of the rows [R] costs, in tokens: its own and, `ANCHOR_COST` each, its anchors."""
    anchors = training_set.num_anchors(rows, max_anchors)
    return (training_set.lengths[list(rows)] + ANCHOR_COST * anchors).tolist()


def split_rows(costs: Sequence[int], num_workers: int) -> list[list[int]]:
    """Deal a step's rows to the workers so that the sums of costs are nearly equal; each share is in falling cost.

    The costliest first, always to the worker with the least so far among those that have room: none gets more rows
    than an even deal has at most, which bounds its memory and how often sharded layers are gathered. The shares are a
    partition of `range(len(costs))` for any number of workers; with more workers than rows some are empty. Neighbours
    in a share are alike in anchors and length, so a micro-batch has little padding.
    """
    room = math.ceil(len(costs) / num_workers)
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for index in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        worker = min(range(num_workers), key=lambda number: (len(shares[number]) == room, loads[number], number))
        shares[worker].append(index)
        loads[worker] += costs[index]
    return shares


def deal_rows(
    rows: Sequence[int], costs: Sequence[int], size: int, rank: int = 0, world: int = 1, even: bool = False
) -> Iterator[tuple[list[int], bool]]:
    """A rank's part of a step's rows, which cost so much, in micro-batches of `size`, and whether they count.

    A rank without rows does one for nothing, so that all ranks hold the same terms. With `even` all ranks have as many
    micro-batches as the one with the most.
    """
    shares = split_rows(costs, world)
    share = shares[rank]
    wanted = max(math.ceil(len(one) / size) for one in shares) if even else 1
    for _ in range(math.ceil(len(share) / size), wanted):
        yield [rows[costs.index(min(costs))]], False
    for start in range(0, len(share), size):
        yield [rows[index] for index in share[start : start + size]], True
