"""Profiles load and only override; a wrong key is named; overrides; Table 4 of the paper, literally."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from lilicorr.benchmarks import BENCHMARKS
from lilicorr.config import (
    ArgmaxConfig,
    LiLiCorrConfig,
    PipelineConfig,
    TrainConfig,
    fingerprint,
    from_dict,
    load_profile,
    to_dict,
    with_overrides,
)
from lilicorr.target import default_layer_ids, resolve_target
from pipelines.full import ABLATION, with_ablations

PROFILES = Path(__file__).parents[1] / "pipelines" / "profiles"
NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
HEADS = {"argmax": ArgmaxConfig, "lilicorr": LiLiCorrConfig}  # of the profiles; others come by --systems


def load(name: str, *overrides: str) -> PipelineConfig:
    return load_profile(name, PROFILES, list(overrides))


def test_the_profiles_of_the_project() -> None:
    assert NAMES == ["demo", "paper_4b", "paper_8b", "single_gpu", "smollm2", "tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_consistent(name: str) -> None:
    config = load(name)
    assert config.profile == name
    runs = config.train.runs
    for run_name, run in runs.items():
        assert (run.steps is None) != (run.epochs is None), f"{run_name} needs steps or epochs"
        assert run.start_from is None or list(runs).index(run.start_from) < list(runs).index(run_name)
        from_dict(HEADS[run.head], run.head_config)
    assert "autoregressive" in config.evaluate.systems
    for system in config.evaluate.systems.values():
        assert system.run is None or system.run in runs
    assert config.deploy.run in runs
    assert {"dflash", "lilicorr"} <= set(runs)
    assert config.train.batch_size % (config.train.micro_batch_size * config.train.num_workers) == 0


@pytest.mark.parametrize("name", ["tiny", "demo", "smollm2", "single_gpu"])
def test_vanilla_and_lilicorr_train_on_as_many_blocks(name: str) -> None:
    runs = load(name).train.runs
    for run in (runs["dflash"], runs["lilicorr"]):
        assert run.start_from == runs["dflash"].start_from
        assert (run.steps, run.epochs, run.schedule) == (runs["dflash"].steps, runs["dflash"].epochs, "cosine")


@pytest.mark.parametrize("name", ["tiny", "demo", "smollm2"])
def test_the_small_profiles_need_no_gpu(name: str) -> None:
    config = load(name)
    assert config.regenerate.engine == "transformers" and config.train.precision == "float32"
    gpus = (config.regenerate.gpus_per_actor, config.train.gpus_per_worker, config.deploy.gpus_per_replica)
    assert gpus == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_evaluation_sets_are_the_held_out_prompts_and_what_packages_ship(name: str) -> None:
    packaged = [set_name for set_name, benchmark in BENCHMARKS.items() if benchmark.shipped]
    assert sorted(packaged) == ["aime25_25", "gsm8k_100", "humaneval", "mt_bench"]
    sets = load(name).evaluate.sets
    assert sets[0] == "held_out" and set(sets[1:]) <= set(packaged)
    if name in ("single_gpu", "paper_4b", "paper_8b"):  # a small machine may take fewer
        assert set(sets[1:]) == set(packaged)


def test_the_tiny_profile_captures_one_of_the_two_layers_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LILICORR_CACHE", str(tmp_path))
    config = load("tiny")
    shape = AutoConfig.from_pretrained(resolve_target(config.target))
    assert (shape.model_type, shape.num_hidden_layers) == ("qwen3", 2)
    assert default_layer_ids(2, config.train.drafter.num_captured_layers or 0) == (1,)


def test_table_4() -> None:
    written = yaml.safe_load((PROFILES / "paper_8b.yaml").read_text(encoding="utf-8"))
    for values in (written, to_dict(load("paper_8b"))):  # in the file itself, not by default only
        assert values["target"]["source"] == "Qwen/Qwen3-8B"
        train = values["train"]
        assert train["drafter"]["block_size"] == 16
        assert train["drafter"]["num_candidates"] == 8
        assert train["drafter"]["num_layers"] == 5
        assert train["drafter_lr"] == 6e-4 and train["head_lr"] == 1.5e-4
        assert train["drafter_weight_decay"] == 0 and train["head_weight_decay"] == 0.01
        assert train["max_grad_norm"] == 1.0
        assert train["batch_size"] == 64 and train["max_length"] == 3072
        assert train["max_anchors"] == 512
        assert train["precision"] == "bfloat16"
        run = train["runs"]["lilicorr"]
        assert run["epochs"] == 6 and run["schedule"] == "cosine" and run["warmup_fraction"] == 0.04
        head = run["head_config"]
        assert head["factor_dim"] == 1024 and head["logit_scale"] == 8.0
        assert head["num_layers"] == 2 and head["hidden_size"] == 1024 and head["num_heads"] == 8
        assert head["hidden_size"] * head["mlp_ratio"] == 2048
        assert head["decay"] == 7.0 and head["distractor_weight"] == 1.0 and head["head_weight"] == 0.25
        assert train["runs"]["dflash"]["epochs"] == 6 and train["runs"]["dflash"]["head_config"]["decay"] == 7.0
        assert values["regenerate"]["max_new_tokens"] == 4096 and values["regenerate"]["engine"] == "vllm"
        assert values["prompts"]["source"] == "nemotron_v2"


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"tiny"}))
def test_training_looks_at_the_tau_of_its_draft_models(name: str) -> None:
    """A loss that falls says nothing of what the target accepts (z-lab/dflash issue 41)."""
    assert load(name).train.eval_steps


def test_the_two_paper_profiles_differ_by_the_target_only() -> None:
    def without_names(config: PipelineConfig) -> dict[str, Any]:
        values = to_dict(config)
        assert values.pop("profile") in ("paper_4b", "paper_8b")
        values["target"].pop("source")
        values["deploy"].pop("model_name")
        return values

    assert without_names(load("paper_4b")) == without_names(load("paper_8b"))
    assert load("paper_4b").target.source == "Qwen/Qwen3-4B"


def test_the_defaults_of_the_head_are_those_of_table_4() -> None:
    head = to_dict(load("paper_8b"))["train"]["runs"]["lilicorr"]["head_config"]
    assert from_dict(LiLiCorrConfig, head) == LiLiCorrConfig()


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown key train.drafter.blok_size; did you mean train.drafter.block_size"):
        load("tiny", "train.drafter.blok_size=8")
    with pytest.raises(ValueError, match="unknown key train.runs.trunk.step; did you mean train.runs.trunk.steps"):
        load("tiny", "train.runs.trunk.step=8")
    (tmp_path / "mine.yaml").write_text("targets: {source: random}\n")
    with pytest.raises(ValueError, match="unknown key targets; did you mean target"):
        load_profile("mine", tmp_path)


def test_an_unknown_profile_names_the_nearest_and_no_other_files(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no profile 'paper4b' in .*; did you mean paper_4b or paper_8b\? \(known prof"
    ):
        load("paper4b")
    with pytest.raises(ValueError, match=r"no profile 'nosuch' in \S+ \(known profiles: demo, paper_4b, paper_8b, "):
        load("nosuch")
    for name in ("cluster.yaml", "demos.yml", "notes.yaml"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError) as error:
        load_profile(f"{tmp_path}/demoo.yaml", PROFILES)
    known = ", ".join(NAMES)
    guess = f"did you mean demo or {tmp_path}/demos.yml? (known profiles: {known})"
    assert str(error.value) == f"no profile file {tmp_path}/demoo.yaml; {guess}"


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "mine.yml"
    own.write_text("target: {source: random}\n")
    config = load_profile(str(own), PROFILES)
    assert (config.profile, config.target.source) == ("mine", "random")
    for text, problem in (
        ("a: [1", "is not YAML: .* line 1"),
        ("[1]", r"must be a mapping, got \[1\]"),
    ):
        own.write_text(text)
        with pytest.raises(ValueError, match=f"mine.yml {problem}"):
            load_profile(str(own), PROFILES)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=many", "train.batch_size must be int, got 'many'"),
        ("train.batch_size=true", "train.batch_size must be int, got True"),
        ("train.cache_features=1", "train.cache_features must be bool, got 1"),
        ("train=3", "train. must be a mapping, got 3"),
        ("train.seed=[1", r"train.seed=\[1 is not YAML: .* line 1"),
        ("target.source", "an override has the form a.b=value"),
        ("profile.x=1", "profile.x: profile is not a section"),
    ],
)
def test_a_value_that_does_not_fit(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("tiny", override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.checkpoint_steps=0", "train.checkpoint_steps must be at least 1, got 0"),
        ("train.log_steps=0", "train.log_steps must be at least 1, got 0"),
        ("train.micro_batch_size=0", "train.micro_batch_size must be at least 1, got 0"),
        ("train.max_anchors=0", "train.max_anchors must be at least 1, got 0"),
        ("train.eval_steps=0", "train.eval_steps must be at least 1 or null, got 0"),
        ("train.head_lr=-1e-4", "train.head_lr must be at least 0, got -0.0001"),
        ("train.drafter_lr=.nan", "train.drafter_lr must be at least 0, got nan"),
        ("train.max_grad_norm=0", "train.max_grad_norm must be above 0, got 0.0"),
        ("regenerate.batch_size=0", "regenerate.batch_size must be at least 1, got 0"),
        ("regenerate.num_actors=0", "regenerate.num_actors must be at least 1, got 0"),
        ("prompts.max_conversations=0", "prompts.max_conversations must be at least 1 or null, got 0"),
        ("evaluate.bootstrap_samples=0", "evaluate.bootstrap_samples must be at least 1, got 0"),
        ("evaluate.seed=-1", "evaluate.seed must be at least 0, got -1"),
        ("evaluate.sampled_seeds=[42, -1]", "evaluate.sampled_seeds must be at least 0, got (42, -1)"),
        ("train.seed=-1", "train.seed must be at least 0, got -1"),
        ("train.min_workers=0", "train.min_workers must be at least 1 or null, got 0"),
        ("train.min_workers=2", "train.min_workers must be at most num_workers, 1, got 2"),
        (
            "deploy.yarn={factor: 0.5, original_max_position_embeddings: 128}",
            "deploy.yarn.factor must be at least 1, got 0.5",
        ),
        (
            "evaluate.systems.dflash.only=drawn",
            "evaluate.systems.dflash.only must be one of null, greedy, sampled, got 'drawn'",
        ),
        ("deploy.engine.steps_behind=2", "deploy.engine.steps_behind must be one of null, 0, 1, got 2"),
        ("deploy.port=70000", "deploy.port must be at most 65535, got 70000"),
    ],
)
def test_a_number_outside_its_limits(override: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        load("tiny", override)
    assert str(error.value) == message


def test_a_number_without_a_point_is_one() -> None:
    config = load("tiny", "train.drafter_lr=1e-4", "train.head_lr='2'")
    assert (config.train.drafter_lr, config.train.head_lr) == (1e-4, 2.0)
    with pytest.raises(ValueError, match="train.drafter_lr must be float, got 'fast'"):
        load("tiny", "train.drafter_lr=fast")


def test_overrides_reach_every_depth() -> None:
    config = load(
        "tiny",
        "train.head_lr=1",
        "evaluate.sets=[held_out, humaneval]",
        "prompts.max_chars=null",
        "train.runs.lilicorr.head_config.walk=exact",
        "train.runs.new={head: argmax, steps: 3}",
    )
    assert config.train.head_lr == 1.0 and isinstance(config.train.head_lr, float)
    assert config.evaluate.sets == ("held_out", "humaneval")
    assert config.prompts.max_chars is None
    assert config.train.runs["lilicorr"].head_config["walk"] == "exact"
    assert config.train.runs["new"].steps == 3
    assert load("tiny").train.runs.keys() == {"trunk", "dflash", "lilicorr"}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_survives_being_saved(name: str) -> None:
    config = load(name)
    assert from_dict(PipelineConfig, yaml.safe_load(yaml.safe_dump(to_dict(config)))) == config


def test_the_fingerprint_follows_content() -> None:
    first = TrainConfig()
    assert fingerprint(first, 1) == fingerprint(TrainConfig(), 1)
    assert fingerprint(first, 1) != fingerprint(dataclasses.replace(first, seed=1), 1)
    assert fingerprint(first, 1) != fingerprint(first, 2)
    assert with_overrides(first, []) == first


def test_the_ablation_keeps_the_total_weight() -> None:
    config = with_ablations(load("paper_8b"))
    run, full = config.train.runs[ABLATION], config.train.runs["lilicorr"]
    without, usual = from_dict(LiLiCorrConfig, run.head_config), from_dict(LiLiCorrConfig, full.head_config)
    assert without.distractor_weight == 0 and usual.distractor_weight == 1
    assert without.head_weight == usual.head_weight * (1 + usual.distractor_weight) == 0.5
    assert dataclasses.replace(run, head_config=full.head_config) == full
    assert config.evaluate.systems[ABLATION].run == ABLATION
    bare = dataclasses.replace(config, train=TrainConfig())
    with pytest.raises(ValueError, match="ablations need a run named lilicorr"):
        with_ablations(bare)
