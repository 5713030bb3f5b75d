"""Evaluation: runs of tiny random systems, resuming, what must agree, and the pipeline's stage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from lilicorr import decode, evaluate
from lilicorr.acceptance import Answer
from lilicorr.chat import ChatError
from lilicorr.checkpoint import save_draft_model
from lilicorr.config import DrafterConfig, EvaluateConfig, PipelineConfig, SystemConfig, TargetConfig, from_dict
from lilicorr.decode import SamplingParams
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.evaluate import AUTOREGRESSIVE, Prompt, SetRunner, System, print_table, run_sets
from lilicorr.prompts import Conversation, write_conversations
from lilicorr.provenance import write_json
from lilicorr.tables import read_results
from lilicorr.target import Target, default_layer_ids, load_target
from lilicorr.tiny import byte_tokenizer
from pipelines import evaluate as stage
from pipelines.prepare import describe_target

HEAD_CONFIG = {"hidden_size": 16, "num_heads": 2, "factor_dim": 8}
CONFIG = EvaluateConfig(max_new_tokens=12, bootstrap_samples=50)
COUNTS = ("num_dropped", "num_refused", "num_limited")


@pytest.fixture
def chat_target(target_factory: Callable[..., Target]) -> Target:
    """A random target with the byte-level tokenizer."""
    target = target_factory(num_layers=2, num_captured=1, vocab=264)
    target.tokenizer = byte_tokenizer()
    return target


def draft_model(target: Target, head: str = "lilicorr") -> DraftModel:
    torch.manual_seed(1)
    config = DrafterConfig(num_layers=1, block_size=4, num_candidates=3)
    spec = block_spec(config, target.config, target.mask_token_id)
    head_config = HEAD_CONFIG if head == "lilicorr" else {}
    model = build_draft_model(drafter_shape(config, target.config), spec, head, head_config, target)
    return model.to(target.embed.dtype)


def ask(name: str, *turns: str) -> Prompt:
    return Prompt(name, [{"role": "user", "content": text} for text in turns])


def render(messages: list[dict[str, str]]) -> list[int]:
    return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode())


def run(target: Target, sets: dict[str, list[Prompt]], **changes: Any) -> dict[str, Any]:
    arguments = dict(
        draft_models={"dflash": draft_model(target, "argmax"), "lilicorr": draft_model(target)},
        config=CONFIG,
        render=render,
        identity={"target": "a"},
        previous={},
        save=lambda results: None,
    )
    return run_sets(target, sets=sets, **(arguments | changes))


def test_results_have_every_key_and_are_json(chat_target: Target, capsys: pytest.CaptureFixture[str]):
    results = run(chat_target, {"held_out": [ask("a", "one"), ask("b", "two")], "chat": [ask("c", "one", "more")]})
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    keys = {"num_prompts", "num_blocks", "num_tokens", "matches_autoregressive"}
    figures = {"tau", "per_slot", "tokens_per_s", "speedup", "oracle_prefix", "selected_prefix", "top1_prefix"}
    keys |= figures | {f"{name}_ci95" for name in figures}
    keys |= {"drafted_width", "drafted_per_block"}
    gains = {"tau_gain_over_dflash", "tau_gain_over_dflash_percent"}
    gains |= {f"{name}_ci95" for name in gains}
    assert list(results["systems"]) == [AUTOREGRESSIVE, "dflash", "lilicorr"]
    for system, by_set in results["systems"].items():
        for name, values in by_set.items():
            expected = keys | (set() if system == AUTOREGRESSIVE else {"tau_gain_over"})
            assert values.keys() == (expected | gains if system == "lilicorr" else expected), (system, name)
            assert values["matches_autoregressive"] == values["num_prompts"] == (2 if name == "held_out" else 1)
    plain, ours = (results["systems"][system]["held_out"] for system in (AUTOREGRESSIVE, "lilicorr"))
    over = ours["tau_gain_over"]
    assert over.keys() == {"dflash"} and over["dflash"]["gain"] == ours["tau_gain_over_dflash"]
    assert over["dflash"]["ci95"] == ours["tau_gain_over_dflash_ci95"]
    assert (plain["drafted_width"], ours["drafted_width"], ours["drafted_per_block"]) == (0, 3, 3.0)
    assert plain["tau"] == 1.0 and plain["speedup"] == 1.0 and plain["oracle_prefix"] is None
    assert len(ours["per_slot"]) == 3 and ours["num_tokens"] == plain["num_tokens"]
    assert ours["oracle_prefix"] >= max(ours["selected_prefix"], ours["top1_prefix"])
    assert set(results["sets"]["chat"]) == {"fingerprint", "num_turns", *COUNTS}
    assert results["sets"]["chat"]["num_turns"] == 2

    print_table(results)
    printed = capsys.readouterr().out
    assert "lilicorr (3)" in printed and f"{ours['tau']:.2f}" in printed


def test_figures_by_category(chat_target: Target):
    prompts = [dataclasses.replace(ask(str(i), f"say {i}"), category="ab"[i % 2]) for i in range(3)]
    prompts.append(dataclasses.replace(ask("long", "x" * 600), category="b"))  # dropped: counts in no category
    results = run(chat_target, {"chat": prompts, "plain": [ask("p", "one")]})
    cell = results["systems"]["lilicorr"]["chat"]
    assert {name: kind["num_prompts"] for name, kind in cell["by_category"].items()} == {"a": 2, "b": 1}
    assert "by_category" not in results["systems"]["lilicorr"]["plain"]
    alone = run(chat_target, {"chat": prompts[1:2]})["systems"]["lilicorr"]["chat"]
    assert cell["by_category"]["b"]["tau"] == alone["tau"] == alone["by_category"]["b"]["tau"]


def test_turns_are_decoded_in_order_with_the_targets_own_reply_as_history(chat_target: Target):
    seen: list[list[dict[str, str]]] = []

    def spy(messages: list[dict[str, str]]) -> list[int]:
        seen.append([dict(message) for message in messages])
        return render(messages)

    prompt = ask("a", "first", "second")
    prompt.messages.insert(0, {"role": "system", "content": "be brief"})
    run(chat_target, {"chat": [prompt]}, render=spy)
    assert [message["role"] for message in seen[0]] == ["system", "user"]
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "user"]
    params = SamplingParams(CONFIG.max_new_tokens, stop_ids=chat_target.eos_ids)
    reply = System(chat_target, None).answer(render(seen[0]), params).token_ids
    assert seen[1][2]["content"] == chat_target.tokenizer.decode(reply, skip_special_tokens=True)
    assert len(prompt.messages) == 3  # the prompt itself is left as it was


def test_a_killed_run_goes_on_with_the_first_set_that_is_not_done(chat_target: Target, monkeypatch: pytest.MonkeyPatch):
    sets = {"one": [ask("a", "x")], "two": [ask("b", "y")]}
    saved: list[dict[str, Any]] = []

    def save_and_die(results: dict[str, Any]) -> None:
        saved.append(json.loads(json.dumps(results)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(chat_target, sets, save=save_and_die)
    decoded: list[str] = []
    original = SetRunner.run

    def counted(self: SetRunner, prompts: list[Prompt]) -> dict[str, Any]:
        decoded.append(self.name)
        return original(self, prompts)

    monkeypatch.setattr(SetRunner, "run", counted)
    results = run(chat_target, sets, previous=saved[0])
    assert decoded == ["two"]
    assert results["systems"]["lilicorr"]["one"] == saved[0]["systems"]["lilicorr"]["one"]
    assert results["systems"]["lilicorr"].keys() == {"one", "two"}
    again = run(chat_target, sets, previous=results)
    assert decoded == ["two"] and again == results

    saved.clear()
    with pytest.raises(KeyboardInterrupt):  # what is behind a set that is measured is not lost with it
        run(chat_target, {"new": [ask("c", "z")], **sets}, previous=results, save=save_and_die)
    assert list(saved[0]["sets"]) == ["new", "one", "two"] and decoded == ["two", "new"]
    assert saved[0]["systems"]["lilicorr"]["two"] == results["systems"]["lilicorr"]["two"]

    others = dict(
        prompts=dict(sets={**sets, "one": [ask("a", "changed")]}),
        weights=dict(identity={"target": "b"}),
        settings=dict(config=EvaluateConfig(max_new_tokens=11, bootstrap_samples=50)),
    )
    for name, change in others.items():
        decoded.clear()
        run(chat_target, change.pop("sets", sets), previous=results, **change)
        assert decoded == (["one"] if name == "prompts" else ["one", "two"]), name


class Corrupted(System):
    """A system with one wrong token."""

    def answer(self, prompt_ids: list[int], params: SamplingParams) -> Answer:
        answer = super().answer(prompt_ids, params)
        answer.token_ids[5] += 1
        return answer


def test_a_differing_greedy_output_is_an_error_in_exact_dtypes(chat_target: Target):
    systems = {AUTOREGRESSIVE: System(chat_target, None), "broken": Corrupted(chat_target, draft_model(chat_target))}
    runner = SetRunner("chat", chat_target, systems, CONFIG, render)
    prompt_ids = render(ask("q", "one").messages)
    expected = systems[AUTOREGRESSIVE].answer(prompt_ids, runner.params).token_ids
    prefix = torch.tensor([prompt_ids + expected[:5]])
    best = chat_target.logits(chat_target.forward(prefix).hidden[0, -1]).sort(descending=True).values
    with pytest.raises(RuntimeError) as error:
        runner.run([ask("q", "one")])
    for part in ("broken", "chat", "q (turn 1)", f"token 5 is {expected[5] + 1}, not {expected[5]}"):
        assert part in str(error.value)
    assert f"{float(best[0] - best[1]):.3g} apart" in str(error.value)

    runner = SetRunner("chat", chat_target, systems, CONFIG, render)
    runner.must_match = False
    found = runner.run([ask("q", "one"), ask("r", "two")])
    assert found["broken"]["matches_autoregressive"] == 0
    assert found[AUTOREGRESSIVE]["matches_autoregressive"] == 2


@pytest.mark.parametrize(
    ("dtype", "temperature", "exact"),
    [(torch.float32, 0.0, True), (torch.float64, 0.0, True), (torch.bfloat16, 0.0, False), (torch.float32, 1.0, False)],
)
def test_equality_is_demanded_of_greedy_decoding_in_exact_dtypes(
    target_factory: Callable[..., Target], dtype: torch.dtype, temperature: float, exact: bool
):
    config = EvaluateConfig(max_new_tokens=4, temperature=temperature)
    assert SetRunner("chat", target_factory(dtype=dtype), {}, config, render).must_match is exact


def test_prompts_without_room_are_dropped_and_counted(chat_target: Target):
    long = ask("long", "x" * 600)
    late = ask("late", "short", "x" * 600)
    results = run(chat_target, {"chat": [long, ask("a", "one"), late]})
    assert results["systems"]["lilicorr"]["chat"]["num_prompts"] == 2
    report = {key: results["sets"]["chat"][key] for key in ("num_turns", "num_dropped")}
    assert report == {"num_turns": 2, "num_dropped": 2}
    with pytest.raises(ValueError, match="none of 1 prompts.* refuses 0, the context of 512 .*max_new_tokens 12"):
        run(chat_target, {"chat": [long]})


def test_prompts_that_the_template_refuses_are_left_out_and_counted(chat_target: Target):
    def choosy(messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "system":
            raise ChatError("no system turns")
        return render(messages)

    odd = Prompt("odd", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}])
    results = run(chat_target, {"chat": [odd, ask("a", "one")]}, render=choosy)
    report = {key: results["sets"]["chat"][key] for key in ("num_turns", "num_dropped", "num_refused")}
    assert report == {"num_turns": 1, "num_dropped": 0, "num_refused": 1}
    with pytest.raises(ValueError, match="none of 1 prompts can be asked; the chat template refuses 1, "):
        run(chat_target, {"chat": [odd]}, render=choosy)


def test_recording_is_not_in_the_measured_time(chat_target: Target, monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    for module in (decode, evaluate):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            clock[0] += seconds
            return function(*arguments)

        return slow

    monkeypatch.setattr(evaluate, "candidates", taking(100.0, evaluate.candidates))
    monkeypatch.setattr(chat_target, "forward", taking(1.0, chat_target.forward))
    answer = System(chat_target, draft_model(chat_target)).answer([1, 2, 3], SamplingParams(9))
    assert len(answer.blocks) == answer.num_blocks >= 2
    assert answer.seconds == 1 + answer.num_blocks  # one forward for the prompt, one for every block
    assert clock[0] == answer.seconds + 100 * answer.num_blocks


def test_recorded_blocks_add_up_to_the_answer(chat_target: Target):
    system = System(chat_target, draft_model(chat_target, "argmax"))
    answer = system.answer([1, 2, 3], SamplingParams(40))
    starts = [block.start for block in answer.blocks]
    accepted = [block.num_accepted for block in answer.blocks]
    assert starts == [1 + sum(accepted[:index]) + index for index in range(len(starts))]
    for block in answer.blocks[:-1]:
        committed = answer.token_ids[block.start : block.start + 3]
        assert block.drafts[: block.num_accepted] == committed[: block.num_accepted]
        assert [ids[0] for ids in block.candidates] == block.drafts  # of the argmax head
    sums = system.sums([answer])
    assert sums["selected_prefix"] == sums["accepted"].sum() == sums["top1_prefix"]


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
                    "same drafter": {"run": "ours", "head": "argmax"},
                    "drawn": {"run": "ours", "head_config": {"contract": "sampled"}, "sampled_only": True},
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
    assert results.keys() == {"systems", "sets", "provenance"}
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
    assert spread["seeds"] == [1, 2] and "drawn" in spread["systems"]
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


def test_greedy_results_outlive_a_change_of_what_is_sampled(trained: PipelineConfig, monkeypatch: pytest.MonkeyPatch):
    summary = stage.measure(trained)
    monkeypatch.setattr(SetRunner, "run", lambda *_: pytest.fail("the set was done"))
    assert stage.measure(with_evaluate(trained, sampled_temperature=0.7)) == summary
    more = trained.evaluate.systems | {"new": SystemConfig("ours", head_config={"walk": "exact"}, sampled_only=True)}
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
