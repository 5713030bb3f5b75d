"""The statistics of decoding: what blocks had accepted, and intervals for every figure made of it.

Place in the flow: `evaluate` decodes and keeps `Answer`s; this module turns them into the figures of a report.

Every figure is a ratio of sums over prompts. One table of sums per system gives the figures and, with the
prompts weighted by how often a bootstrap resample drew them, their 95 % intervals. Systems that share the
resamples are compared pairwise: the interval of a difference or of a speed-up is that of paired prompts.

Paper: section 4 (acceptance length tau) and section 3.3 (oracle prefix).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Sums = dict[str, np.ndarray]  # per prompt: [P], or [P, S] for what is counted by slot


@dataclass(frozen=True)
class BlockRecord:
    """What one verified block drafted, and how much of it was accepted."""

    start: int  # index of slot 1's token in the answer
    drafts: list[int]  # [S], fewer where the head ended the block early
    candidates: list[list[int]]  # [S, K], likeliest first
    num_accepted: int  # as verified, before the answer was cut


@dataclass(frozen=True)
class Answer:
    """One decoded turn; `num_blocks` and `num_block_tokens` count as in `decode.Decoded`."""

    token_ids: list[int]
    num_blocks: int
    num_block_tokens: int
    seconds: float
    blocks: list[BlockRecord]  # empty in autoregression


def answer_sums(answer: Answer, num_slots: int, num_candidates: int) -> Sums:
    """The sums of one answer that every figure is made of.

    A slot counts where the finished answer has a token for it: what was cut behind a stop token or the limit
    is neither a hit nor a miss. A slot is reached when it was drafted and all slots before it were accepted.
    """
    blocks = answer.blocks
    answer_ids = np.array([*answer.token_ids, *[-1] * num_slots])
    slots = np.arange(num_slots)
    labels = answer_ids[np.array([block.start for block in blocks], dtype=np.int64)[:, None] + slots]
    lengths = np.array([len(block.drafts) for block in blocks], dtype=np.int64)[:, None]
    padded = [[*block.drafts, *[-2] * (num_slots - len(block.drafts))] for block in blocks]
    drafts = np.array(padded, dtype=np.int64).reshape(labels.shape)
    lattice = np.array([block.candidates for block in blocks], dtype=np.int64).reshape(*labels.shape, num_candidates)
    num_accepted = np.array([block.num_accepted for block in blocks], dtype=np.int64)[:, None]
    exists = labels >= 0
    return {
        "tokens": np.array(len(answer.token_ids)),
        "seconds": np.array(answer.seconds),
        "blocks": np.array(answer.num_blocks),
        "block_tokens": np.array(answer.num_block_tokens),
        "drafted": lengths.sum(),
        "reached": (exists & (slots <= num_accepted) & (slots < lengths)).sum(0),
        "accepted": (exists & (slots < num_accepted)).sum(0),
        "oracle_prefix": _leading((lattice == labels[..., None]).any(-1)),
        "selected_prefix": _leading(drafts == labels),
        "top1_prefix": _leading((lattice[..., :1] == labels[..., None]).any(-1)),
    }


def _leading(matches: np.ndarray) -> np.ndarray:
    """Total length of the leading runs of true, [blocks, S] -> scalar."""
    return np.cumprod(matches, axis=1, dtype=np.int64).sum()


def add_sums(turns: Sequence[Sums]) -> Sums:
    """The sums of a prompt from those of its turns."""
    return {name: sum(turn[name] for turn in turns) for name in turns[0]}


def stack_sums(prompts: Sequence[Sums]) -> Sums:
    """The table of a set: [P] and [P, S] from the sums of its prompts."""
    return {name: np.stack([prompt[name] for prompt in prompts]) for name in prompts[0]}


def resamples(num_prompts: int, num_samples: int, seed: int) -> np.ndarray:
    """How often each bootstrap resample draws each prompt: [samples, P], rows add up to P."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_samples)


def figures(sums: Sums, autoregressive: Sums, dflash: Sums | None, counts: np.ndarray) -> dict[str, Any]:
    """The figures of one system on one set.

    `sums` are the system's own, `autoregressive` those that its speed-up is relative to, `dflash` those that
    its gain in tau is relative to (None: no such figures); `counts` [samples, P] come from `resamples`. The
    95 % interval of a figure `x` is `x_ci95`. A figure or an interval without data is None.
    """
    everything = np.ones((1, counts.shape[1]))
    tau, tau_sampled = (_ratio(sums, "block_tokens", "blocks", weights) for weights in (everything, counts))
    speed, speed_sampled = (_ratio(sums, "tokens", "seconds", weights) for weights in (everything, counts))
    slow, slow_sampled = (_ratio(autoregressive, "tokens", "seconds", weights) for weights in (everything, counts))
    result: dict[str, Any] = {
        "num_prompts": counts.shape[1],
        "num_blocks": int(sums["blocks"].sum()),
        "num_tokens": int(sums["tokens"].sum()),
        "drafted_width": sums["accepted"].shape[1],
        "drafted_per_block": _number(_ratio(sums, "drafted", "blocks", everything)),
        "tau": _number(tau),
        "tau_ci95": _interval(tau_sampled),
        "per_slot": [_number(value) for value in _ratio(sums, "accepted", "reached", everything)[0]],
        "per_slot_ci95": [_interval(values) for values in _ratio(sums, "accepted", "reached", counts).T],
        "tokens_per_s": _number(speed),
        "tokens_per_s_ci95": _interval(speed_sampled),
        "speedup": _number(speed / slow),
        "speedup_ci95": _interval(speed_sampled / slow_sampled),
    }
    for name in ("oracle_prefix", "selected_prefix", "top1_prefix"):
        has_slots = bool(result["per_slot"])
        result[name] = _number(_ratio(sums, name, "blocks", everything)) if has_slots else None
        result[f"{name}_ci95"] = _interval(_ratio(sums, name, "blocks", counts)) if has_slots else None
    if dflash is not None:
        base, base_sampled = (_ratio(dflash, "block_tokens", "blocks", weights) for weights in (everything, counts))
        result["tau_gain_over_dflash"] = _number(tau - base)
        result["tau_gain_over_dflash_ci95"] = _interval(tau_sampled - base_sampled)
        result["tau_gain_over_dflash_percent"] = _number(100 * (tau / base - 1))
        result["tau_gain_over_dflash_percent_ci95"] = _interval(100 * (tau_sampled / base_sampled - 1))
    return result


def paired_gains(table: Sums, others: dict[str, Sums], counts: np.ndarray) -> dict[str, dict[str, Any]]:
    """Gain in tau of one system over each of the others, with the interval of paired prompts."""
    everything = np.ones((1, counts.shape[1]))
    gains = {}
    for name, other in others.items():
        value, sampled = (
            _ratio(table, "block_tokens", "blocks", weights) - _ratio(other, "block_tokens", "blocks", weights)
            for weights in (everything, counts)
        )
        gains[name] = {"gain": _number(value), "ci95": _interval(sampled)}
    return gains


def by_category(
    table: Sums, autoregressive: Sums, categories: Sequence[str], counts: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Tau, tokens per second and speed-up of the prompts of each category; none where the set has no categories."""
    found = {}
    for category in dict.fromkeys(categories):
        weights = np.array([[float(other == category) for other in categories]])
        speed, slow = (_ratio(sums, "tokens", "seconds", weights) for sums in (table, autoregressive))
        found[category] = {
            "num_prompts": int(weights.sum()),
            "tau": _number(_ratio(table, "block_tokens", "blocks", weights)),
            "tau_ci95": _interval(_ratio(table, "block_tokens", "blocks", counts * weights)),
            "tokens_per_s": _number(speed),
            "speedup": _number(speed / slow),
        }
    return {} if set(found) <= {""} else found


SHORTEST = 64  # the first class of lengths ends there


def length_class(num_tokens: int) -> str:
    """The class of inputs of about one length: the power of two, SHORTEST at least, up to which it goes."""
    return str(max(SHORTEST, 1 << (num_tokens - 1).bit_length()))


def concurrent_figures(table: Sums, seconds: float, counts: np.ndarray) -> dict[str, Any]:
    """Tau and tokens per second of prompts that were decoded together in `seconds`.

    `table` has the sums tokens, blocks and block_tokens, [P]; `counts` [samples, P] come from `resamples`. The
    throughput is that of one run, so it has no interval over prompts.
    """
    everything = np.ones((1, counts.shape[1]))
    return {
        "num_prompts": counts.shape[1],
        "num_tokens": int(table["tokens"].sum()),
        "tau": _number(_ratio(table, "block_tokens", "blocks", everything)),
        "tau_ci95": _interval(_ratio(table, "block_tokens", "blocks", counts)),
        "tokens_per_s": float(table["tokens"].sum() / seconds),
    }


SPREAD = ("tau", "tokens_per_s", "speedup")


def over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean and sample standard deviation over the seeds of `results`, by system and set.

    A figure that a seed has no data for is None, and so is the deviation of a single seed.
    """
    first = results[0]["systems"]
    return {
        system: {name: _spread([result["systems"][system][name] for result in results]) for name in by_set}
        for system, by_set in first.items()
    }


def _spread(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    spread: dict[str, Any] = {"num_seeds": len(cells)}
    for figure in SPREAD:
        values = [cell[figure] for cell in cells]
        known = None not in values
        spread[figure] = float(np.mean(values)) if known else None
        spread[f"{figure}_std"] = float(np.std(values, ddof=1)) if known and len(values) > 1 else None
    categories = cells[0].get("by_category", {})
    if categories:
        spread["by_category"] = {name: _spread([cell["by_category"][name] for cell in cells]) for name in categories}
    return spread


def _ratio(sums: Sums, numerator: str, denominator: str, weights: np.ndarray) -> np.ndarray:
    """Ratio of two sums over weighted prompts: weights [W, P] -> [W] or [W, S], nan for 0 / 0."""
    with np.errstate(invalid="ignore"):
        return (weights @ sums[numerator]) / (weights @ sums[denominator])


def _interval(values: np.ndarray) -> list[float] | None:
    """The central 95 % of bootstrap values; resamples without data are left out, None if all are."""
    values = values[np.isfinite(values)]
    return [float(bound) for bound in np.percentile(values, [2.5, 97.5])] if len(values) else None


def _number(value: np.ndarray) -> float | None:
    """The one element as a JSON number, None where there was no data."""
    number = value.item()
    return number if np.isfinite(number) else None
