"""What an evaluation left in its folder: `results.json`, and `sampled.json` where it was asked for.

Place in the flow: `pipelines/evaluate.py` writes both; `tables` prints them, and only ones that belong
together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUBSETS = {"gsm8k": "gsm8k_100", "aime25": "aime25_25"}  # what packages ship of a set


@dataclass(frozen=True)
class Results:
    """What an evaluation left."""

    greedy: dict[str, Any]
    sampled: dict[str, Any] | None  # means over seeds, None where none was asked for

    def cell(self, regime: str, system: str, name: str) -> dict[str, Any] | None:
        """The figures of a system on a set, None where it was not measured."""
        source = self.greedy if regime == "greedy" else self.sampled
        return source["systems"].get(system, {}).get(name) if source else None

    def own_set(self, name: str) -> str | None:
        """The set of the run that stands for the paper's set: itself, else the packaged part of it."""
        measured = self.greedy["sets"]
        return next((own for own in (name, SUBSETS.get(name)) if own in measured), None)


def read_results(folder: Path) -> Results:
    """The results in a folder; raises ValueError if there are none, or sampled ones that do not belong to them."""
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: run pipelines/evaluate.py first")
    greedy, sampled = _json(path), folder / "sampled.json"
    if not sampled.is_file():
        return Results(greedy, None)
    drawn = _json(sampled)
    if problem := stale(drawn, greedy):
        raise ValueError(f"{sampled}: {problem}; run pipelines/evaluate.py again, or remove the file")
    return Results(greedy, drawn)


def stale(sampled: dict[str, Any], greedy: dict[str, Any]) -> str | None:
    """Why the figures of `sampled.json` do not belong to those of `results.json`, None if they do."""
    if "sets" not in sampled:
        return "an older version made it, without fingerprints"
    made = {name: values["greedy_fingerprint"] for name, values in sampled["sets"].items()}
    there = {name: values["fingerprint"] for name, values in greedy["sets"].items()}
    names = [name for name in made.keys() | there.keys() if made.get(name) != there.get(name)]
    return f"results.json has since been made anew on {', '.join(sorted(names))}" if names else None


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
