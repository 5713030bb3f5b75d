"""Bad input through the stages themselves: a clear error or a counted drop, and nothing that was done is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from fake_generator import ReplayGenerator
from lilicorr.config import EvaluateConfig, PipelineConfig, PromptConfig, RegenerateConfig, TargetConfig
from lilicorr.prompts import read_conversations
from lilicorr.tiny import NUM_ROWS, byte_tokenizer, tiny_target_folder
from pipelines import full, regenerate
from pipelines.shard_queue import ShardQueue
from pipelines.stage import MARKER, Stage, drive, find, read_marker

PREPARE, REGENERATE = (find(full.STAGES, name) for name in ("prepare", "regenerate"))
GOOD = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(40)]
LONG = {"messages": [{"role": "user", "content": "x" * 400_000}]}
WITHHELD = {"messages": [{"role": "user", "content": None}]}
ANSWERED = {"messages": [{"role": "user", "content": "ends here"}, {"role": "assistant", "content": "in an answer"}]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    return TargetConfig(source=str(tiny_target_folder(tmp_path_factory.mktemp("target") / "random")))


@pytest.fixture
def config(tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    """Good prompts for a random target; shards are made in this process, by a generator with a context of 1,000."""

    def run_on_ray(work: regenerate.Work) -> None:
        work.attempts.mkdir(parents=True)
        regenerate.GeneratorActor(work, ShardQueue(len(work.shards))).work_off(0)

    monkeypatch.setattr(regenerate, "run_on_ray", run_on_ray)
    monkeypatch.setattr(regenerate, "make_engine", make_replay)
    return PipelineConfig(
        profile="p",
        run_dir=str(tmp_path / "runs"),
        target=target,
        prompts=with_rows(tmp_path / "good.jsonl", GOOD),
        regenerate=RegenerateConfig(engine="transformers", max_new_tokens=12, shard_size=8, max_dead_fraction=0.1),
        evaluate=EvaluateConfig(sets=("held_out",)),
    )


def make_replay(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, ReplayGenerator]:
    return byte_tokenizer(), ReplayGenerator()


def with_rows(path: Path, rows: list[dict[str, Any]], **changes: Any) -> PromptConfig:
    """A JSON Lines file of `rows` as the source."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PromptConfig(source=str(path), held_out_fraction=0.3, **changes)


def run(config: PipelineConfig, *stages: Stage) -> None:
    drive(stages, config)


def outputs(config: PipelineConfig) -> dict[str, bytes]:
    """Every file of the stages by its name, but for what says when and how they ran."""
    folders = [config.directory / stage.name for stage in (PREPARE, REGENERATE)]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    return {str(path): path.read_bytes() for path in files}


def refused(config: PipelineConfig, bad: PipelineConfig, message: str) -> None:
    """`bad` is refused with `message` after `config` was carried out, whose outputs stay as they are and are used."""
    run(config, PREPARE, REGENERATE)
    before, marker = outputs(config), read_marker(config, "regenerate")
    assert any("/shards/" in path for path in before)
    with pytest.raises(ValueError, match=message):
        run(bad, PREPARE, REGENERATE)
    assert outputs(config) == before
    run(config, PREPARE, REGENERATE)
    assert outputs(config) == before and read_marker(config, "regenerate") == marker


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", r"empty\.jsonl is empty"),
        ("empty.parquet", b"", r"empty\.parquet is empty"),
        ("cut.json", json.dumps(GOOD).encode()[:-20], r"cut\.json byte \d+: the JSON array is cut off"),
    ],
)
def test_a_broken_prompt_file(config: PipelineConfig, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    refused(config, replace(config, prompts=PromptConfig(source=str(tmp_path / name))), message)


def test_a_missing_target_folder(config: PipelineConfig, tmp_path: Path) -> None:
    bad = replace(config, target=TargetConfig(source=str(tmp_path / "nowhere")))
    refused(config, bad, r"target folder .*/nowhere has no config\.json")


@pytest.mark.parametrize("mask_token_id", [NUM_ROWS, -1])
def test_a_mask_token_outside_the_vocabulary(config: PipelineConfig, mask_token_id: int) -> None:
    bad = replace(config, target=replace(config.target, mask_token_id=mask_token_id))
    refused(config, bad, rf"mask_token_id {mask_token_id} is outside the target's {NUM_ROWS} embedding rows")


def test_rows_that_are_no_prompts_are_counted_and_an_answer_at_the_end_is_left_out(
    config: PipelineConfig, tmp_path: Path
) -> None:
    rows = [*GOOD, WITHHELD, ANSWERED, LONG]
    run(replace(config, prompts=with_rows(tmp_path / "rows.jsonl", rows, max_chars=1000)), PREPARE)
    folder = config.directory / "prepare"
    counts = json.loads((folder / "counts.json").read_text())
    assert counts["rows"] == 43 and counts["train"] + counts["held_out"] == 41
    assert (counts["dropped_content_withheld"], counts["dropped_too_long"]) == (1, 1)
    kept = [*read_conversations(folder / "prompts.parquet"), *read_conversations(folder / "held_out.parquet")]
    assert [{"role": "user", "content": "ends here"}] in [conversation.messages for conversation in kept]
    assert {message["role"] for conversation in kept for message in conversation.messages} == {"user"}


def test_a_turn_that_the_context_cannot_hold_is_a_counted_dead_letter(config: PipelineConfig, tmp_path: Path) -> None:
    """Without a limit on characters the long turn is a prompt, and all others are answered beside it."""
    prompts = replace(with_rows(tmp_path / "rows.jsonl", [*GOOD, LONG]), held_out_fraction=0.0)
    long = replace(config, prompts=prompts, evaluate=EvaluateConfig(sets=()))
    run(long, PREPARE, REGENERATE)
    summary = json.loads((config.directory / "regenerate" / "summary.json").read_text())
    assert (summary["planned"], summary["ok"], summary["dead"]) == (41, 40, 1)
    assert summary["dead_by_error"] == {"PromptTooLong": 1}
