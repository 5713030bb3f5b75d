"""The paper's tables: its own values where it has them, ours beside them, and a setting that is told apart."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lilicorr.evaluate import main
from lilicorr.results import Results, read_results
from lilicorr.tables import SETS, SYSTEMS, TABLES, paper_table, paper_tables, tables_text

EVERY = [
    "autoregressive",
    *SYSTEMS,
    "lilicorr_exact",
    "lilicorr_lookahead",
    "lilicorr_margin",
    "lilicorr_no_distractor",
]


def cell(tau: float, **more: Any) -> dict[str, Any]:
    values = {"tau": tau, "tokens_per_s": 100 * tau, "speedup": tau / 2, "drafted_width": 7, "num_prompts": 10}
    return values | {"tau_gain_over": {"lilicorr": {"gain": -0.25, "ci95": [-0.4, -0.1]}}} | more


def make_results(**sets: dict[str, Any]) -> Results:
    """Every system on every set; tau is 3, of LiLiCorr 4."""
    greedy = {
        "systems": {
            system: {
                name: cell(4.0 if system == "lilicorr" else 3.0, by_category=more.get("by_category", {}))
                for name, more in sets.items()
            }
            for system in EVERY
        },
        "sets": {name: {"data": more.get("data", {"prompts": 10})} for name, more in sets.items()},
        "provenance": {"config": {"target": {"source": "embedded"}, "prompts": {"source": "stdlib"}}},
    }
    sampled = copy.deepcopy(greedy)
    for by_set in sampled["systems"].values():
        for values in by_set.values():
            values |= {"tau_std": 0.05, "tokens_per_s_std": 1.5}
    return Results(greedy, sampled)


def rows(text: str, first: str) -> list[list[str]]:
    """The rows of a printed table that begin with a label."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if line[0] == first]


def test_the_papers_values_were_taken_over_whole() -> None:
    tables = paper_tables()
    for number in ("5", "6"):
        for regime in ("greedy", "sampled"):
            by_set = tables[number][regime]
            assert by_set.keys() == SETS.keys() | {"average"}
            for system in by_set["gsm8k"]:  # the paper's averages are those of its rows
                values = [by_set[name][system][0] for name in SETS]
                assert sum(values) / 9 == pytest.approx(by_set["average"][system][0], abs=0.011), (number, system)
    assert tables["5"]["greedy"]["gsm8k"]["lilicorr"] == [7.56, 795.0, 5.30]
    assert tables["6"]["sampled"]["speed_bench"]["dspark_sampled"] == [4.16, 514.0, 2.25]
    assert tables["7"]["greedy"]["multilingual"]["domino"] == [4.96, 530.0]
    assert tables["10"]["tau"]["aime25"]["domino"] == [4.72, 0.27]
    assert tables["14"]["32k high"]["32"]["dspark"] == [3.22, 412.0, 1.64]
    assert tables["14"]["32k high"]["32"]["lilicorr_margin"] == [3.2, 415.0, 1.65]  # of Tables 16 and 17
    for part in (*tables["13"].values(), *tables["14"].values()):  # "the highest throughput at every one of ninety"
        assert list(part) == ["1", "2", "4", "8", "16", "32"]
        for by_system in part.values():
            rivals = [by_system[system][1] for system in ("dflash", "domino", "dspark")]
            assert by_system["lilicorr_margin"][1] >= max(rivals), by_system
    for name, walk in tables["12"].items():
        assert 100 * (walk["exact"] / walk["greedy"] - 1) == pytest.approx(walk["percent"], abs=0.03), name
    assert all(len(tables[number]) == count for number, count in (("13", 6), ("14", 9), ("15", 2)))


@pytest.mark.parametrize("number", TABLES)
def test_every_table_says_that_the_setting_is_not_the_papers(number: int) -> None:
    text = paper_table(number, make_results(humaneval={}))
    size = "4B" if number in (6, 8, 10) else "8B"
    assert text.startswith(f"### Table {number}: ")
    assert f"**Not the paper's setting**: target.source 'embedded' (paper 'Qwen/Qwen3-{size}')" in text
    assert "prompts.source 'stdlib' (paper 'nemotron_v2')" in text and "Drafted width 7." in text


def test_a_setting_that_is_the_papers() -> None:
    results = make_results(humaneval={})
    results.greedy["provenance"]["config"] = {
        "target": {"source": "Qwen/Qwen3-8B"},
        "prompts": {"source": "nemotron_v2"},
        "train": {
            "drafter": {"block_size": 16, "num_layers": 5},
            "batch_size": 64,
            "max_length": 3072,
            "max_anchors": 512,
            "runs": {"lilicorr": {"epochs": 6.0}},
        },
    }
    assert "The setting is the paper's as far as a profile states it." in paper_table(5, results)
    assert "**Not the paper's setting**: target.source 'Qwen/Qwen3-8B' (paper 'Qwen/Qwen3-4B')." in paper_table(
        6, results
    )


def test_figures_stand_beside_the_papers_and_subsets_are_named() -> None:
    part = {"data": {"prompts": 100, "prompts_of_whole_set": 1319}}  # ten of which were decoded
    results = make_results(held_out={}, humaneval={}, gsm8k_100=part)
    greedy, sampled = rows(paper_table(5, results), "GSM8K (10 of 1319)")
    assert greedy[1] == "4.00 / 400 / 2.00x (7.56 / 795 / 5.30x)"
    assert greedy[4] == "3.00 / 300 / 1.50x" and sampled[4] == "3.00 / 300 / 1.50x (7.06 / 610 / 4.12x)"
    assert rows(paper_table(5, results), "MBPP")[0][1] == "– (5.87 / 622 / 4.15x)"
    assert rows(paper_table(5, results), "held_out")[0][1:3] == ["4.00 / 400 / 2.00x", "3.00 / 300 / 1.50x"]
    assert rows(paper_table(1, results), "HumanEval")[0][1] == "2.00x (4.15x)"
    assert rows(paper_table(15, results), "HumanEval")[0][1:] == [
        "4.00 / 2.00x (7.18 / 4.15x)",
        "3.00 / 1.50x (7.26 / 4.19x)",
    ]
    assert rows(paper_table(11, results), "full")[0][4] == "4.00 (7.18)"
    spread = rows(paper_table(9, results), "HumanEval")
    assert spread[0][1] == "4.00 ± 0.05 (paper 7.11 ± 0.09)" and spread[1][1] == "400.0 ± 1.5 (paper 592.0 ± 10.3)"
    bare = Results(results.greedy, None)
    assert "Sampling, T = 1: not measured" in paper_table(5, bare) and "± " in paper_table(9, bare)


def test_the_walks_side_by_side() -> None:
    greedy, *gains = rows(paper_table(12, make_results(humaneval={})), "HumanEval")[0][1:]
    assert greedy == "4.00 (7.18)"
    assert gains[:2] == ["3.00 (7.11)", "-6.25 % (-0.400 to -0.100) [paper -0.90 %]"]
    assert gains[2:] == ["3.00", "-6.25 % (-0.400 to -0.100)"]
    margin = rows(paper_table(12, make_results(humaneval={})), "HumanEval")[1]
    assert margin[1] == "3.00" and margin[2] == "–"  # its walks were not evaluated here


def test_categories_and_lengths() -> None:
    kinds = {"by_category": {"coding": cell(5.0), "low_entropy": cell(6.0)}}
    results = make_results(speed_bench=kinds, speed_1k=kinds)
    assert rows(paper_table(7, results), "coding")[0][1] == "5.00 / 500 (6.33 / 681)"
    assert rows(paper_table(7, results), "math")[0][1] == "– (6.96 / 760)"
    low = rows(paper_table(13, results), "1k low")[0]
    assert len(rows(paper_table(13, results), "1k low")) == 1
    assert low[1:4] == ["1", "6.00 / 600 / 3.00x (1.00 / 148 / 1.00x)", "6.00 / 600 / 3.00x (4.93 / 516 / 3.49x)"]
    assert rows(paper_table(13, results), "2k low")[0][3] == "– (5.49 / 559 / 3.83x)"


def test_concurrencies_beside_the_papers() -> None:
    """What was decoded at once stands beside the paper's row of that concurrency, at 1 in place of the reference's."""
    results = make_results(speed_32k={"by_category": {"high_entropy": cell(5.0)}}, held_out={}, speed_1k={})
    for number, by_set in enumerate(results.greedy["systems"].values()):
        high = {"1": cell(2.0, rows=1), "32": cell(2.5 + number, rows=9), "3": cell(1.5, rows=3)}
        by_set["speed_32k"]["by_concurrency"] = {count: {"high_entropy": values} for count, values in high.items()}
        by_set["held_out"]["by_concurrency"] = {"8": {"": cell(4.5, rows=8)}}
    drafted = list(results.greedy["systems"]).index("lilicorr")
    one, three, most = rows(paper_table(14, results), "32k high")
    assert [row[1] for row in (one, three, most)] == ["1", "3", "32†"]
    assert one[3] == "2.00 / 200 / 1.00x (3.12 / 200 / 1.96x)" and three[3] == "1.50 / 150 / 0.75x"
    assert most[2].endswith("(1.00 / 251 / 1.00x)")
    assert most[3] == f"{2.5 + drafted:.2f} / {250 + 100 * drafted} / {1.25 + drafted / 2:.2f}x (3.13 / 410 / 1.63x)"
    assert [row[1] for row in rows(paper_table(14, results), "32k low")] == ["1", "3", "32"]
    held_out = rows(paper_table(13, results), "held_out")
    assert [row[1] for row in held_out] == ["1", "8"] and held_out[0][3] == "4.00 / 400 / 2.00x"
    assert held_out[1][3] == "4.50 / 450 / 2.25x" and not rows(paper_table(14, results), "held_out")


def test_acceptance_by_length_with_and_without_yarn() -> None:
    lengths = {"512": cell(3.0, tau_ci95=[2.5, 3.5]), "64": cell(2.0, tau_ci95=None)}
    results = make_results(held_out={}, chat={})
    for by_set in results.greedy["systems"].values():
        by_set["held_out"]["by_length"] = lengths
    plain = {"512": cell(1.25, tau_ci95=[1.0, 1.5])}
    results.greedy["systems"]["dflash_no_yarn"] = {"held_out": cell(1.25, by_length=plain)}
    config = results.greedy["provenance"]["config"]
    assert "No drafter is extended" in tables_text("lengths", results)
    config["evaluate"] = {
        "yarn": {"factor": 4.0},
        "systems": {"dflash": {"yarn": True}, "dflash_no_yarn": {"yarn": False}},
    }
    config["train"] = {"max_length": 128}
    text = tables_text("lengths", results)
    header, short, long = rows(text, "set")[0], *rows(text, "held_out")
    at = {name: place for place, name in enumerate(header)}
    assert set(header[3:]) == {*SYSTEMS, "lilicorr_margin", "dflash_no_yarn"}
    assert short[:3] == ["held_out", "up to 64", "10"] and short[at["dflash"]] == "2.00"
    assert short[at["dflash_no_yarn"]] == "–" and long[at["dflash_no_yarn"]] == "1.25 [1.00, 1.50]"
    assert long[1] == "up to 512" and long[at["dflash"]] == "3.00 [2.50, 3.50]"
    assert "YaRN, {'factor': 4.0}; without it: dflash_no_yarn. They were trained on rows of up to 128 tokens" in text
    assert "**Not the paper's setting**" in text and not rows(text, "chat")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = make_results(humaneval={})
    (tmp_path / "results.json").write_text(json.dumps(results.greedy))
    assert read_results(tmp_path).sampled is None
    main(["--table", "5", "--results", str(tmp_path)])
    assert capsys.readouterr().out.startswith("### Table 5")
    main(["--table", "all", "--results", str(tmp_path), "--out", str(tmp_path / "tables.md")])
    written = (tmp_path / "tables.md").read_text()
    assert written.count("### Table") == len(TABLES) and written.count("### ") == len(TABLES) + 1
    main(["--table", "lengths", "--results", str(tmp_path)])
    assert capsys.readouterr().out.strip() == written[written.index("### Acceptance length") :].strip()
    for arguments, message in (
        (["--table", "2", "--results", str(tmp_path)], "table must be one of 1, 5"),
        (["--table", "five", "--results", str(tmp_path)], "table must be all or one of"),
        (["--table", "5", "--results", str(tmp_path / "none")], "results.json is missing"),
        (["--benchmark", "math500"], "no package has 'math500': give the path"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
    rows_file = tmp_path / "math.jsonl"
    rows_file.write_text(json.dumps({"problem": "1 + 1?", "unique_id": "a"}) + "\n")
    main(["--benchmark", "math500", "--path", str(rows_file)])
    facts = json.loads(capsys.readouterr().out)
    assert facts["prompts"] == 1 and facts["prompts_of_whole_set"] == 500
