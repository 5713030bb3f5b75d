"""The paper's tables, filled with a run's results, the paper's own value beside every figure.

Place in the flow: `pipelines/evaluate.py` leaves `results.json` (greedy) and `sampled.json` (means over seeds at
temperature 1) in a folder; `python -m lilicorr.evaluate --table N --results FOLDER` prints table N of it. What the
setting has in common with the paper's, and what not, stands under every table. The paper's values are in
`paper_tables.json`. Paper: Tables 1, 5 to 17, 16 and 17 as a column of 13 and 14; `lengths` is ours.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lilicorr.results import Results

SYSTEMS = {
    "lilicorr": "LiLiCorr",
    "domino": "Domino",
    "dspark": "DSpark",
    "dspark_sampled": "DSpark (sampled)",
    "dflash": "Vanilla DFlash",
}
SETS = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "aime25": "AIME 2025",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "livecodebench": "LiveCodeBench",
    "alpaca_eval": "AlpacaEval",
    "mt_bench": "MT-Bench",
    "speed_bench": "SPEED",
}
REGIMES = {"greedy": "Greedy, T = 0", "sampled": "Sampling, T = 1"}
ALL_FIGURES = ("tau", "tokens_per_s", "speedup")
TIERS = {"low": "low_entropy", "mixed": "mixed", "high": "high_entropy"}
# What the paper's run has, by dotted name in a profile (section 4.1, Table 4)
PAPER_SETTING = {
    "prompts.source": "nemotron_v2",
    "train.drafter.block_size": 16,
    "train.drafter.num_layers": 5,
    "train.batch_size": 64,
    "train.max_length": 3072,
    "train.max_anchors": 512,
    "train.runs.lilicorr.epochs": 6.0,
}
NONE = "–"
DAGGER = "†"
LENGTHS = "lengths"
LENGTHS_NOTE = (
    "An input is counted in tokens, under the power of two that it has room in, a conversation by its longest; the "
    "paper has no such table. 95 % intervals over prompts."
)
BY_LENGTH_NOTE = (
    "c requests at once (`evaluate.concurrencies`); of concurrencies that were not decoded the paper's rows are in "
    f"`paper_tables.json`. {DAGGER}: never so many at once, for want of prompts or of room for their keys and values."
)


@functools.lru_cache
def paper_tables() -> dict[str, Any]:
    """The paper's values by table number."""
    return json.loads((Path(__file__).parent / "paper_tables.json").read_text(encoding="utf-8"))


def tables_text(asked: str, results: Results) -> str:
    """The paper's table of that number, or all of them for `all`; errors as of `paper_table`."""
    if asked == "all":
        return "\n\n".join([*(paper_table(number, results) for number in TABLES), lengths_table(results)])
    if asked == LENGTHS:
        return lengths_table(results)
    if not asked.isdigit():
        raise ValueError(f"table must be all or one of {', '.join(map(str, [*TABLES, LENGTHS]))}, got {asked!r}")
    return paper_table(int(asked), results)


def paper_table(number: int, results: Results) -> str:
    """Table `number` of the paper as Markdown; raises ValueError for a table that is not one of results."""
    if number not in TABLES:
        raise ValueError(f"table must be one of {', '.join(map(str, TABLES))}, got {number}")
    title, build = TABLES[number]
    said = f"{setting(results, '4B' if number in (6, 8, 10) else '8B')} Paper's values in brackets."
    return "\n".join([f"### Table {number}: {title}", "", *build(number, results), "", said])


def setting(results: Results, size: str) -> str:
    """What the run shares with the paper's, said plainly: the paper's values are no goal where it differs."""
    config = results.greedy["provenance"]["config"]
    wanted = {"target.source": f"Qwen/Qwen3-{size}", **PAPER_SETTING}
    differing = [
        f"{path} {own!r} (paper {value!r})" for path, value in wanted.items() if (own := _at(config, path)) != value
    ]
    widths = {cell["drafted_width"] for by_set in results.greedy["systems"].values() for cell in by_set.values()}
    width = f"Drafted width {', '.join(str(width) for width in sorted(widths - {0}))}."
    if not differing:
        return f"The setting is the paper's as far as a profile states it. {width}"
    return f"**Not the paper's setting**: {'; '.join(differing)}. {width}"


def _at(node: Any, path: str) -> Any:
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def show(values: Sequence[float | None], names: Sequence[str]) -> str:
    """Figures of one cell: tau to two places, throughput whole from 10 on, speed-up with its sign."""
    shown = {
        "tau": lambda value: f"{value:.2f}",
        "tokens_per_s": lambda value: f"{value:.0f}" if value >= 10 else f"{value:.1f}",
        "speedup": lambda value: f"{value:.2f}x",
    }
    return " / ".join(NONE if value is None else shown[name](value) for value, name in zip(values, names))


def beside(own: dict[str, Any] | None, paper: Sequence[float] | None, names: Sequence[str]) -> str:
    """Our figures, the paper's in brackets."""
    ours = NONE if own is None else show([own[name] for name in names], names)
    return ours if paper is None else f"{ours} ({show(paper, names)})"


def own_rows(results: Results) -> list[tuple[str, str | None, str]]:
    """(paper's name of the set or '', ours or None, label) of every row: the paper's sets, then the run's others."""
    rows = []
    for name, label in SETS.items():
        own = results.own_set(name)
        rows.append((name, own, label + (_share(results, own) if own else "")))
    known = {own for _, own, _ in rows}
    return rows + [("", name, name) for name in results.greedy["sets"] if name not in known]


def _share(results: Results, own: str) -> str:
    """How much of the public set was decoded, where it was not all of it."""
    data = results.greedy["sets"][own]["data"]
    whole = data.get("prompts_of_whole_set") or data["prompts"]
    decoded = results.greedy["systems"]["autoregressive"][own]["num_prompts"]
    return f" ({decoded} of {whole})" if decoded < whole else ""


def _by_set(number: int, results: Results, names: Sequence[str], pick: Sequence[int], paper: str) -> list[str]:
    """A table of sets by systems; `pick` says which figures of the paper's cell are `names`."""
    lines: list[str] = []
    for regime, title in REGIMES.items():
        if regime == "sampled" and results.sampled is None:
            lines += ["", f"{title}: not measured (evaluate.sampled_seeds is empty)."]
            continue
        rows = []
        for name, own, label in own_rows(results):
            cells = []
            for system in SYSTEMS:
                published = paper_tables()[paper][regime].get(name, {}).get(system)
                values = None if published is None else [published[index] for index in pick]
                cells.append(beside(own and results.cell(regime, system, own), values, names))
            rows.append([label, *cells])
        lines += ["", f"{title}: {' / '.join(names)}", "", *markdown(["set", *SYSTEMS.values()], rows)]
    return lines[1:]


def speedups(number: int, results: Results) -> list[str]:
    """Table 1, with the paper's values on Qwen3-8B."""
    return _by_set(number, results, ("speedup",), (2,), "5")


def acceptance_and_throughput(number: int, results: Results) -> list[str]:
    """Tables 5 and 6."""
    return _by_set(number, results, ALL_FIGURES, (0, 1, 2), str(number))


def categories(number: int, results: Results) -> list[str]:
    """Tables 7 and 8: SPEED by category."""
    names, lines = ("tau", "tokens_per_s"), []
    for regime, title in REGIMES.items():
        rows = []
        for category, paper in paper_tables()[str(number)][regime].items():
            cells = []
            for system in SYSTEMS:
                whole = results.cell(regime, system, "speed_bench") or {}
                cells.append(beside(whole.get("by_category", {}).get(category), paper.get(system), names))
            rows.append([category, *cells])
        lines += ["", f"{title}: tau / tokens per second", "", *markdown(["category", *SYSTEMS.values()], rows)]
    return lines[1:]


def seeds(number: int, results: Results) -> list[str]:
    """Tables 9 and 10: mean and sample standard deviation over the seeds."""
    lines: list[str] = []
    for figure, places in (("tau", 2), ("tokens_per_s", 1)):
        rows = []
        for name, own, label in own_rows(results):
            cells = []
            for system in SYSTEMS:
                cell = results.cell("sampled", system, own) if own else None
                paper = paper_tables()[str(number)][figure].get(name, {}).get(system)
                ours = NONE if cell is None else _spread(cell[figure], cell[f"{figure}_std"], places)
                cells.append(ours if paper is None else f"{ours} (paper {_spread(*paper, places)})")
            rows.append([label, *cells])
        lines += ["", f"{figure}, mean ± deviation", "", *markdown(["set", *SYSTEMS.values()], rows)]
    return lines[1:]


def _spread(mean: float | None, deviation: float | None, places: int) -> str:
    if mean is None:
        return NONE
    return f"{mean:.{places}f}" + ("" if deviation is None else f" ± {deviation:.{places}f}")


def ablation(number: int, results: Results) -> list[str]:
    """Table 11: without and with the distractor penalty."""
    labels = {"lilicorr_no_distractor": "without distractor penalty", "lilicorr": "full"}
    rows = []
    for system, label in labels.items():
        cells = []
        for name, own, _ in own_rows(results):
            paper = paper_tables()["11"][system].get(name)
            cells.append(beside(own and results.cell("greedy", system, own), paper and [paper], ("tau",)))
        rows.append([label, *cells])
    return markdown(["objective", *(label for _, _, label in own_rows(results))], rows)


def walks(number: int, results: Results) -> list[str]:
    """Table 12, and the walk that maximises the expected accepted length beside it, with paired intervals."""
    lines: list[str] = []
    for base in [system for system in ("lilicorr", "lilicorr_margin") if system in results.greedy["systems"]]:
        rows = []
        for name, own, label in own_rows(results):
            paper = paper_tables()["12"].get(name) if base == "lilicorr" else None
            greedy = results.cell("greedy", base, own) if own else None
            row = [label, beside(greedy, paper and [paper["greedy"]], ("tau",))]
            for walk in ("exact", "lookahead"):
                cell = results.cell("greedy", f"{base}_{walk}", own) if own else None
                published = paper if walk == "exact" else None
                row.append(beside(cell, published and [published["exact"]], ("tau",)))
                row.append(_gain(cell, greedy, base, published and published["percent"]))
            rows.append(row)
        header = ["set", "greedy", "exact", "exact - greedy", "lookahead", "lookahead - greedy"]
        lines += ["", f"{base}: tau", "", *markdown(header, rows)]
    return lines[1:] or ["No LiLiCorr checkpoint was evaluated."]


def _gain(cell: dict[str, Any] | None, greedy: dict[str, Any] | None, base: str, paper: float | None) -> str:
    """Difference in percent and its interval in tau."""
    ours = NONE
    if cell and greedy and cell["tau"] is not None and greedy["tau"]:
        gain = cell["tau_gain_over"][base]
        low, high = gain["ci95"]
        ours = f"{100 * gain['gain'] / greedy['tau']:+.2f} % ({low:+.3f} to {high:+.3f})"
    return ours if paper is None else f"{ours} [paper {paper:+.2f} %]"


def by_length(number: int, results: Results) -> list[str]:
    """Tables 13 and 14; in Table 13 also the run's other sets that were decoded at several concurrencies.

    Without engine figures of concurrency 1 its row has those of one request at a time in the reference decoder.
    """
    systems = {"autoregressive": "Autoregressive", **SYSTEMS, "lilicorr_margin": "LiLiCorr + margin"}
    published, rows = paper_tables()[str(number)], []
    parts = {part: (f"speed_{part.split()[0]}", TIERS[part.split()[1]]) for part in published}
    if number == 13:
        parts |= other_parts(results)
    for part, (name, category) in parts.items():
        cells = {system: results.cell("greedy", system, name) or {} for system in systems}
        together = {system: cell.get("by_concurrency", {}) for system, cell in cells.items()}
        for count in sorted({1, *(int(count) for found in together.values() for count in found)}):
            row, short = [], False
            for system in systems:
                alone = {"": cells[system] or None, **cells[system].get("by_category", {})} if count == 1 else {}
                own = together[system].get(str(count), alone).get(category)
                paper = published.get(part, {}).get(str(count), {}).get(system)
                if paper is not None and len(paper) == 2:  # the paper gives autoregression no tau
                    paper = [1.0, *paper]
                row.append(beside(own, paper, ALL_FIGURES))
                short = short or (own or {}).get("rows", count) < count
            rows.append([part, f"{count}{DAGGER if short else ''}", *row])
    return [*markdown(["input", "c", *systems.values()], rows), "", BY_LENGTH_NOTE]


def other_parts(results: Results) -> dict[str, tuple[str, str]]:
    """(set, category) by label of what else was decoded at several concurrencies."""
    found = {}
    for name, cell in results.greedy["systems"]["autoregressive"].items():
        categories = {category for part in cell.get("by_concurrency", {}).values() for category in part}
        if not name.startswith("speed_"):
            found |= {f"{name} {category}".strip(): (name, category) for category in sorted(categories)}
    return found


def lengths_table(results: Results) -> str:
    """Tau by length of the input, of all systems, and without YaRN beside them: Markdown."""
    config = results.greedy["provenance"]["config"]
    plain = {name for name, system in (_at(config, "evaluate.systems") or {}).items() if system.get("yarn") is False}
    systems = [name for name in results.greedy["systems"] if name in {*SYSTEMS, "lilicorr_margin", *plain}]
    rows = []
    for name in results.greedy["sets"]:
        cells = [(results.cell("greedy", system, name) or {}).get("by_length", {}) for system in systems]
        for most in sorted({most for cell in cells for most in cell}, key=int):
            found = [cell.get(most) for cell in cells]
            prompts = next(values["num_prompts"] for values in found if values is not None)
            rows.append([name, f"up to {most}", str(prompts), *map(_tau, found)])
    yarn = _at(config, "evaluate.yarn")
    if yarn is None:
        said = "No drafter is extended (`evaluate.yarn` is null)."
    else:
        said = f"The drafters are extended by YaRN, {yarn}; without it: {', '.join(sorted(plain)) or 'none'}."
    trained = f"They were trained on rows of up to {_at(config, 'train.max_length')} tokens."
    lines = ["### Acceptance length by input length", "", *markdown(["set", "input", "prompts", *systems], rows), ""]
    return "\n".join([*lines, f"{said} {trained} {LENGTHS_NOTE} {setting(results, '8B')}"])


def _tau(values: dict[str, Any] | None) -> str:
    if values is None or values["tau"] is None:
        return NONE
    low, high = values["tau_ci95"] or (None, None)
    return show([values["tau"]], ["tau"]) + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


def margin(number: int, results: Results) -> list[str]:
    """Table 15, with the paper's values on Qwen3-8B."""
    names, lines = ("tau", "speedup"), []
    for regime, title in REGIMES.items():
        rows = []
        for name, own, label in own_rows(results):
            paper = paper_tables()["15"][regime].get(name, {}).get("8B", {})
            cells = [
                beside(own and results.cell(regime, system, own), paper.get(system), names)
                for system in ("lilicorr", "lilicorr_margin")
            ]
            rows.append([label, *cells])
        lines += ["", f"{title}: tau / speed-up", "", *markdown(["set", "LiLiCorr", "LiLiCorr + margin"], rows)]
    return lines[1:]


TABLES: dict[int, tuple[str, Callable[[int, Results], list[str]]]] = {
    1: ("speed-up over autoregressive decoding", speedups),
    5: ("acceptance length, throughput and speed-up, against Qwen3-8B", acceptance_and_throughput),
    6: ("acceptance length, throughput and speed-up, against Qwen3-4B", acceptance_and_throughput),
    7: ("SPEED by category, against Qwen3-8B", categories),
    8: ("SPEED by category, against Qwen3-4B", categories),
    9: ("spread over seeds at temperature 1, against Qwen3-8B", seeds),
    10: ("spread over seeds at temperature 1, against Qwen3-4B", seeds),
    11: ("loss terms", ablation),
    12: ("greedy, exact and lookahead walk", walks),
    13: ("SPEED throughput split, inputs of 1K and 2K", by_length),
    14: ("SPEED throughput split, inputs of 8K to 32K", by_length),
    15: ("LiLiCorr and LiLiCorr + margin", margin),
}
