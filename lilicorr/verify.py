"""Verification: what the target makes of a proposal, for both contracts, greedy and zero slots alike.

Place in the flow: the decoders call `verify` with the head's `Proposal` and the target's logits on
`[anchor, drafts]`, and commit the accepted run and the token after it. The committed tokens have exactly
the target's own law (after temperature and filters), whatever the proposal:

- A point mass (`probs is None`): the target's own token is drawn at every position and the leading matches
  are accepted. Given that the draw differs from the draft it has the residual law, so this is exactly
  rejection sampling; at temperature 0 the draw is the argmax, and with zero slots it is autoregression.
- Drawn from q (`probs` given): accept x with probability min(1, p(x) / q(x)), correct from (p - q)+.

Randomness is a function of (seed, absolute position, purpose) and of nothing else, so a request draws the
same numbers alone, in a batch and after a restart. A point-mass proposal therefore leaves even the sampled
output equal to the autoregressive one, token for token.

The target's token is drawn by noise on logarithms, not by inverting a distribution function: rounding then moves
a draw only where two tokens are as good as tied, and one pass over the logits is enough on a device
(`kernels.accept` draws the same tokens without ever holding a law over the vocabulary).

Paper: sections 3.1 (verification) and 4 (temperature 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lilicorr.blocks import Proposal, Verdict, prefix_length, wide

# Purposes of a draw; each position has one independent uniform per purpose.
TARGET_DRAW, ACCEPT_TEST, PROPOSAL_DRAW = 0, 1, 2

MIN_RESIDUAL = 1e-8  # below this mass (p - q)+ is rounding noise
DRAW_TILE = 1024  # neighbouring ids that `draw_by_noise` first draws together
FILTER_BYTES = 128 << 20  # of fp64 logits that `last_kept` sorts at once; it holds about six times as much

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class Sampling:
    """How the tokens of N rows are drawn from the target's logits.

    `any_sampled` and `any_filtered` are what the host knows of the rows: False lets `verify` skip work
    without reading a tensor, True is always right.
    """

    temperature: Tensor  # [N] float, 0 is greedy
    top_k: Tensor  # [N] int64, 0 is off
    top_p: Tensor  # [N] float, 1 is off
    seeds: Tensor  # [N] int64
    positions: Tensor  # [N] int64, absolute position of slot 1's token
    any_sampled: bool = True  # some row has temperature > 0
    any_filtered: bool = True  # some row has top_k > 0, top_p < 1 or min_p > 0
    min_p: Tensor | None = None  # [N] float, 0 is off; None: off in every row


def check_sampling(temperature: float, top_k: int, top_p: float, seed: int, min_p: float = 0.0) -> None:
    """Raise ValueError for a value that a user may not set."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and >= 0 (0 is greedy), got {temperature}")
    if not 0 <= top_k < 2**63:
        raise ValueError(f"top_k must be >= 0 (0 is off) and fit in 64 bits with sign, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] (1 is off), got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1] (0 is off), got {min_p}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit in 64 bits with sign, got {seed}")


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """The uniform of each (seed, position) for a purpose: int64 tensors of one shape -> fp64 in [0, 1).

    Counter-based: three rounds of the SplitMix64 finaliser (Steele, Lea and Flood 2014), one for each
    part of the key, in int64 arithmetic that wraps; the upper 53 bits are the uniform.
    """
    return _shift_right(_key(seeds, positions, purpose), 11).double() * 2.0**-53


def _key(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """64 random bits of each (seed, position) for a purpose."""
    bits = _mix(seeds + _GOLDEN)
    bits = _mix((bits ^ positions) + _GOLDEN)
    return _mix((bits ^ purpose) + _GOLDEN)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64 bits."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; torch shifts the sign bit in."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Draw ids by inverse CDF in fp64: probs [..., V] (any positive mass), u [...] in [0, 1) -> int64 [...]."""
    cdf = probs.double().cumsum(-1)
    ids = torch.searchsorted(cdf, (u.double() * cdf[..., -1]).unsqueeze(-1), right=True).squeeze(-1)
    return ids.clamp_max(probs.shape[-1] - 1)


def draw_by_noise(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw the target's ids: weights [..., V] (any positive mass), int64 seeds and positions [...] -> int64 [...].

    The largest log(weight) + g, with g = -log(-log(u)) of one uniform per choice, falls on a choice with probability
    proportional to its weight (the Gumbel-max rule). A tile of `DRAW_TILE` neighbouring ids is drawn so by its mass,
    then an id of that tile, in fp64; tile t takes the noise of -1 - t, id v that of v.
    """
    key = _key(seeds, positions, TARGET_DRAW)[..., None]
    width = min(DRAW_TILE, weights.shape[-1])
    tiles = torch.nn.functional.pad(weights.double(), (0, -weights.shape[-1] % width)).unflatten(-1, (-1, width))
    numbers = torch.arange(tiles.shape[-2], device=weights.device)
    tile = (tiles.sum(-1).log() + _noise(key, -1 - numbers)).argmax(-1, keepdim=True)
    inside = tiles.gather(-2, tile[..., None].expand(*tile.shape, width)).squeeze(-2)
    ids = tile * width + torch.arange(width, device=weights.device)
    return ids.gather(-1, (inside.log() + _noise(key, ids)).argmax(-1, keepdim=True)).squeeze(-1)


def _noise(keys: Tensor, numbers: Tensor) -> Tensor:
    """A standard Gumbel variable in fp64 for every number under a key; both broadcast."""
    bits = _mix((keys ^ numbers) + _GOLDEN)
    u = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52  # never 0 nor 1
    return -(-u.log()).log()


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law of a token, the target's or a draft's: logits [N, Q, V] -> probabilities [N, Q, V], at least fp32.

    Temperature, then min-p and top-k, then top-p of what these left; ties keep the lowest ids, but min-p keeps
    equal ones alike. A row of temperature 0 is the one-hot of its argmax.
    """
    logits = wide(logits)
    temperature = sampling.temperature[:, None, None].to(logits.dtype)
    scaled = _scaled(logits, sampling.temperature)
    if sampling.any_filtered:
        last = last_kept(logits, sampling)[..., None]
        bound, ids = logits.gather(-1, last), torch.arange(logits.shape[-1], device=logits.device)
        kept = (logits > bound) | ((logits == bound) & (ids <= last))
        scaled = scaled.masked_fill(~kept, -math.inf)
    one_hot = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(temperature > 0, scaled.softmax(-1), one_hot)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits [N, Q, V] over the temperature [N], those of greedy rows as they are; 0 at the largest."""
    temperature = temperature[:, None, None].to(logits.dtype)
    # Shifting by the maximum first keeps a tiny temperature from overflowing to inf - inf.
    return (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)


def last_kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """The last id that top-k, top-p and min-p leave: logits [N, Q, V] -> int64 [N, Q].

    "Last" is by descending logit, equal ones by ascending id: what is left is a beginning of that order.
    """
    off = torch.zeros_like(sampling.top_p) if sampling.min_p is None else sampling.min_p
    settings = (sampling.temperature, sampling.top_k, sampling.top_p, off)
    # a sorted law is several times larger than its logits
    count = max(1, FILTER_BYTES // (8 * max(1, logits[:1].numel())))
    parts = zip(logits.split(count), *(setting.split(count) for setting in settings), strict=True)
    return torch.cat([_last_kept(wide(part), *of_part) for part, *of_part in parts])


def _last_kept(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`last_kept` of a part of the rows, with their settings."""
    top_k, top_p, min_p = top_k[:, None, None], top_p[:, None, None].double(), min_p[:, None, None].double()
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = _scaled(logits, temperature).gather(-1, order).double()
    within = ((rank < top_k) | (top_k == 0)) & (ordered >= min_p.log())
    probs = ordered.masked_fill(~within, -math.inf).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    kept = within & ((mass_before < top_p) | (top_p >= 1) | (rank == 0))
    # logits that are NaN or inf leave nothing; whoever is to see to that comes later, and must not miss an id
    last = (prefix_length(kept) - 1).clamp_min(0)
    return order.gather(-1, last[..., None])[..., 0]


def verify(proposal: Proposal, target_logits: Tensor, sampling: Sampling) -> Verdict:
    """Accept a leading run of the proposal and draw the token after it.

    `target_logits` [N, S+1, V] are the target's on `[anchor, drafts]`: row s predicts slot s+1, row S the
    bonus. S may be 0. A proposal with `probs` must have been drawn from exactly these. Behind a row's
    `lengths` the token is drawn as behind the last slot.
    """
    num_slots = proposal.token_ids.shape[1]
    assert target_logits.shape[1] == num_slots + 1, (target_logits.shape, proposal.token_ids.shape)
    positions = sampling.positions[:, None] + torch.arange(num_slots + 1, device=target_logits.device)
    seeds = sampling.seeds[:, None].expand_as(positions)
    if proposal.probs is None or not sampling.any_sampled:
        return _verify_point_mass(proposal, target_logits, sampling, seeds, positions)
    return _verify_drawn(proposal, target_logits, sampling, seeds, positions)


def _within(num_accepted: Tensor, proposal: Proposal) -> Tensor:
    """The accepted run [N], cut where the proposal ends."""
    return num_accepted if proposal.lengths is None else torch.minimum(num_accepted, proposal.lengths)


def _verify_point_mass(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor
) -> Verdict:
    """The target's own token at each position; leading matches are accepted."""
    if sampling.any_sampled:
        own = draw_by_noise(target_probs(target_logits, sampling), seeds, positions)
    else:
        own = target_logits.argmax(-1)
    num_accepted = _within(prefix_length(own[:, :-1] == proposal.token_ids), proposal)
    return Verdict(num_accepted, own.gather(1, num_accepted[:, None])[:, 0])


def _verify_drawn(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor
) -> Verdict:
    """Rejection sampling: min(1, p/q), then (p - q)+, or p itself after the last slot."""
    token_ids, q, support_ids = proposal.token_ids, proposal.probs.double(), proposal.support_ids
    num_slots = token_ids.shape[1]
    p = target_probs(target_logits, sampling)
    p_token = p[:, :num_slots].gather(2, token_ids[..., None])[..., 0].double()
    if support_ids is None:
        q_token = q.gather(2, token_ids[..., None])[..., 0]
    else:
        q_token = (q * (support_ids == token_ids[..., None])).sum(-1)
    num_accepted = prefix_length(uniform(seeds, positions, ACCEPT_TEST)[:, :num_slots] * q_token < p_token)
    num_accepted = _within(num_accepted, proposal)

    at = num_accepted[:, None]
    tested = num_slots if proposal.lengths is None else proposal.lengths[:, None]
    p_next = p.gather(1, at[..., None].expand(-1, -1, p.shape[2]))[:, 0].double()
    slot = at.clamp_max(num_slots - 1)[..., None].expand(-1, -1, q.shape[2])
    q_next = q.gather(1, slot)[:, 0] * (at < tested)
    if support_ids is None:
        residual = (p_next - q_next).clamp_min(0)
    else:
        residual = p_next.scatter_add(1, support_ids.gather(1, slot)[:, 0], -q_next).clamp_min(0)
    # nothing is accepted of a q that is NaN, and nothing is left of it either
    law = torch.where(residual.sum(-1, keepdim=True) >= MIN_RESIDUAL, residual, p_next)
    return Verdict(num_accepted, draw_by_noise(law[:, None], seeds.gather(1, at), positions.gather(1, at))[:, 0])
