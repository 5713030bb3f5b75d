"""The K largest logits of every row and the logarithm of its normaliser, in one pass over the vocabulary.

Place in the flow: `lattice.candidates` takes the candidates and their log-probabilities
(value - lse) from the drafter's logits. Paper: section 3.2 (candidates) and Table 3 (the fused kernel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lilicorr.blocks import wide
from lilicorr.kernels.language import ceil_div, jit, next_power, tl

MAX_CANDIDATES = 32
LANES = 1024  # neighbouring logits that a program reads at once
UNROLLED = 4  # reads under way at once
MAX_STEPS = 32  # reads of a program: the longer a slice, the less its own K candidates cost
FEW_ROWS = 64  # up to here slices are half as long, so that every multiprocessor has one


def topk_lse_reference(
    logits: Tensor, num_candidates: int, num_ids: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `topk_lse`, differentiable in values and normaliser; fp64 logits stay fp64."""
    logits = wide(logits if num_ids is None else logits[:, :num_ids])
    top = logits.detach().topk(min(num_candidates + 1, logits.shape[-1]), dim=-1)
    ids = top.indices[:, :num_candidates].sort(dim=-1).values
    ids = ids.gather(-1, logits.detach().gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices)
    # topk says nothing about which of equal logits it takes: rows with a tie for the last place are sorted as a whole
    tied = top.values[:, -1] == top.values[:, num_candidates - 1]
    if top.values.shape[-1] > num_candidates and tied.any():
        ordered = logits.detach()[tied].sort(dim=-1, descending=True, stable=True).indices
        ids = ids.index_put((tied,), ordered[:, :num_candidates])
    return logits.gather(-1, ids), ids, logits.logsumexp(dim=-1)


@jit
def _slice_kernel(
    logits,
    stride,
    num_ids,
    values,
    ids,
    maxima,
    sums,
    K: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """The K largest logits of one slice of one row, and the slice's maximum and sum of exponentials."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + part
    logits += row * stride
    first = part * STEPS * LANES
    lanes = first + tl.arange(0, LANES)
    # per lane: the largest logit so far, its first column, and the sum of exponentials below it
    best = tl.full([LANES], float("-inf"), tl.float32)
    column = lanes
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, STEPS, UNROLLED):
        before = best
        for step in tl.static_range(UNROLLED):
            here = lanes + (start + step) * LANES
            x = tl.load(logits + here, mask=here < num_ids, other=float("-inf")).to(tl.float32)
            column = tl.where(x > best, here, column)
            best = tl.maximum(x, best)
        shift = tl.where(best == float("-inf"), 0.0, best)
        total *= tl.exp(before - shift)
        for step in tl.static_range(UNROLLED):
            here = lanes + (start + step) * LANES
            x = tl.load(logits + here, mask=here < num_ids, other=float("-inf")).to(tl.float32)
            total += tl.exp(x - shift)
    top = tl.max(best, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(maxima + place, top)
    tl.store(sums + place, tl.sum(total * tl.exp(best - shift), axis=0))
    # `best` becomes what each lane still has to offer; a lane that gives a candidate is read again, from a near cache
    steps = first + tl.arange(0, STEPS) * LANES
    for rank in tl.static_range(K):
        value = tl.max(best, axis=0)
        taken = tl.min(tl.where(best == value, column, 2147483647), axis=0)
        tl.store(values + place * K + rank, value)
        tl.store(ids + place * K + rank, taken)
        lane = (taken - first) % LANES
        here = steps + lane
        x = tl.load(logits + here, mask=here < num_ids, other=float("-inf")).to(tl.float32)
        behind = (x < value) | ((x == value) & (here > taken))
        next_value = tl.max(tl.where(behind, x, float("-inf")), axis=0)
        next_column = tl.min(tl.where(behind & (x == next_value), here, 2147483647), axis=0)
        chosen = column == taken
        best = tl.where(chosen, next_value, best)
        column = tl.where(chosen, next_column, column)


@jit
def _merge_kernel(
    part_values, part_ids, maxima, sums, values, ids, lse, num_parts, K: tl.constexpr, PARTS: tl.constexpr
):
    """One row's slices put together. Their lists stand in the order of their ids, so the first of equals is lowest."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    tops = tl.load(maxima + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    top = tl.max(tops, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.load(sums + row * num_parts + parts, mask=parts < num_parts, other=0.0) * tl.exp(tops - shift)
    tl.store(lse + row, shift + tl.log(tl.sum(weights, axis=0)))
    entries = tl.arange(0, PARTS * K)
    there = entries < num_parts * K
    left = tl.load(part_values + row * num_parts * K + entries, mask=there, other=float("-inf"))
    numbers = tl.load(part_ids + row * num_parts * K + entries, mask=there, other=2147483647)
    for rank in tl.static_range(K):
        value = tl.max(left, axis=0)
        number = tl.min(tl.where(left == value, numbers, 2147483647), axis=0)
        tl.store(values + row * K + rank, value)
        tl.store(ids + row * K + rank, number.to(tl.int64))
        taken = numbers == number
        left = tl.where(taken, float("-inf"), left)
        numbers = tl.where(taken, 2147483647, numbers)


def topk_lse_triton(logits: Tensor, num_candidates: int, num_ids: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton version of `topk_lse`: every slice of a row once, then the slices of a row together.

    What is found are candidates up to the next power of two.
    """
    check_candidates(num_candidates)
    assert not (torch.is_grad_enabled() and logits.requires_grad), "topk_lse has no gradient on a GPU"
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()} are not contiguous in the vocabulary"
    num_rows, num_ids = logits.shape[0], logits.shape[1] if num_ids is None else num_ids
    assert num_candidates <= num_ids <= logits.shape[1], (num_candidates, num_ids, logits.shape)
    steps = MAX_STEPS if num_rows > FEW_ROWS else MAX_STEPS // 2
    steps = min(steps, max(UNROLLED, next_power(ceil_div(num_ids, LANES))))
    num_parts = ceil_div(num_ids, steps * LANES)

    num_found = next_power(num_candidates)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    part_values = empty(num_rows, num_parts, num_found)
    part_ids = empty(num_rows, num_parts, num_found, dtype=torch.int32)
    maxima, sums = empty(num_rows, num_parts), empty(num_rows, num_parts)
    values, ids, lse = empty(num_rows, num_found), empty(num_rows, num_found, dtype=torch.int64), empty(num_rows)
    if num_rows:
        parts = (part_values, part_ids, maxima, sums)
        _slice_kernel[(num_rows, num_parts)](
            logits, logits.stride(0), num_ids, *parts, num_found, LANES, steps, UNROLLED
        )
        _merge_kernel[(num_rows,)](*parts, values, ids, lse, num_parts, num_found, next_power(num_parts))
    return values[:, :num_candidates].contiguous(), ids[:, :num_candidates].contiguous(), lse


def check_candidates(num_candidates: int) -> None:
    """Raise ValueError for more candidates than the kernel takes."""
    if not 1 <= num_candidates <= MAX_CANDIDATES:
        raise ValueError(f"num_candidates must be in 1..{MAX_CANDIDATES} on a GPU, got {num_candidates}")


def topk_lse(logits: Tensor, num_candidates: int, num_ids: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of every row, largest first, equal ones by ascending id, and log(sum(exp(logits))).

    logits [M, V] of any float type; columns from `num_ids` on do not count (None: all do). Returns values [M, K],
    ids [M, K] int64 and lse [M], values and lse in fp32 (fp64 for fp64 logits on a CPU). A row of -inf has the ids
    0..K-1, values and lse -inf. On a GPU there is no gradient and K is at most 32.
    """
    version = topk_lse_triton if logits.is_cuda else topk_lse_reference
    return version(logits, num_candidates, num_ids)
