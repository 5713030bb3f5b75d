"""Verification in one pass over the target's logits: `lilicorr.verify.verify` on the device, without a dense law.

Place in the flow: the last kernel of the engine's step. `verify` is the definition and the reference; the kernels
draw the same tokens from the same random bits. Every tile of `DRAW_TILE` ids is read once for its maximum and its
mass; the token then lies in one tile, which is read again. The ids of a sparse proposal are left out of the masses
and added with their weights (p - q)+, so no difference of large sums is ever taken.

Top-k and top-p need the order of a row first: `last_kept` sorts it, and the kernels leave out what lies behind.

Paper: sections 3.1 (verification) and 4 (temperature 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lilicorr.blocks import Proposal, Verdict
from lilicorr.kernels.language import ceil_div, jit, next_power, tl
from lilicorr.verify import ACCEPT_TEST, DRAW_TILE, MIN_RESIDUAL, TARGET_DRAW, Sampling, last_kept, verify

TILES = 8  # tiles of one program of the first pass
MAX_OWN = 64  # ids of a slot's law: the kernels' loops over them are unrolled


@jit
def _mix(bits):
    """`verify._mix` on unsigned integers."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@jit
def _under(bits, part):
    """The bits of one more part of a key."""
    return _mix((bits ^ part.to(tl.int64).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)


@jit
def _noise(key, numbers):
    """`verify._noise`."""
    u = ((_under(key, numbers) >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(u))


@jit
def _largest(x):
    """The first lane with the largest number, 0 where there is none.

    Compared with NaN any lane may win, even one behind the vocabulary, and a token is looked up before the step that
    drew it is judged.
    """
    return tl.argmax(tl.where(x == x, x, float("-inf")), axis=0)


@jit
def _first_largest(logits, tops, num_ids, WIDTH: tl.constexpr):
    """The first of a row's largest logits, which lies in the first tile with the largest maximum."""
    first = _largest(tops) * WIDTH
    columns = first + tl.arange(0, WIDTH)
    x = tl.load(logits + columns, mask=columns < num_ids, other=float("-inf")).to(tl.float32)
    return first + _largest(x)


@jit
def _num_slots(lengths, block, num_queries):
    """How many slots of a block are to be verified."""
    num_slots = num_queries - 1
    if lengths is not None:
        num_slots = tl.load(lengths + block).to(tl.int32)
    return num_slots


@jit
def _tile_kernel(
    logits,
    row_stride,
    temperatures,
    last,
    support_ids,
    lengths,
    maxima,
    masses,
    num_ids,
    num_tiles,
    num_queries,
    num_own,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Maximum of every tile, and its mass exp((x - maximum) / temperature) without the proposal's ids."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * row_stride
    tiles = part * TILES + tl.arange(0, TILES)
    columns = tiles[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + columns, mask=columns < num_ids, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=1)
    tl.store(maxima + row * num_tiles + tiles, top, mask=tiles < num_tiles)
    if SAMPLED:
        block, query = row // num_queries, row % num_queries
        temperature = tl.load(temperatures + block)
        if FILTERED:
            end = tl.load(last + row)
            bound = tl.load(logits + end).to(tl.float32)
            x = tl.where((x > bound) | ((x == bound) & (columns <= end)), x, float("-inf"))
        if K > 0:
            num_slots = _num_slots(lengths, block, num_queries)
            for k in tl.static_range(K):
                place = (block * (num_queries - 1) + query) * num_own + k
                excluded = tl.load(support_ids + place, mask=(query < num_slots) & (k < num_own), other=-1)
                if excluded // (TILES * WIDTH) == part:
                    x = tl.where(columns == excluded, float("-inf"), x)
        shift = tl.where(top == float("-inf"), 0.0, top)
        scaled = (x - shift[:, None]) / tl.where(temperature > 0, temperature, 1.0)
        tl.store(masses + row * num_tiles + tiles, tl.sum(tl.exp(scaled), axis=1), mask=tiles < num_tiles)


@jit
def _row_kernel(
    logits,
    row_stride,
    temperatures,
    seeds,
    positions,
    last,
    token_ids,
    probs,
    support_ids,
    lengths,
    maxima,
    masses,
    drawn,
    accepted,
    num_ids,
    num_tiles,
    num_queries,
    num_own,
    min_residual,
    TARGET_DRAW: tl.constexpr,
    ACCEPT_TEST: tl.constexpr,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The token drawn at one position, and whether its draft passes."""
    row = tl.program_id(0).to(tl.int64)
    block, query = row // num_queries, row % num_queries
    is_slot = query < _num_slots(lengths, block, num_queries)
    slot = block * (num_queries - 1) + query
    logits += row * row_stride
    tiles, lanes = tl.arange(0, TILES), tl.arange(0, WIDTH)
    tops = tl.load(maxima + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    top = tl.max(tops, axis=0)
    draft = tl.load(token_ids + slot, mask=is_slot, other=-1)
    if SAMPLED:
        temperature = tl.load(temperatures + block)
        if temperature > 0:
            mass = tl.load(masses + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0).to(tl.float64)
            mass *= tl.exp(((tops - top) / temperature).to(tl.float64))
            end, bound = num_ids, float("-inf")
            if FILTERED:
                end = tl.load(last + row)
                bound = tl.load(logits + end).to(tl.float32)
            start = _under(tl.full([], 0, tl.uint64), tl.load(seeds + block))
            start = _under(start, tl.load(positions + block) + query)
            key = _under(start, tl.full([], TARGET_DRAW, tl.int64))
            passes = tl.full([], 0, tl.int1)
            if K > 0:
                ks = tl.arange(0, K)
                there = ks < tl.where(is_slot, num_own, 0)
                own_ids = tl.load(support_ids + slot * num_own + ks, mask=there, other=-1)
                x = tl.load(logits + own_ids, mask=there, other=float("-inf")).to(tl.float32)
                if FILTERED:
                    x = tl.where((x > bound) | ((x == bound) & (own_ids <= end)), x, float("-inf"))
                own = tl.exp(((x - top) / temperature).to(tl.float64))
                total = tl.sum(mass, axis=0) + tl.sum(own, axis=0)
                q = tl.load(probs + slot * num_own + ks, mask=there, other=0.0).to(tl.float64)
                u = (_under(start, tl.full([], ACCEPT_TEST, tl.int64)) >> 11).to(tl.float64) * 1.1102230246251565e-16
                q_draft = tl.sum(tl.where(own_ids == draft, q, 0.0), axis=0)
                passes = u * q_draft * total < tl.sum(tl.where(own_ids == draft, own, 0.0), axis=0)
                residual = own - q * total
                residual = tl.where(residual < 0, 0.0, residual)  # a maximum would make 0 of NaN
                stays = tl.sum(mass, axis=0) + tl.sum(residual, axis=0) >= min_residual * total
                own = tl.where(stays, residual, own)
                within = (own_ids // WIDTH)[:, None] == tiles[None, :]
                mass += tl.sum(tl.where(within & there[:, None], own[:, None], 0.0), axis=0)
            scores = tl.log(mass) + _noise(key, -1 - tiles)
            tile = _largest(tl.where(tiles < num_tiles, scores, float("-inf")))
            columns = tile * WIDTH + lanes
            x = tl.load(logits + columns, mask=columns < num_ids, other=float("-inf")).to(tl.float32)
            if FILTERED:
                x = tl.where((x > bound) | ((x == bound) & (columns <= end)), x, float("-inf"))
            weights = ((x - top) / temperature).to(tl.float64)
            if K > 0:
                for k in tl.static_range(K):
                    own_id = tl.sum(tl.where(ks == k, own_ids, 0), axis=0)
                    weight = tl.log(tl.sum(tl.where(ks == k, own, 0.0), axis=0))
                    weights = tl.where(columns == own_id, weight, weights)
            token = tile * WIDTH + _largest(weights + _noise(key, columns))
            if K == 0:
                passes = token == draft
        else:
            token = _first_largest(logits, tops, num_ids, WIDTH)
            passes = token == draft
    else:
        token = _first_largest(logits, tops, num_ids, WIDTH)
        passes = token == draft
    tl.store(drawn + row, token.to(tl.int64))
    tl.store(accepted + row, (passes & is_slot).to(tl.int32))


@jit
def _verdict_kernel(drawn, accepted, num_accepted, next_ids, num_queries, QUERIES: tl.constexpr):
    """The leading run of passed drafts of one block, and the token drawn behind it."""
    block = tl.program_id(0).to(tl.int64)
    queries = tl.arange(0, QUERIES)
    passes = tl.load(accepted + block * num_queries + queries, mask=queries < num_queries, other=0)
    run = tl.min(tl.where(passes == 0, queries, QUERIES), axis=0)
    tl.store(num_accepted + block, run.to(tl.int64))
    tl.store(next_ids + block, tl.load(drawn + block * num_queries + run))


def accept_triton(proposal: Proposal, target_logits: Tensor, sampling: Sampling) -> Verdict:
    """The Triton version of `accept` for point masses and sparse proposals."""
    num_blocks, num_queries, num_ids = target_logits.shape
    token_ids, device = proposal.token_ids, target_logits.device
    assert token_ids.shape == (num_blocks, num_queries - 1), (token_ids.shape, target_logits.shape)
    block_stride, row_stride, _ = target_logits.stride()
    # of one block the stride means nothing, and `contiguous` leaves it as it is
    assert target_logits.stride(2) == 1 and (num_blocks < 2 or block_stride == num_queries * row_stride), (
        f"logits of strides {target_logits.stride()} are not rows of one matrix"
    )
    sampled, filtered = sampling.any_sampled, sampling.any_sampled and sampling.any_filtered
    probs, support_ids, num_own = proposal.probs, proposal.support_ids, 0
    if sampled and probs is not None:
        assert has_kernel(proposal, sampling), f"no kernel for a law of {probs.shape[2]} ids a slot"
        probs, support_ids, num_own = probs.contiguous(), support_ids.contiguous(), probs.shape[2]
    num_tiles, num_rows = ceil_div(num_ids, DRAW_TILE), num_blocks * num_queries
    temperatures = sampling.temperature.float().contiguous()
    last = last_kept(target_logits, sampling) if filtered else None
    maxima = torch.empty(num_rows, num_tiles, device=device)
    masses = torch.empty_like(maxima) if sampled else None
    drawn = torch.empty(num_rows, dtype=torch.int64, device=device)
    passed = torch.empty(num_rows, dtype=torch.int32, device=device)
    verdict = Verdict(drawn.new_empty(num_blocks), drawn.new_empty(num_blocks))
    if num_blocks == 0:
        return verdict
    lengths = None if proposal.lengths is None else proposal.lengths.contiguous()
    rows = (target_logits, row_stride)
    sizes, width = (num_ids, num_tiles, num_queries, num_own), next_power(num_own) if num_own else 0
    _tile_kernel[(num_rows, ceil_div(num_tiles, TILES))](
        *rows,
        temperatures,
        last,
        support_ids,
        lengths,
        maxima,
        masses,
        *sizes,
        sampled,
        filtered,
        width,
        TILES,
        DRAW_TILE,
    )
    keys = (temperatures, sampling.seeds.contiguous(), sampling.positions.contiguous())
    drafts = (token_ids.contiguous(), probs, support_ids, lengths)
    shape = (TARGET_DRAW, ACCEPT_TEST, sampled, filtered, width, next_power(num_tiles), DRAW_TILE)
    _row_kernel[(num_rows,)](*rows, *keys, last, *drafts, maxima, masses, drawn, passed, *sizes, MIN_RESIDUAL, *shape)
    _verdict_kernel[(num_blocks,)](
        drawn, passed, verdict.num_accepted, verdict.next_ids, num_queries, next_power(num_queries)
    )
    return verdict


def has_kernel(proposal: Proposal, sampling: Sampling) -> bool:
    """Whether `accept_triton` takes the proposal: greedy, a point mass, or a law of at most `MAX_OWN` ids a slot."""
    if proposal.probs is None or not sampling.any_sampled:
        return True
    return proposal.support_ids is not None and proposal.probs.shape[2] <= MAX_OWN


def accept(proposal: Proposal, target_logits: Tensor, sampling: Sampling) -> Verdict:
    """The verdict of `verify`, which see for shapes and meaning.

    On a GPU a sparse proposal's ids must differ within a slot and hold the drafted token. Only a proposal with
    probabilities of more than `MAX_OWN` ids a slot, whose residual needs much of the law, is verified by the reference
    everywhere.
    """
    version = accept_triton if target_logits.is_cuda and has_kernel(proposal, sampling) else verify
    return version(proposal, target_logits, sampling)
