"""Evaluation: runs of tiny random systems, resuming, what must agree, and the pipeline's stage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lilicorr import decode, evaluate
from lilicorr.acceptance import Answer
from lilicorr.chat import ChatError
from lilicorr.config import DrafterConfig, EvaluateConfig
from lilicorr.decode import SamplingParams
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.evaluate import AUTOREGRESSIVE, Prompt, SetRunner, System, run_sets
from lilicorr.summary import print_table
from lilicorr.target import Target
from lilicorr.tiny import byte_tokenizer

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
    keys |= {"drafted_width", "drafted_per_block", "by_length"}
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
    assert (
        "lilicorr (3)" in printed
        and "held_out (2)" in printed
        and "chat (1)" in printed
        and f"{ours['tau']:.2f}" in printed
    )


def test_figures_by_category(chat_target: Target):
    prompts = [dataclasses.replace(ask(str(i), f"say {i}"), category="ab"[i % 2]) for i in range(3)]
    prompts.append(dataclasses.replace(ask("long", "x" * 600), category="b"))  # dropped: counts in no category
    results = run(chat_target, {"chat": prompts, "plain": [ask("p", "one")]})
    cell = results["systems"]["lilicorr"]["chat"]
    assert {name: kind["num_prompts"] for name, kind in cell["by_category"].items()} == {"a": 2, "b": 1}
    assert "by_category" not in results["systems"]["lilicorr"]["plain"]
    alone = run(chat_target, {"chat": prompts[1:2]})["systems"]["lilicorr"]["chat"]
    assert cell["by_category"]["b"]["tau"] == alone["tau"] == alone["by_category"]["b"]["tau"]


def test_figures_by_length_of_the_input(chat_target: Target):
    """A conversation counts under its longest input; the figures of a class are those of its prompts alone."""
    chat_target.lm_head[70:72] *= 8  # so that an untrained drafter is right now and then
    short = [ask("a", "x" * 20), ask("b", "y" * 50)]
    long = [ask("c", "z" * 90), ask("d", "one", "w" * 60)]
    lengths = [len(render(prompt.messages)) for prompt in [*short, *long[:1]]]
    assert max(lengths[:2]) <= 64 < lengths[2] <= 128
    results = run(chat_target, {"chat": [long[0], *short, long[1]]})
    cell = results["systems"]["lilicorr"]["chat"]
    assert [(name, kind["num_prompts"]) for name, kind in cell["by_length"].items()] == [("64", 2), ("128", 2)]
    taus = []
    for name, prompts in (("64", short), ("128", long)):
        alone, found = run(chat_target, {"chat": prompts})["systems"]["lilicorr"]["chat"], cell["by_length"][name]
        assert found["tau"] == alone["tau"] and found["tau_ci95"][0] <= found["tau"] <= found["tau_ci95"][1]
        taus.append(found["tau"])
    assert taus[0] != taus[1]


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
