"""The decode bench: its rows, and that it measures nothing before the answers agree."""

from __future__ import annotations

import pytest
from toys import random_prompts, toy_draft_model, toy_target

from benches.decode import TRANSFORMERS, Run, Setup, check, measure, stage_rows, systems
from lilicorr.decode import SamplingParams


@pytest.fixture
def setup() -> Setup:
    """Three prompts, answers of up to six tokens, one and two at once."""
    target = toy_target(vocab=67)
    draft_models = {"draft": toy_draft_model(target, "argmax")}
    return Setup(target, draft_models, random_prompts(3, vocab=60), SamplingParams(6, stop_ids=(7,)), (1, 2), 2)


def test_rows_of_every_system(setup: Setup) -> None:
    rows = measure(setup)
    names = [("transformers", 1), *((name, c) for name in ("autoregressive", "draft") for c in (1, 2))]
    assert [(row["system"], row["concurrency"]) for row in rows] == names
    assert len({row["num_tokens"] for row in rows}) == 1 and rows[0]["tau"] is None and rows[1]["tau"] == 1.0
    for row in rows:
        assert 0 < row["tokens_per_s"]["low"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["high"]
    stages = stage_rows(setup)
    assert set(stages[1]["cpu_ms"]) == {
        *("target", "target lm_head", "drafter and lm_head", "head", "context", "rest"),
    }
    assert "propose" not in vars(setup.draft_models["draft"].head)  # the timers are gone


def test_nothing_is_measured_where_answers_differ(setup: Setup) -> None:
    runs = systems(setup)
    answers = runs[TRANSFORMERS, 1]().answers
    runs["draft", 2] = lambda: Run([answers[0], answers[1][:-1], answers[2]], 1.0, 1.0, None)
    with pytest.raises(RuntimeError, match="draft at 2 answers prompt 1 differently from generate"):
        check(setup, runs)
