"""Verification: exactness of both contracts by Monte Carlo, greedy cases, filters and the counter-based draws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lilicorr import verify as verify_module
from lilicorr.blocks import Proposal
from lilicorr.verify import (
    ACCEPT_TEST,
    DRAW_TILE,
    PROPOSAL_DRAW,
    TARGET_DRAW,
    Sampling,
    check_sampling,
    draw,
    draw_by_noise,
    last_kept,
    target_probs,
    uniform,
    verify,
)

VOCAB = 12
DRAWS = 400_000


def sampled(
    num_rows: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
) -> Sampling:
    """Rows that differ in their seed only."""
    return Sampling(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        seeds=torch.arange(num_rows) + seed * num_rows,
        positions=torch.full((num_rows,), 7),
        min_p=None if min_p is None else torch.full((num_rows,), min_p, dtype=torch.float64),
    )


def greedy_rows(num_rows: int, device: torch.device | str = "cpu") -> Sampling:
    """Temperature 0 for every row."""
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    ones = torch.ones(num_rows, device=device)
    return Sampling(torch.zeros_like(ones), zeros, ones, zeros, zeros, any_sampled=False, any_filtered=False)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def frequencies(*columns: Tensor) -> Tensor:
    """Of the tokens, or of their pairs."""
    index = sum(column * VOCAB**power for power, column in enumerate(reversed(columns)))
    return torch.bincount(index, minlength=VOCAB ** len(columns)).double().view([VOCAB] * len(columns)) / len(index)


def total_variation(first: Tensor, second: Tensor) -> float:
    return 0.5 * float((first - second).abs().sum())


def committed(proposal: Proposal, verdict) -> Tensor:
    """The first committed token of each row."""
    return torch.where(verdict.num_accepted > 0, proposal.token_ids[:, 0], verdict.next_ids)


def test_point_mass_keeps_the_law_and_accepts_with_its_probability():
    logits = random_logits(1, 2, VOCAB)
    p = logits[0].softmax(-1)
    draft = int(p[0].argsort()[-3])
    proposal = Proposal(torch.full((DRAWS, 1), draft))
    verdict = verify(proposal, logits.expand(DRAWS, -1, -1), sampled(DRAWS))

    assert total_variation(frequencies(committed(proposal, verdict)), p[0]) < 0.01
    accepted = verdict.num_accepted == 1
    assert abs(float(accepted.double().mean()) - float(p[0, draft])) < 0.003
    assert total_variation(frequencies(verdict.next_ids[accepted]), p[1]) < 0.02
    assert not (verdict.next_ids[~accepted] == draft).any()


@pytest.mark.parametrize("sparse", [False, True])
def test_drawn_proposal_keeps_the_law_and_accepts_one_minus_tv(sparse: bool):
    logits = random_logits(1, 3, VOCAB, seed=1)
    p = logits[0].softmax(-1)
    support = torch.tensor([[1, 4, 6, 9], [0, 4, 10, 2]])
    q_sparse = random_logits(2, 4, seed=2).softmax(-1)
    q = torch.zeros(2, VOCAB, dtype=torch.float64).scatter_(1, support, q_sparse)
    sampling = sampled(DRAWS)
    u = torch.stack([uniform(sampling.seeds, sampling.positions + s, PROPOSAL_DRAW) for s in range(2)], dim=1)
    token_ids = draw(q.expand(DRAWS, -1, -1), u)
    if sparse:
        proposal = Proposal(token_ids, q_sparse.expand(DRAWS, -1, -1), support.expand(DRAWS, -1, -1))
    else:
        proposal = Proposal(token_ids, q.expand(DRAWS, -1, -1))
    verdict = verify(proposal, logits.expand(DRAWS, -1, -1), sampling)

    first = verdict.num_accepted >= 1
    assert total_variation(frequencies(committed(proposal, verdict)), p[0]) < 0.01
    assert abs(float(first.double().mean()) - (1 - total_variation(p[0], q[0]))) < 0.003
    second = torch.where(verdict.num_accepted >= 2, token_ids[:, 1], verdict.next_ids)[first]
    assert total_variation(frequencies(second), p[1]) < 0.01
    both = (verdict.num_accepted == 2)[first]
    assert abs(float(both.double().mean()) - (1 - total_variation(p[1], q[1]))) < 0.004
    assert total_variation(frequencies(verdict.next_ids[verdict.num_accepted == 2]), p[2]) < 0.015


def test_sparse_and_dense_proposals_get_the_same_verdicts():
    num_rows, num_slots, width = 4000, 3, 4
    logits = random_logits(num_rows, num_slots + 1, VOCAB, seed=3)
    support = random_logits(num_rows, num_slots, VOCAB, seed=4).argsort(-1)[..., :width]
    q_sparse = random_logits(num_rows, num_slots, width, seed=5).softmax(-1)
    q = torch.zeros(num_rows, num_slots, VOCAB, dtype=torch.float64).scatter_(2, support, q_sparse)
    token_ids = draw(q, torch.rand(num_rows, num_slots, generator=torch.Generator().manual_seed(6)))
    sampling = sampled(num_rows, temperature=0.7, top_k=8)

    dense = verify(Proposal(token_ids, q), logits, sampling)
    sparse = verify(Proposal(token_ids, q_sparse, support), logits, sampling)
    assert torch.equal(dense.num_accepted, sparse.num_accepted)
    assert torch.equal(dense.next_ids, sparse.next_ids)
    assert set(dense.num_accepted.tolist()) == {0, 1, 2, 3}


def test_a_proposal_equal_to_the_target_is_always_accepted():
    num_rows = 2000
    logits = random_logits(num_rows, 3, VOCAB, seed=7)
    q = logits[:, :2].softmax(-1)
    token_ids = draw(q, torch.rand(num_rows, 2, generator=torch.Generator().manual_seed(8)))
    verdict = verify(Proposal(token_ids, q), logits, sampled(num_rows))
    assert (verdict.num_accepted == 2).all()


def test_a_vanishing_residual_falls_back_to_the_target():
    num_rows = 1000
    logits = torch.full((1, 2, VOCAB), -math.inf, dtype=torch.float64)
    logits[0, :, 5:7] = 0.0  # p is one half for each of two tokens
    q = torch.zeros(1, 1, VOCAB, dtype=torch.float64)
    q[0, 0, 3], q[0, 0, 5], q[0, 0, 6] = 1e-12, 0.5 - 1e-12, 0.5  # (p - q)+ is 1e-12, all of it on token 5
    proposal = Proposal(torch.full((num_rows, 1), 3), q.expand(num_rows, -1, -1))
    verdict = verify(proposal, logits.expand(num_rows, -1, -1), sampled(num_rows))
    assert not verdict.num_accepted.any()
    assert abs(float((verdict.next_ids == 5).double().mean()) - 0.5) < 0.1
    assert set(verdict.next_ids.tolist()) == {5, 6}


@pytest.mark.parametrize("contract", ["point mass", "dense", "sparse"])
def test_greedy_mismatch_at_every_slot_and_none(contract: str):
    num_slots = 4
    logits = random_logits(1, num_slots + 1, VOCAB, seed=9).expand(num_slots + 1, -1, -1)
    best = logits.argmax(-1)
    drafts = best[:, :-1].clone()
    for slot in range(num_slots):  # row r is wrong at slot r, and right again after it; the last row is right
        drafts[slot, slot] = (drafts[slot, slot] + 1) % VOCAB
    proposals = {
        "point mass": Proposal(drafts),
        "dense": Proposal(drafts, torch.nn.functional.one_hot(drafts, VOCAB).double()),
        "sparse": Proposal(drafts, torch.ones(num_slots + 1, num_slots, 1), drafts[..., None]),
    }
    for sampling in (greedy_rows(num_slots + 1), sampled(num_slots + 1, temperature=0.0)):
        verdict = verify(proposals[contract], logits, sampling)
        assert verdict.num_accepted.tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(verdict.next_ids, best[0])


def test_zero_slots_is_autoregression():
    logits = random_logits(DRAWS, 1, VOCAB, seed=10)
    empty = Proposal(torch.empty(DRAWS, 0, dtype=torch.int64))
    greedy = verify(empty, logits, greedy_rows(DRAWS))
    assert torch.equal(greedy.next_ids, logits[:, 0].argmax(-1)) and not greedy.num_accepted.any()

    same = logits[:1].expand(DRAWS, -1, -1)
    verdict = verify(empty, same, sampled(DRAWS))
    assert total_variation(frequencies(verdict.next_ids), logits[0, 0].softmax(-1)) < 0.01


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, 2, VOCAB)
    logits[..., [3, 8]] = 1.0
    for sampling in (greedy_rows(1), sampled(1, temperature=0.0)):
        assert target_probs(logits, sampling)[0, 0].nonzero().tolist() == [[3]]
        verdict = verify(Proposal(torch.tensor([[8]])), logits, sampling)
        assert (verdict.num_accepted.item(), verdict.next_ids.item()) == (0, 3)


def test_mixed_rows_decode_as_they_would_alone():
    num_rows, num_slots = 24, 3
    logits = random_logits(num_rows, num_slots + 1, VOCAB, seed=11)
    drafts = logits[:, :-1].argmax(-1)
    generator = torch.Generator().manual_seed(12)
    sampling = Sampling(
        temperature=torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(6),
        top_k=torch.tensor([0, 3, 0]).repeat(8),
        top_p=torch.tensor([1.0, 1.0, 0.6, 0.9, 1.0, 1.0]).repeat(4),
        seeds=torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        positions=torch.randint(1, 4000, (num_rows,), generator=generator),
    )
    together = verify(Proposal(drafts), logits, sampling)
    names = ("temperature", "top_k", "top_p", "seeds", "positions")
    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = Sampling(**{name: getattr(sampling, name)[one] for name in names})
        plain = float(alone.top_p) == 1 and int(alone.top_k) == 0
        alone = replace(alone, any_sampled=float(alone.temperature) > 0, any_filtered=not plain)
        verdict = verify(Proposal(drafts[one]), logits[one], alone)
        assert verdict.num_accepted.item() == together.num_accepted[row].item()
        assert verdict.next_ids.item() == together.next_ids[row].item()
    greedy = sampling.temperature == 0
    assert (together.num_accepted[greedy] == num_slots).all()
    assert (together.num_accepted[~greedy] < num_slots).any()


def test_target_probs_filters():
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    logits = p.log()[None, None]

    def law(**settings: float) -> list[float]:
        return [round(value, 6) for value in target_probs(logits, sampled(1, **settings))[0, 0].tolist()]

    def normalised(*values: float) -> list[float]:
        return [round(value / sum(values), 6) for value in values]

    assert law() == p.tolist()
    assert law(temperature=0.5) == normalised(*(p**2).tolist())
    assert law(temperature=1e-30) == [1, 0, 0, 0, 0]
    assert law(top_k=2) == normalised(0.4, 0.3, 0, 0, 0)
    assert law(top_k=9) == p.tolist()
    assert law(top_p=0.69) == normalised(0.4, 0.3, 0, 0, 0)
    assert law(top_p=0.71) == normalised(0.4, 0.3, 0.15, 0, 0)
    assert law(top_p=1e-6) == [1, 0, 0, 0, 0]
    assert law(top_k=3, top_p=0.8) == normalised(0.4, 0.3, 0, 0, 0)  # 0.7 of 0.85 left by top-k is already 0.82
    assert law(min_p=0.2) == normalised(0.4, 0.3, 0.15, 0.1, 0)
    assert law(min_p=0.3, temperature=0.5) == normalised(0.16, 0.09, 0, 0, 0)  # of the law over the temperature
    assert law(min_p=0.3, top_p=0.8) == normalised(0.4, 0.3, 0, 0, 0)  # of what min-p leaves, as after top-k
    assert law(min_p=1.0) == [1, 0, 0, 0, 0]
    tail = target_probs(torch.tensor([[[0.0, -50.0]]], dtype=torch.float64), sampled(1))[0, 0, 1]
    assert float(tail) / math.exp(-50) == pytest.approx(1.0)  # top_p = 1 drops nothing, though the sum is 1 before it
    # so close that a division by the temperature makes them equal: the larger logit still goes first
    close = torch.tensor([[[1.0, 1.0 + 2.0**-23, 3.0]]])
    assert target_probs(close, sampled(1, temperature=1e7, top_k=2))[0, 0].nonzero().flatten().tolist() == [1, 2]
    tied = target_probs(torch.zeros(1, 1, 6), sampled(1, top_k=2))[0, 0]
    assert tied.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert target_probs(torch.zeros(1, 1, 4), sampled(1, min_p=1.0))[0, 0].tolist() == 4 * [0.25]


def test_filters_take_rows_in_parts(monkeypatch: pytest.MonkeyPatch):
    logits = random_logits(7, 2, VOCAB, seed=13).float()
    settings = sampled(7, top_k=4, top_p=0.8, min_p=0.05)
    settings = replace(settings, top_k=torch.arange(7), temperature=0.5 + torch.rand(7))
    whole, sizes = last_kept(logits, settings), []
    one_part = verify_module._last_kept

    def watched(part: Tensor, *of_part: Tensor) -> Tensor:
        sizes.append(len(part))
        return one_part(part, *of_part)

    monkeypatch.setattr(verify_module, "_last_kept", watched)
    monkeypatch.setattr(verify_module, "FILTER_BYTES", 3 * 2 * VOCAB * 8)
    assert torch.equal(last_kept(logits, settings), whole) and sizes == [3, 3, 1]
    assert last_kept(logits[:0], sampled(0)).shape == (0, 2)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_filters_survive_rows_that_are_broken(broken: float):
    logits, sampling = random_logits(3, 2, VOCAB, seed=14), sampled(3, top_k=5, top_p=0.9, min_p=0.01)
    fine = last_kept(logits, sampling)
    logits[1, 0, 3] = broken
    found = last_kept(logits, sampling)
    assert torch.equal(found[[0, 2]], fine[[0, 2]]) and ((found >= 0) & (found < VOCAB)).all()
    assert (verify(Proposal(torch.tensor([[1]] * 3)), logits, sampling).next_ids < VOCAB).all()


def test_draw_inverts_the_distribution_function():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(probs.expand(6, -1), u).tolist() == [1, 1, 3, 3, 4, 4]
    assert draw(3.0 * probs.expand(6, -1), u).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("vocab", [3, 1000, 3 * DRAW_TILE - 5])
def test_draws_by_noise_have_the_law(vocab: int):
    """Weights of any scale, in one tile and in several; tokens without weight are never drawn."""
    weights = torch.zeros(vocab)
    places = torch.tensor([0, 1, vocab - 1]) if vocab == 3 else torch.tensor([0, 5, vocab // 2, vocab - 3, vocab - 1])
    weights[places] = torch.tensor([4.0, 1.0, 2.0, 0.5, 0.25])[: len(places)]
    num_draws = 300_000 if vocab == 3 else 20_000
    positions = torch.arange(num_draws).view(-1, 500)
    ids = torch.cat([draw_by_noise(weights.expand(500, -1), torch.full_like(row, 3), row) for row in positions])
    counts = torch.bincount(ids, minlength=vocab)[places].double()
    assert int(counts.sum()) == num_draws
    expected = num_draws * weights[places].double() / weights.sum()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < (len(places) - 1) + 5 * math.sqrt(2 * (len(places) - 1))


def test_draws_by_noise_barely_feel_rounding():
    logits = random_logits(500, 5000, seed=20).float()
    numbers = torch.arange(500)
    ids = draw_by_noise(logits.softmax(-1), numbers, numbers)
    near = logits + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(21))
    assert torch.equal(ids, draw_by_noise(near.softmax(-1), numbers, numbers))
    assert len(ids.unique()) > 400


def test_uniforms_are_uniform_and_depend_on_every_part_of_the_key():
    many = torch.arange(DRAWS)
    zero = torch.zeros_like(many)
    streams = {
        "seeds": uniform(many, zero, TARGET_DRAW),
        "positions": uniform(zero, many, TARGET_DRAW),
        "negative seeds": uniform(-many - 1, zero, TARGET_DRAW),
        "accept": uniform(zero, many, ACCEPT_TEST),
        "proposal": uniform(zero, many, PROPOSAL_DRAW),
        "another seed": uniform(zero + 1, many, TARGET_DRAW),
    }
    bins = 1000
    for name, values in streams.items():
        assert values.dtype == torch.float64 and values.min() >= 0 and values.max() < 1, name
        counts = torch.bincount((values * bins).long(), minlength=bins).double()
        chi_square = float(((counts - DRAWS / bins) ** 2 / (DRAWS / bins)).sum())
        assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1)), name
        lagged = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
        assert abs(float(lagged)) < 0.01, name
    table = torch.stack([values - 0.5 for values in streams.values()])
    correlation = torch.corrcoef(table) - torch.eye(len(streams))
    assert correlation.abs().max() < 0.01


def mix(bits: int) -> int:
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def hashed(*parts: int) -> int:
    """The 64 bits of a key, with Python's unbounded integers."""
    bits = 0
    for part in parts:
        bits = mix(((bits ^ part % 2**64) + 0x9E3779B97F4A7C15) % 2**64)
    return bits


def test_random_numbers_are_a_fixed_function_of_their_key():
    keys = [(0, 0, 0), (1, 2, 1), (-5, 40_000, 2), (2**63 - 1, 123, 0), (-(2**63), 1, 1)]
    for seed, position, purpose in keys:
        value = uniform(torch.tensor([seed]), torch.tensor([position]), purpose)
        assert value.item() == (hashed(seed, position, purpose) >> 11) / 2**53

    def gumbel(number: int) -> float:
        return -math.log(-math.log(((hashed(17, -4, TARGET_DRAW, number) >> 12) + 0.5) / 2**52))

    weights = [1 + index % 7 for index in range(2 * DRAW_TILE + 100)]
    masses = [sum(weights[start : start + DRAW_TILE]) for start in range(0, len(weights), DRAW_TILE)]
    tile = max(range(3), key=lambda t: math.log(masses[t]) + gumbel(-1 - t))
    inside = range(len(weights))[tile * DRAW_TILE : (tile + 1) * DRAW_TILE]
    expected = max(inside, key=lambda v: math.log(weights[v]) + gumbel(v))
    assert draw_by_noise(torch.tensor(weights), torch.tensor(17), torch.tensor(-4)).item() == expected


@pytest.mark.parametrize(
    "values",
    [
        dict(temperature=-0.1),
        dict(temperature=math.nan),
        dict(temperature=math.inf),
        dict(top_k=-1),
        dict(top_k=2**63),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(top_p=math.nan),
        dict(min_p=-0.1),
        dict(min_p=1.1),
        dict(min_p=math.nan),
        dict(seed=2**63),
    ],
)
def test_settings_out_of_range_are_named(values: dict):
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        check_sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, **values})
