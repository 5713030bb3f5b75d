"""Logits processing: by its definition, under speculation, and in every answer of the reference decoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from brute_force import brute_force, model_logits, next_law
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.processing import Processing, process, processing_of
from lilicorr.target import Target
from test_decode import ScriptedDraftModel, random_draft_model

PROMPT = [3, 14, 13, 9, 2]
VOCAB = 16  # few, so that answers repeat tokens
SETTINGS = [
    dict(presence_penalty=1.5),
    dict(frequency_penalty=1.2, presence_penalty=-0.4),
    dict(repetition_penalty=1.7),
    dict(repetition_penalty=0.6, frequency_penalty=0.3),
    dict(logit_bias=((3, 4.0), (0, -2.5))),
    dict(min_new_tokens=9, stop_ids=(2, 5, 8)),
    dict(
        presence_penalty=0.7,
        frequency_penalty=-0.5,
        repetition_penalty=1.3,
        logit_bias=((2, 3.0), (7, 1.0)),
        min_new_tokens=8,
        stop_ids=(2, 9),
        min_p=0.02,
    ),
]


def rows_of(parts: list[Processing]) -> Processing:
    """Several rows as one batch, short lists filled up."""

    def stacked(name: str) -> torch.Tensor:
        rows = [getattr(part, name)[0] for part in parts]
        if rows[0].dim() == 0:
            return torch.stack(rows)
        fill = -1 if name == "stop_ids" else 0
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    return Processing(**{name: stacked(name) for name in Processing.__dataclass_fields__})


@pytest.mark.parametrize("num_slots", [0, 1, 6])
def test_every_slot_counts_the_drafts_before_it(num_slots: int) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    logits = 2 * torch.randn(len(SETTINGS), num_slots + 1, VOCAB, generator=generator, dtype=torch.float64)
    drafts = torch.randint(4, (len(SETTINGS), num_slots), generator=generator)  # some stand twice
    prompt, answer = [4, 4, 1], [2, 6, 6, 3]
    params = [SamplingParams(20, temperature=1.0, **settings) for settings in SETTINGS]
    alone = [processing_of(p, prompt, answer, VOCAB, torch.device("cpu")) for p in params]
    together = process(logits, drafts, rows_of(alone))
    for row, settings in enumerate(params):
        one = slice(row, row + 1)
        assert torch.equal(process(logits[one], drafts[one], alone[row]), together[one])
        for slot in range(num_slots + 1):
            text = answer + drafts[row, :slot].tolist()
            expected = next_law(logits[row, slot], prompt, text, settings)
            law = together[row, slot].softmax(-1)
            kept = law.where(law >= settings.min_p * law.max(), 0.0)
            torch.testing.assert_close(kept / kept.sum(), expected)


def test_rows_that_ask_for_nothing_keep_their_logits() -> None:
    logits = torch.randn(2, 4, VOCAB)
    logits[0, 1, 5] = -torch.inf
    plain = processing_of(SamplingParams(9, stop_ids=(3,)), [1, 2], [3, 3], VOCAB, logits.device)
    asking = processing_of(SamplingParams(9, frequency_penalty=2.0), [1, 2], [3, 3], VOCAB, logits.device)
    processed = process(logits, torch.tensor([[1, 2, 3], [3, 3, 0]]), rows_of([plain, asking]))
    assert torch.equal(processed[0], logits[0]) and not torch.equal(processed[1], logits[1])


@pytest.fixture
def target(target_factory: Callable[..., Target]) -> Target:
    """Five layers in fp64."""
    return target_factory(num_layers=5, vocab=VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings))
def test_answers_are_those_of_a_loop_over_the_model(target: Target, settings: dict, temperature: float) -> None:
    params = SamplingParams(14, temperature=temperature, seed=7, **settings)
    expected = brute_force(target, PROMPT, params)
    plain = Decoder(target, None).generate(PROMPT, SamplingParams(14, temperature=temperature, seed=7))
    assert expected != plain.token_ids or set(settings) == {"min_new_tokens", "stop_ids"}
    text = PROMPT + expected
    drafts = [random_draft_model(target, "lilicorr"), ScriptedDraftModel(target, text, wrong_slot=3)]
    for draft_model in (None, *drafts):
        decoded = Decoder(target, draft_model).generate(PROMPT, params)
        assert decoded.token_ids == expected
        assert decoded.finish_reason == ("stop" if expected[-1] in params.stop_ids else "length")


def test_no_stop_id_comes_before_the_least_length(target: Target) -> None:
    likely = model_logits(target, PROMPT)[-1].topk(5).indices.tolist()
    settings = dict(temperature=2.0, stop_ids=tuple(likely), logit_bias=tuple((token, 100.0) for token in likely))
    for draft_model in (None, random_draft_model(target, "argmax")):
        decoder = Decoder(target, draft_model)
        for least in (0, 2, 5, 12):
            decoded = decoder.generate(PROMPT, SamplingParams(12, min_new_tokens=least, seed=least, **settings))
            assert len(decoded.token_ids) == min(12, least + 1)  # the bias makes it a stop id as soon as one may come
            assert decoded.finish_reason == ("length" if least == 12 else "stop")
    with pytest.raises(ValueError, match="min_new_tokens is 1, but all 16 token ids are stop ids"):
        decoder.stream(PROMPT, SamplingParams(3, min_new_tokens=1, stop_ids=tuple(range(16))))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", [None, "lilicorr"])
def test_a_bias_bans_and_forces(target: Target, head: str | None, temperature: float) -> None:
    favourite = int(model_logits(target, PROMPT)[-1].argmax())
    decoder = Decoder(target, random_draft_model(target, head) if head else None)

    def answer(token: int, bias: float) -> list[int]:
        params = SamplingParams(20, temperature=temperature, logit_bias=((token, bias),))
        return decoder.generate(PROMPT, params).token_ids

    assert answer(10, 100.0) == 20 * [10]
    assert favourite not in answer(favourite, -100.0)
