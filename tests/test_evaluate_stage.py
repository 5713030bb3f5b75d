"""pipelines/evaluate.py: what it reads, measures and writes, and what it sets up around the measuring."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from lilicorr import throughput
from lilicorr.checkpoint import save_draft_model
from lilicorr.config import PipelineConfig, SystemConfig, TargetConfig, TrainConfig, from_dict
from lilicorr.evaluate import SetRunner
from lilicorr.prompts import Conversation, write_conversations
from lilicorr.provenance import sha256_tree, write_json
from lilicorr.results import read_results
from lilicorr.tables import tables_text
from lilicorr.target import default_layer_ids, load_target
from pipelines import evaluate as stage
from pipelines.prepare import describe_target
from test_evaluate import ask, draft_model


def test_measuring_has_a_thread_on_every_core_and_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(*_: Any) -> dict[str, Any]:
        seen.append(torch.get_num_threads())
        raise ValueError("a set is missing")

    monkeypatch.setattr(stage, "measure_systems", measure)
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
    try:
        with pytest.raises(ValueError, match="a set is missing"):
            stage.measure(PipelineConfig())
        assert seen == [len(os.sched_getaffinity(0))]
        assert torch.get_num_threads() == len(os.sched_getaffinity(0)) + 1
    finally:
        torch.set_num_threads(before)


def test_gpus_of_the_profile_decide_where_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "measure", lambda _: {"where": "here"})
    monkeypatch.setattr(stage, "measure_on_cluster", lambda _, num_gpus: {"where": num_gpus})
    found = [stage.run(PipelineConfig(train=TrainConfig(gpus_per_worker=gpus)))["where"] for gpus in (0.0, 0.5)]
    assert found == ["here", 0.5]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    """A run directory behind training: one LiLiCorr checkpoint of a random target, three held-out prompts."""
    monkeypatch.setenv("LILICORR_CACHE", str(tmp_path / "cache"))
    config = from_dict(
        PipelineConfig,
        {
            "profile": "tiny",
            "run_dir": str(tmp_path),
            "target": {"source": "random"},
            "train": {"runs": {"ours": {"head": "lilicorr", "steps": 1}}, "drafter": {"num_layers": 1}},
            "evaluate": {
                "sets": ["held_out"],
                "max_prompts": 2,
                "max_new_tokens": 8,
                "bootstrap_samples": 20,
                "systems": {
                    "autoregressive": {},
                    "lilicorr": {"run": "ours"},
                    "same drafter": {"run": "ours", "head": "argmax", "only": "greedy"},
                    "drawn": {"run": "ours", "head_config": {"contract": "sampled"}, "only": "sampled"},
                },
            },
        },
    )
    description = describe_target(TargetConfig(source="random"))
    write_json(config.directory / "prepare" / "target.json", description)
    asked = [Conversation(f"{i:032x}", ask("", f"say {i}").messages, "test", "test", "") for i in range(3)]
    write_conversations(config.directory / "prepare" / "held_out.parquet", asked)
    target = load_target(config.target, layer_ids=default_layer_ids(description["num_layers"], 1))
    save_draft_model(config.directory / "train" / "ours" / "final", draft_model(target), {})
    return config


def test_the_stage_evaluates_trained_runs(trained: PipelineConfig, monkeypatch: pytest.MonkeyPatch):
    config = trained
    summary = stage.measure(config)
    results = json.loads((config.directory / "evaluate" / "results.json").read_text())
    assert results.keys() == {"systems", "sets", "checkpoints", "provenance"}
    final = sha256_tree(config.directory / "train" / "ours" / "final")
    assert results["checkpoints"] == {"lilicorr": final, "same drafter": final}
    assert list(results["systems"]) == ["autoregressive", "lilicorr", "same drafter"]
    assert results["systems"]["lilicorr"]["held_out"]["matches_autoregressive"] == 3
    assert results["sets"]["held_out"]["data"]["prompts"] == 3  # max_prompts limits benchmarks only
    assert summary["tau"]["lilicorr"]["held_out"] == results["systems"]["lilicorr"]["held_out"]["tau"]
    assert (config.directory / "evaluate" / "tau.png").is_file()
    assert not (config.directory / "evaluate" / "sampled.json").exists()
    monkeypatch.setattr(SetRunner, "run", lambda *_: pytest.fail("the set was done"))
    assert stage.measure(config) == summary
    wider = dataclasses.replace(config, target=dataclasses.replace(config.target, dtype="float64"))
    with pytest.raises(pytest.fail.Exception, match="the set was done"):
        stage.measure(wider)  # another type of the weights is decoded anew
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception, match="the set was done"):
        patch.setitem(stage.VERSIONS, "evaluate", 99)
        stage.measure(config)  # and so is what an older version of the stage measured

    weights = config.directory / "train" / "ours" / "final" / "model.safetensors"
    whole, measured = weights.read_bytes(), (config.directory / "evaluate" / "results.json").read_bytes()
    tensors = {name: tensor for name, tensor in load(whole).items() if name != "norm.weight"}
    weights.write_bytes(save(tensors))
    with pytest.raises(ValueError, match=r"model\.safetensors: 1 tensors are missing: norm\.weight"):
        stage.measure(config)
    assert (config.directory / "evaluate" / "results.json").read_bytes() == measured
    weights.write_bytes(whole)
    assert stage.measure(config) == summary  # what was measured before still counts


def test_the_stage_decodes_again_for_every_seed(trained: PipelineConfig, monkeypatch: pytest.MonkeyPatch):
    config, summary = trained, stage.measure(trained)
    seeded = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, sampled_seeds=(1, 2)))
    assert stage.measure(seeded)["tau"] == summary["tau"]
    spread = json.loads((config.directory / "evaluate" / "sampled.json").read_text())
    assert spread["seeds"] == [1, 2] and list(spread["systems"]) == ["autoregressive", "lilicorr", "drawn"]
    greedy = json.loads((config.directory / "evaluate" / "results.json").read_text())["checkpoints"]
    assert greedy and greedy.items() <= spread["checkpoints"].items() and spread["checkpoints"].keys() - greedy.keys()
    taus = []
    for seed in (1, 2):
        one = json.loads((config.directory / "evaluate" / f"sampled_{seed}.json").read_text())
        assert one["systems"]["lilicorr"]["held_out"]["matches_autoregressive"] == 3  # a point mass, so the same draws
        assert one["provenance"]["config"]["evaluate"]["temperature"] == 1.0
        taus.append(one["systems"]["drawn"]["held_out"]["tau"])
    found = spread["systems"]["drawn"]["held_out"]
    assert found["tau"] == pytest.approx(sum(taus) / 2)
    assert found["tau_std"] == pytest.approx(abs(taus[0] - taus[1]) / 2**0.5)
    monkeypatch.setattr(SetRunner, "run", lambda *_: pytest.fail("the set was done"))
    assert stage.measure(seeded) == summary
    folder = config.directory / "evaluate"
    greedy = json.loads((folder / "results.json").read_text())["sets"]["held_out"]["fingerprint"]
    assert spread["sets"]["held_out"].keys() == {"fingerprint", "greedy_fingerprint"}
    assert spread["sets"]["held_out"]["greedy_fingerprint"] == greedy
    assert spread["provenance"]["config"]["evaluate"]["sampled_seeds"] == [1, 2]
    assert read_results(folder).sampled["systems"] == spread["systems"]
    assert stage.measure(config) == summary and (folder / "sampled.json").is_file()  # without seeds it still belongs


def test_the_stage_decodes_at_every_concurrency_once(trained: PipelineConfig, monkeypatch: pytest.MonkeyPatch):
    config = with_evaluate(trained, concurrencies=(2,), concurrent_sets=("held_out",), sampled_seeds=(1,))
    summary, folder = stage.measure(config), config.directory / "evaluate"
    systems = json.loads((folder / "results.json").read_text())["systems"]
    for system, by_set in systems.items():
        values = by_set["held_out"]["by_concurrency"]["2"][""]
        assert (values["rows"], values["num_prompts"], values["matches_autoregressive"]) == (2, 3, 3), system
        assert values["tau"] == by_set["held_out"]["tau"] and values["tokens_per_s"] > 0
    assert "by_concurrency" not in (folder / "sampled_1.json").read_text()
    printed = tables_text("13", read_results(folder))
    assert "| held_out | 2 |" in printed and "| held_out | 1 |" in printed
    monkeypatch.setattr(throughput, "decode_together", lambda *_: pytest.fail("it was decoded at once"))
    monkeypatch.setattr(SetRunner, "run", lambda *_: pytest.fail("the set was done"))
    assert stage.measure(config) == stage.measure(trained) == summary
    assert json.loads((folder / "results.json").read_text())["systems"] == systems
    with pytest.raises(pytest.fail.Exception, match="it was decoded at once"):
        stage.measure(with_evaluate(config, concurrencies=(2, 3)))


def test_greedy_results_outlive_a_change_of_what_is_sampled(trained: PipelineConfig, monkeypatch: pytest.MonkeyPatch):
    summary = stage.measure(trained)
    monkeypatch.setattr(SetRunner, "run", lambda *_: pytest.fail("the set was done"))
    assert stage.measure(with_evaluate(trained, sampled_temperature=0.7)) == summary
    more = trained.evaluate.systems | {"new": SystemConfig("ours", head_config={"walk": "exact"}, only="sampled")}
    assert stage.measure(with_evaluate(trained, systems=more)) == summary
    with pytest.raises(pytest.fail.Exception, match="the set was done"):
        stage.measure(with_evaluate(trained, seed=7))  # that of the intervals
    more["lilicorr"] = SystemConfig("ours", head_config={"walk": "exact"})
    with pytest.raises(pytest.fail.Exception, match="the set was done"):
        stage.measure(with_evaluate(trained, systems=more))


def test_sampled_figures_beside_other_greedy_ones_are_refused_and_removed(
    trained: PipelineConfig, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    folder = trained.directory / "evaluate"
    seeded = with_evaluate(trained, sampled_seeds=(1,))
    stage.measure(seeded)
    sampled = (folder / "sampled.json").read_bytes()
    shorter = with_evaluate(trained, max_new_tokens=4)
    stage.measure(shorter)
    assert not (folder / "sampled.json").exists()
    assert "held_out: prompts, weights, code or settings changed" in caplog.text
    assert "results.json has since been made anew on held_out" in caplog.text
    (folder / "sampled.json").write_bytes(sampled)  # as after a kill between the two
    with pytest.raises(ValueError, match=r"sampled\.json: results\.json has since been made anew on held_out; run"):
        read_results(folder)
    write_json(folder / "sampled.json", {"seeds": [1], "systems": {}})
    with pytest.raises(ValueError, match="an older version made it, without fingerprints"):
        read_results(folder)
    stage.measure(with_evaluate(shorter, sampled_seeds=(1,)))
    assert read_results(folder).sampled is not None


def with_evaluate(config: PipelineConfig, **changes: Any) -> PipelineConfig:
    return dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, **changes))


def test_systems_that_cannot_be(trained: PipelineConfig):
    config = trained
    target = load_target(config.target, layer_ids=default_layer_ids(2, 1))
    for name, system in (("other", SystemConfig()), ("autoregressive", SystemConfig(run="ours"))):
        config.evaluate.systems[name] = system
        with pytest.raises(ValueError, match=f"systems.{name}.run"):
            stage.load_systems(config, target)
        config.evaluate.systems.pop(name)
