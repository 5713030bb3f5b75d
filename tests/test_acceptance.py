"""The statistics: sums of hand-made blocks, figures by hand, and what the bootstrap's intervals promise."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lilicorr.acceptance import (
    Answer,
    BlockRecord,
    Sums,
    add_sums,
    answer_sums,
    by_category,
    concurrent_figures,
    figures,
    length_class,
    over_seeds,
    paired_gains,
    resamples,
    stack_sums,
)


def hand_made() -> Answer:
    """Nine tokens, the last one a stop token in the middle of the third block; S = 3, K = 2."""
    blocks = [
        # 11 12 13 expected: all three accepted, the bonus is 14
        BlockRecord(1, [11, 12, 13], [[11, 0], [12, 0], [13, 0]], num_accepted=3),
        # 15 16 17 expected: the second draft is wrong, though its candidate was there; top-1 fails at once
        BlockRecord(5, [15, 99, 17], [[98, 15], [99, 16], [97, 96]], num_accepted=1),
        # 17 18 expected, where 18 ends the answer; a third draft was accepted behind it
        BlockRecord(7, [17, 18, 19], [[17, 0], [0, 1], [19, 0]], num_accepted=3),
    ]
    return Answer([10, 11, 12, 13, 14, 15, 16, 17, 18], 3, 8, 2.0, blocks)


def test_sums_of_hand_made_blocks():
    sums = answer_sums(hand_made(), num_slots=3, num_candidates=2)
    assert {name: value.tolist() for name, value in sums.items()} == {
        "tokens": 9,
        "seconds": 2.0,
        "blocks": 3,
        "block_tokens": 8,
        "drafted": 9,
        "reached": [3, 3, 1],  # the third block's slot 3 is behind the end, the second's was not reached
        "accepted": [3, 2, 1],
        "oracle_prefix": 3 + 2 + 1,
        "selected_prefix": 3 + 1 + 2,
        "top1_prefix": 3 + 0 + 1,
    }
    early = hand_made()
    early.blocks[1] = BlockRecord(5, [15], [[98, 15], [99, 16], [97, 96]], num_accepted=1)  # slot 2 was not drafted
    shorter = answer_sums(early, num_slots=3, num_candidates=2)
    assert (int(shorter["drafted"]), shorter["reached"].tolist()) == (7, [3, 2, 1])
    assert all(np.array_equal(shorter[name], sums[name]) for name in sums.keys() - {"drafted", "reached"})
    nothing = answer_sums(Answer([7], 0, 0, 1.0, []), num_slots=3, num_candidates=2)
    assert nothing["reached"].tolist() == [0, 0, 0] and nothing["oracle_prefix"] == 0
    plain = answer_sums(Answer([7, 8, 9], 2, 2, 1.0, []), num_slots=0, num_candidates=0)
    assert plain["reached"].tolist() == [] and plain["tokens"] == 3
    assert add_sums([sums, nothing])["tokens"] == 10


def table(tokens: list[float], blocks: list[float], seconds: list[float]) -> Sums:
    """A table of P prompts without slots."""
    columns = dict(tokens=tokens, block_tokens=tokens, blocks=blocks, seconds=seconds)
    names = ("oracle_prefix", "selected_prefix", "top1_prefix", "drafted")
    prefixes = dict.fromkeys(names, np.zeros(len(tokens)))
    by_slot = {name: np.zeros((len(tokens), 0)) for name in ("reached", "accepted")}
    return {name: np.array(values) for name, values in columns.items()} | prefixes | by_slot


def test_figures_are_weighted_by_blocks_and_speed_is_relative_to_autoregression():
    first = answer_sums(hand_made(), 3, 2)
    second = answer_sums(Answer([1, 2, 3], 1, 2, 1.0, [BlockRecord(1, [2, 9, 9], [[2, 3]] * 3, 1)]), 3, 2)
    plain = table([9, 3], [9, 3], [6.0, 6.0])
    dflash = table([8, 2], [4, 2], [1.0, 1.0])
    found = figures(stack_sums([first, second]), plain, dflash, resamples(2, 100, seed=0))
    assert found["tau"] == 10 / 4 and found["num_blocks"] == 4 and found["num_prompts"] == 2
    assert found["per_slot"] == [1.0, 2 / 4, 1.0]
    assert (found["drafted_width"], found["drafted_per_block"]) == (3, 3.0)
    assert (found["oracle_prefix"], found["selected_prefix"], found["top1_prefix"]) == (8 / 4, 7 / 4, 5 / 4)
    assert found["tokens_per_s"] == 12 / 3 and found["speedup"] == 4.0
    assert found["tau_gain_over_dflash"] == pytest.approx(10 / 4 - 10 / 6)
    assert found["tau_gain_over_dflash_percent"] == pytest.approx(50.0)
    assert found["tau_ci95"] == [2.0, 8 / 3]  # of one prompt twice, and of the other
    assert found["speedup_ci95"] == [3.0, 6.0]
    # the same two extremes: the first prompt twice (3 blocks), and the second (1 block, one of three slots accepted)
    assert found["per_slot_ci95"] == [[1.0, 1.0], [0.0, 2 / 3], [1.0, 1.0]]
    assert found["oracle_prefix_ci95"] == [2.0, 2.0]
    assert found["selected_prefix_ci95"] == [1.0, 2.0] and found["top1_prefix_ci95"] == [1.0, 4 / 3]
    assert found["tau_gain_over_dflash_percent_ci95"] == [pytest.approx(100 / 3), pytest.approx(100.0)]


def test_figures_without_data_are_none():
    empty = answer_sums(Answer([1], 0, 0, 1.0, []), 2, 2)
    found = figures(stack_sums([empty]), table([1], [0], [1.0]), None, resamples(1, 20, seed=0))
    assert found["tau"] is None and found["tau_ci95"] is None and found["per_slot"] == [None, None]
    assert found["per_slot_ci95"] == [None, None] and found["oracle_prefix_ci95"] is None
    assert found["speedup"] == 1.0 and "tau_gain_over_dflash" not in found
    json.dumps(found, allow_nan=False)
    plain = figures(table([5], [4], [1.0]), table([5], [4], [1.0]), None, resamples(1, 20, seed=0))
    assert plain["oracle_prefix"] is plain["oracle_prefix_ci95"] is None
    assert plain["per_slot"] == plain["per_slot_ci95"] == []


def test_resamples_draw_every_prompt_equally_often_and_repeat_with_the_seed():
    counts = resamples(30, 4000, seed=1)
    assert (counts.sum(1) == 30).all() and abs(counts.mean(0) - 1).max() < 0.1
    assert np.array_equal(counts, resamples(30, 4000, seed=1))
    assert not np.array_equal(counts, resamples(30, 4000, seed=2))


def test_the_interval_of_a_gain_is_paired():
    """Prompts differ much more than systems: only pairing can see a gain that is the same on all of them."""
    rng = np.random.default_rng(3)
    blocks = np.full(60, 10.0)
    base = rng.uniform(15, 60, size=60)
    dflash, ours, plain = table(base, blocks, base), table(base + 3, blocks, base), table(base, blocks, 2 * base)
    found = figures(ours, plain, dflash, resamples(60, 1000, seed=4))
    low, high = found["tau_gain_over_dflash_ci95"]
    assert low == pytest.approx(0.3) and high == pytest.approx(0.3)
    assert found["tau_ci95"][1] - found["tau_ci95"][0] > 0.5
    speed = figures(dflash, plain, None, resamples(60, 1000, seed=4))
    assert speed["speedup_ci95"] == [pytest.approx(2.0), pytest.approx(2.0)]


def test_intervals_cover_a_known_difference_as_often_as_they_say():
    rng = np.random.default_rng(5)
    blocks, trials, covered = np.full(50, 10.0), 300, 0
    for trial in range(trials):
        base = rng.normal(40, 8, size=50)
        dflash, ours = table(base, blocks, base), table(base + rng.normal(4, 6, size=50), blocks, base)
        low, high = figures(ours, dflash, dflash, resamples(50, 300, seed=trial))["tau_gain_over_dflash_ci95"]
        covered += low <= 0.4 <= high
    assert 0.89 < covered / trials < 0.985


def test_classes_of_lengths_end_at_powers_of_two():
    classes = {1: "64", 64: "64", 65: "128", 1024: "1024", 1025: "2048", 40_000: "65536"}
    assert {length: length_class(length) for length in classes} == classes


def test_prompts_decoded_together_share_their_seconds():
    together = table([9, 3, 6], [3, 3, 2], [np.nan] * 3)
    together["tokens"] = together["block_tokens"] + 1
    found = concurrent_figures(together, 1.5, np.array([[1, 1, 1], [2, 1, 0]]))
    bounds = found.pop("tau_ci95")
    assert found == {"num_prompts": 3, "num_tokens": 21, "tau": 18 / 8, "tokens_per_s": 14.0}
    assert bounds == pytest.approx(np.percentile([18 / 8, 21 / 9], [2.5, 97.5]))


def test_spread_over_seeds_and_figures_by_category_by_hand():
    ours, plain = table([9, 3, 6], [3, 3, 2], [1.0, 1.0, 2.0]), table([9, 3, 6], [9, 3, 6], [3.0, 1.0, 6.0])
    counts = np.array([[1, 1, 1], [2, 1, 0], [0, 3, 0]])  # in the last no prompt of `math` was drawn
    kinds = by_category(ours, plain, ["math", "qa", "math"], counts[[0, 0, 1, 2]])
    assert kinds["math"].pop("tau_ci95") == [3.0, 3.0]
    assert kinds["math"] == {"num_prompts": 2, "tau": 3.0, "tokens_per_s": 5.0, "speedup": 5.0 / (15 / 9)}
    assert kinds["qa"]["tau"] == 1.0 and list(kinds) == ["math", "qa"]
    assert by_category(ours, plain, ["", "", ""], counts) == {}
    uneven = by_category(table([9, 3, 2], [3, 3, 2], [1, 1, 2]), plain, ["math", "qa", "math"], counts[[0, 1]])["math"]
    assert uneven["tau"] == 2.2 and uneven["tau_ci95"] == pytest.approx(np.percentile([11 / 5, 3.0], [2.5, 97.5]))
    gains = paired_gains(ours, {"plain": plain}, resamples(3, 50, seed=0))
    assert gains["plain"]["gain"] == pytest.approx(18 / 8 - 1) and len(gains["plain"]["ci95"]) == 2

    def result(tau: float | None) -> dict:
        cell = {"tau": tau, "tokens_per_s": 10.0, "speedup": 2.0}
        return {"systems": {"dflash": {"chat": cell | {"by_category": {"qa": cell}}}}}

    spread = over_seeds([result(1.0), result(2.0), result(3.0)])["dflash"]["chat"]
    assert (spread["num_seeds"], spread["tau"], spread["tau_std"], spread["speedup_std"]) == (3, 2.0, 1.0, 0.0)
    assert spread["by_category"]["qa"]["tau_std"] == 1.0
    assert over_seeds([result(1.0)])["dflash"]["chat"]["tau_std"] is None
    assert over_seeds([result(1.0), result(None)])["dflash"]["chat"]["tau"] is None
