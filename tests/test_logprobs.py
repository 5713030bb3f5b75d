"""Log-probabilities: tables, what is read from them, and those of the reference decoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from brute_force import check_logprobs
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.logprobs import MAX_LOGPROBS, TokenLogprobs, logprob_table, read_logprobs
from lilicorr.target import Target
from test_decode import PROMPT, random_draft_model


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    """Five layers in fp64."""
    return target_factory(num_layers=5)


def test_a_report_is_likeliest_first_and_then_by_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -torch.inf]])
    table = logprob_table(logits, torch.tensor([4]))
    (report,) = read_logprobs(table.tolist(), [4], 3)
    law = logits[0].log_softmax(-1)
    assert report == TokenLogprobs(4, float(law[4]), [(1, float(law[1])), (3, float(law[3])), (2, float(law[2]))])
    assert read_logprobs(table.tolist(), [4], 0)[0].top == []
    assert len(read_logprobs(table.tolist(), [4], 20)[0].top) == 5
    # two logits of different size whose log-probabilities are rounded to the same number
    close = torch.tensor([[1.0, 30.0, 3e-7, 4e-7]])
    (report,) = read_logprobs(logprob_table(close, torch.tensor([0])).tolist(), [0], 4)
    assert [token for token, _ in report.top] == [1, 0, 2, 3] and report.top[2][1] == report.top[3][1]


def test_a_table_holds_all_that_may_be_asked_for() -> None:
    logits, token_ids = torch.randn(2, 3, 100), torch.randint(100, (2, 3))
    table = logprob_table(logits, token_ids)
    assert table.shape == (2, 3, 1 + 2 * MAX_LOGPROBS)
    law = logits.log_softmax(-1)
    torch.testing.assert_close(table[..., 0].float(), law.gather(-1, token_ids[..., None])[..., 0])
    assert torch.equal(table[..., 1 : 1 + MAX_LOGPROBS].long(), logits.topk(MAX_LOGPROBS).indices)


@pytest.mark.parametrize("settings", [{}, dict(temperature=1.0, seed=4, top_k=9, frequency_penalty=1.5)])
@pytest.mark.parametrize("head", [None, "lilicorr"])
def test_the_reference_reports_the_models_own_law(target: Target, head: str | None, settings: dict) -> None:
    decoder = Decoder(target, random_draft_model(target, head) if head else None)
    stop = decoder.generate(PROMPT, SamplingParams(16, **settings)).token_ids[12]
    params = SamplingParams(16, stop_ids=(stop,), num_logprobs=5, **settings)
    decoded = decoder.generate(PROMPT, params)
    assert decoded.finish_reason == "stop" and len(decoded.logprobs) == len(decoded.token_ids)
    check_logprobs(decoded.logprobs, target, PROMPT + decoded.token_ids, 5)
    assert any(report.token_id != report.top[0][0] for report in decoded.logprobs) == bool(settings)
    reports = []
    runs = list(decoder.stream(PROMPT, params, None, reports.append))
    assert [[report.token_id for report in run] for run in reports] == runs
    assert decoder.generate(PROMPT, SamplingParams(3)).logprobs is None


def test_log_probabilities_of_a_prompt(target: Target) -> None:
    decoder = Decoder(target, None)
    none, *found = decoder.prompt_logprobs(PROMPT, 3)
    assert none is None
    check_logprobs(found, target, PROMPT, 3)
    assert decoder.prompt_logprobs([5], 3) == [None]
    with pytest.raises(ValueError, match="num_top must be in \\[0, 20\\]"):
        decoder.prompt_logprobs(PROMPT, 21)
    with pytest.raises(ValueError, match="prompt token id 67"):
        decoder.prompt_logprobs([67], 1)
