"""`--systems all`: every system of the paper, on any profile, at the budget of the profile's own DFlash run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lilicorr.config import LiLiCorrConfig, PipelineConfig, TrainConfig, YarnConfig, from_dict, load_profile
from lilicorr.draft_model import check_blocks
from lilicorr.heads import HEADS
from pipelines.full import ABLATION, main, with_ablations
from pipelines.systems import SYSTEMS, WITHOUT_YARN, chosen, with_systems

PROFILES = Path(__file__).parents[1] / "pipelines" / "profiles"
NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load(name: str) -> PipelineConfig:
    return load_profile(name, PROFILES)


@pytest.mark.parametrize("name", NAMES)
def test_every_system_has_the_budget_and_the_width_of_dflash(name: str) -> None:
    plain = load(name)
    config = with_systems(plain, chosen("all"))
    runs, base = config.train.runs, config.train.runs["dflash"]
    assert list(plain.train.runs) == [run for run in runs if run in plain.train.runs]
    assert all(runs[run] == before for run, before in plain.train.runs.items())
    for system in ("domino", "dspark", "lilicorr", "lilicorr_margin"):
        run = runs[system]
        assert (run.steps, run.epochs, run.schedule) == (base.steps, base.epochs, base.schedule)
        assert (run.start_from is None) == (base.start_from is None)
        if run.start_from is not None and run.start_from != base.start_from:
            start, trunk = runs[run.start_from], runs[base.start_from]
            assert (start.steps, start.head, start.schedule) == (trunk.steps, trunk.head, trunk.schedule)
            assert list(runs).index(run.start_from) < list(runs).index(system)
        anchor_first = HEADS[run.head].layouts[0] == "anchor_first"
        block_size = run.block_size or config.train.drafter.block_size
        assert block_size - (not anchor_first) == config.train.drafter.block_size - 1
    for run in runs:
        check_blocks(run, config.train)
        from_dict(HEADS[runs[run].head].Config, runs[run].head_config)
    assert set(SYSTEMS) <= set(config.evaluate.systems) and config.evaluate.sampled_seeds == (42, 43, 44)
    for system in config.evaluate.systems.values():
        assert system.run is None or system.run in runs
        if system.run is not None:
            head = system.head or runs[system.run].head
            from_dict(HEADS[head].Config, system.head_config)
    walks = {"lilicorr_exact", "lilicorr_lookahead", "lilicorr_margin_exact", "lilicorr_margin_lookahead"}
    assert walks <= set(config.evaluate.systems)


def test_the_systems_are_those_of_the_paper() -> None:
    config = with_systems(load("paper_8b"), chosen("all"))
    runs, systems = config.train.runs, config.evaluate.systems
    assert from_dict(HEADS["domino"].Config, runs["domino"].head_config) == HEADS["domino"].Config()
    assert from_dict(HEADS["dspark"].Config, runs["dspark"].head_config) == HEADS["dspark"].Config()
    margin = from_dict(LiLiCorrConfig, runs["lilicorr_margin"].head_config)
    assert (margin.margin_blend, margin.margin) == (0.5, 2.0)
    assert (systems["dspark_sampled"].run, systems["dspark_sampled"].head_config) == ("dspark", {"contract": "sampled"})
    assert [name for name, system in systems.items() if system.only == "sampled"] == ["dspark_sampled"]
    assert set(SYSTEMS) <= {name for name, system in systems.items() if system.only != "greedy"}
    greedy = [name for name, system in systems.items() if system.only == "greedy"]
    assert greedy and not set(greedy) & set(SYSTEMS)
    small = with_systems(load("demo"), ["domino", "dspark"]).train.runs
    width = from_dict(LiLiCorrConfig, small["lilicorr"].head_config).hidden_size
    assert small["domino"].head_config["gru_hidden_dim"] == width
    assert small["dspark"].head_config["markov_rank"] == small["domino"].head_config["emb_dim"] == width // 4


def test_an_extended_profile_is_decoded_without_yarn_too() -> None:
    plain = load("demo")
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=512)
    config = with_systems(replace(plain, evaluate=replace(plain.evaluate, yarn=yarn)), chosen("all"))
    systems = config.evaluate.systems
    twins = {name: systems[name] for name in systems if name.endswith(WITHOUT_YARN)}
    assert {name.removesuffix(WITHOUT_YARN) for name in twins} == set(SYSTEMS) - {"autoregressive", "dspark_sampled"}
    for name, twin in twins.items():
        assert twin == replace(systems[name.removesuffix(WITHOUT_YARN)], yarn=False, only="greedy")
    assert all(system.yarn for name, system in systems.items() if name not in twins)
    before = with_systems(plain, chosen("all")).evaluate.systems
    assert set(systems) - set(twins) == set(before)


def test_a_start_from_a_folder_does_not_fit_the_other_layout() -> None:
    config = load("demo")
    runs = config.train.runs | {"dflash": replace(config.train.runs["dflash"], start_from="./published")}
    config = replace(config, train=replace(config.train, runs=runs))
    with pytest.raises(ValueError, match="dflash starts from ./published, .* give the run domino a start of its own"):
        with_systems(config, ["domino"])


def test_a_run_of_the_profile_is_not_replaced() -> None:
    plain = load("smollm2")
    own = replace(plain.train.runs["dflash"], head="domino", head_config={"emb_dim": 5}, start_from=None)
    config = replace(plain, train=replace(plain.train, runs=plain.train.runs | {"domino": own}))
    assert with_systems(config, chosen("all")).train.runs["domino"] == own


def test_a_part_of_the_systems() -> None:
    plain = load("smollm2")
    config = with_systems(plain, chosen("dflash, domino"))
    assert config.train.runs.keys() - plain.train.runs.keys() == {"domino", "trunk_anchor_first"}
    assert config.evaluate.systems.keys() - plain.evaluate.systems.keys() == {"domino"}
    assert with_ablations(config).train.runs.keys() >= {"domino", ABLATION}
    with pytest.raises(ValueError, match="systems must be all or some of autoregressive, .*, got 'medusa'"):
        chosen("dflash,medusa")
    with pytest.raises(ValueError, match="systems need the runs dflash and lilicorr; the runs are"):
        with_systems(PipelineConfig(train=TrainConfig(runs={"dflash": plain.train.runs["dflash"]})), ["dflash"])


def test_the_option_of_the_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--profile", "tiny", "--run-dir", str(tmp_path), "--dry-run"]
    main([*arguments, "--systems", "all", "--ablations"])
    assert "evaluate    runs: not done yet" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="error: systems must be all or some of .*, got 'medusa'"):
        main([*arguments, "--systems", "medusa"])
