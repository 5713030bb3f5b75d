"""The reference decoder: losslessness, rollback, stopping, limits, seeds and the law of sampled text."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lilicorr.blocks import BlockSpec, DraftOutput, Proposal, Verdict
from lilicorr.config import DrafterConfig
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, drafter_shape
from lilicorr.target import Target
from lilicorr.verify import PROPOSAL_DRAW, Sampling, draw, uniform

PROMPT = [3, 14, 15, 9, 26]
BLOCK = 4


class ScriptedDraftModel:
    """Stands in for a `DraftModel`: drafts what follows in `text`, but for slot `wrong_slot` (1-based).

    It checks what the decoder hands over: features of every position before the anchor and of no other, and
    the anchor and position of each block.
    """

    def __init__(self, target: Target, text: list[int], wrong_slot: int | None = None, block_size: int = BLOCK) -> None:
        self.target, self.text, self.wrong_slot = target, text, wrong_slot
        self.spec = BlockSpec(block_size, 2, target.mask_token_id, target.layer_ids)
        self.head = self
        self.features = target.forward(torch.tensor([text])).features

    def new_context(self, max_length: int) -> SimpleNamespace:
        return SimpleNamespace(length=0)

    def extend_context(self, cache: SimpleNamespace, features: Tensor) -> None:
        end = cache.length + features.shape[1]
        torch.testing.assert_close(features, self.features[:, cache.length : end], rtol=1e-9, atol=1e-9)
        cache.length = end

    def draft(self, anchor_ids: Tensor, cache: SimpleNamespace) -> int:
        assert anchor_ids.tolist() == [self.text[cache.length]]
        return cache.length

    def propose(self, anchor: int, sampling: Sampling) -> Proposal:
        assert sampling.positions.tolist() == [anchor + 1]
        drafts = self.text[anchor + 1 : anchor + self.spec.block_size]
        drafts += [0] * (self.spec.num_slots - len(drafts))
        if self.wrong_slot is not None:
            drafts[self.wrong_slot - 1] = (drafts[self.wrong_slot - 1] + 1) % self.target.embed.shape[0]
        return Proposal(torch.tensor([drafts]))


class DrawnDraftModel(ScriptedDraftModel):
    """Drafts by drawing every slot from one fixed law over part of the vocabulary."""

    def __init__(self, target: Target, support: list[int], law: list[float]) -> None:
        self.spec = BlockSpec(3, 2, target.mask_token_id, target.layer_ids)
        self.head = self
        self.support, self.law = torch.tensor(support), torch.tensor(law, dtype=torch.float64)

    def extend_context(self, cache: SimpleNamespace, features: Tensor) -> None:
        cache.length += features.shape[1]

    def draft(self, anchor_ids: Tensor, cache: SimpleNamespace) -> int:
        return cache.length

    def propose(self, anchor: int, sampling: Sampling) -> Proposal:
        positions = sampling.positions + torch.arange(2)
        probs = self.law.expand(1, 2, -1)
        ranks = draw(probs, uniform(sampling.seeds.expand(2), positions, PROPOSAL_DRAW)[None])
        return Proposal(self.support[ranks], probs, self.support.expand(1, 2, -1))


def random_draft_model(target: Target, head: str) -> DraftModel:
    torch.manual_seed(5)
    config = DrafterConfig(num_layers=2, block_size=BLOCK, num_candidates=3)
    head_config = {"hidden_size": 16, "num_heads": 2, "factor_dim": 8} if head == "lilicorr" else {}
    shape = drafter_shape(config, target.config)
    spec = block_spec(config, target.config, target.mask_token_id)
    return build_draft_model(shape, spec, head, head_config, target).to(target.embed.dtype)


def autoregressive(target: Target, num_tokens: int, prompt: list[int] = PROMPT, **settings: float) -> list[int]:
    return Decoder(target, None).generate(prompt, SamplingParams(num_tokens, **settings)).token_ids


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_greedy_output_is_the_targets_own(target_factory: Callable[..., Target], family: str):
    target = target_factory(family)
    expected = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    expected = expected[0, len(PROMPT) :].tolist()
    plain = Decoder(target, None).generate(PROMPT, SamplingParams(40))
    assert plain.token_ids == expected
    assert (plain.num_blocks, plain.num_block_tokens, plain.finish_reason) == (39, 39, "length")
    for head in ("argmax", "lilicorr"):
        decoded = Decoder(target, random_draft_model(target, head)).generate(PROMPT, SamplingParams(40))
        assert decoded.token_ids == expected, head
        assert decoded.num_block_tokens == 39 and decoded.seconds > 0


@pytest.mark.parametrize("wrong_slot", [None, 1, 2, 3])
def test_a_draft_wrong_at_slot_r_gives_r_tokens_a_block(tiny_target: Target, wrong_slot: int | None):
    per_block = wrong_slot or BLOCK
    expected = autoregressive(tiny_target, 1 + 6 * per_block + BLOCK)
    draft_model = ScriptedDraftModel(tiny_target, PROMPT + expected, wrong_slot)
    verdicts: list[Verdict] = []

    def observe(draft: int, proposal: Proposal, verdict: Verdict) -> None:
        assert proposal.token_ids.shape == (1, BLOCK - 1)
        verdicts.append(verdict)

    decoded = Decoder(tiny_target, draft_model).generate(PROMPT, SamplingParams(1 + 6 * per_block), observe)
    assert decoded.token_ids == expected[: 1 + 6 * per_block]
    assert (decoded.num_blocks, decoded.num_block_tokens) == (6, 6 * per_block)
    assert [int(verdict.num_accepted) for verdict in verdicts] == 6 * [per_block - 1]


def test_sampled_output_of_a_point_mass_is_the_autoregressive_one(tiny_target: Target):
    settings = dict(temperature=1.3, top_k=40, top_p=0.95, seed=11)
    expected = autoregressive(tiny_target, 30, **settings)
    for draft_model in (
        random_draft_model(tiny_target, "lilicorr"),
        ScriptedDraftModel(tiny_target, PROMPT + expected, wrong_slot=3),
    ):
        decoded = Decoder(tiny_target, draft_model).generate(PROMPT, SamplingParams(30, **settings))
        assert decoded.token_ids == expected
    outputs = {tuple(autoregressive(tiny_target, 30, **{**settings, "seed": seed})) for seed in range(4)}
    assert len(outputs) == 4
    assert autoregressive(tiny_target, 30, **settings) == expected


def test_stream_yields_the_blocks_of_generate(tiny_target: Target):
    params = SamplingParams(25, temperature=0.8, seed=3)
    decoder = Decoder(tiny_target, random_draft_model(tiny_target, "argmax"))
    runs = []
    for run in decoder.stream(PROMPT, params):
        assert torch.is_grad_enabled()  # the decoder's no_grad must not leak between the blocks
        runs.append(run)
    decoded = decoder.generate(PROMPT, params)
    assert sum(runs, []) == decoded.token_ids
    assert len(runs[0]) == 1 and all(runs) and len(runs) == decoded.num_blocks + 1


@pytest.mark.parametrize("index", [0, 1, 5, 6, 8])  # prefill; first of block 1; first, inside, last of block 2
def test_a_stop_token_ends_the_answer_and_stays(tiny_target: Target, index: int):
    settings = next(
        settings
        for seed in range(200)
        if len(set(autoregressive(tiny_target, 13, **(settings := dict(temperature=2.0, seed=seed))))) == 13
    )
    expected = autoregressive(tiny_target, 13, **settings)
    params = SamplingParams(13, stop_ids=(expected[index], 66), **settings)
    decoder = Decoder(tiny_target, ScriptedDraftModel(tiny_target, PROMPT + expected))
    decoded = decoder.generate(PROMPT, params)
    assert (decoded.token_ids, decoded.finish_reason) == (expected[: index + 1], "stop")
    assert decoded.num_block_tokens == index
    assert decoded.num_blocks == math.ceil(index / BLOCK)
    plain = Decoder(tiny_target, None).generate(PROMPT, params)
    assert (plain.token_ids, plain.finish_reason) == (decoded.token_ids, "stop")


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 7])
def test_the_limit_cuts_the_last_block(tiny_target: Target, limit: int):
    expected = autoregressive(tiny_target, 12)
    decoder = Decoder(tiny_target, ScriptedDraftModel(tiny_target, PROMPT + expected))
    decoded = decoder.generate(PROMPT, SamplingParams(limit))
    assert (decoded.token_ids, decoded.finish_reason) == (expected[:limit], "length")
    assert decoded.num_blocks == math.ceil((limit - 1) / BLOCK) and decoded.num_block_tokens == limit - 1
    last = SamplingParams(limit, stop_ids=(expected[limit - 1],))
    assert decoder.generate(PROMPT, last).finish_reason == "stop"


def test_a_prompt_of_one_token(tiny_target: Target):
    expected = autoregressive(tiny_target, 20, prompt=[7])
    for head in ("argmax", "lilicorr"):
        decoder = Decoder(tiny_target, random_draft_model(tiny_target, head))
        assert decoder.generate([7], SamplingParams(20)).token_ids == expected


def test_sampled_text_has_the_targets_law(target_factory: Callable[..., Target]):
    target = target_factory(num_layers=2, hidden=16, vocab=8, num_captured=1)
    draft_model = DrawnDraftModel(target, support=[0, 2, 3, 6], law=[0.4, 0.3, 0.2, 0.1])
    decoder, draws, prompt = Decoder(target, draft_model), 900, [1, 5]
    counts = torch.zeros(8, 8, 8, dtype=torch.float64)
    for seed in range(draws):
        counts[tuple(decoder.generate(prompt, SamplingParams(3, temperature=1.0, seed=seed)).token_ids)] += 1

    def law(rows: list[list[int]]) -> Tensor:
        return target.logits(target.forward(torch.tensor(rows)).hidden[:, -1]).softmax(-1)

    pairs = [[first, second] for first in range(8) for second in range(8)]
    first, second = law([prompt])[0], law([[*prompt, token] for token in range(8)])
    third = law([[*prompt, *pair] for pair in pairs]).view(8, 8, 8)
    joint = first[:, None, None] * second[..., None] * third
    for observed, expected in ((counts.sum(2), draws * joint.sum(2)), (counts, draws * joint)):
        often = expected >= 5
        observed = torch.cat([observed[often], observed[~often].sum()[None]])
        expected = torch.cat([expected[often], expected[~often].sum()[None]])
        chi_square, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
        assert freedom > 10
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_the_context_may_be_filled_to_the_last_position_and_no_further(tiny_target: Target):
    prompt = [1 + i % 60 for i in range(500)]
    decoder = Decoder(tiny_target, random_draft_model(tiny_target, "argmax"))
    assert len(decoder.generate(prompt, SamplingParams(12)).token_ids) == 12
    with pytest.raises(ValueError, match="500 tokens.*13.*513.*512"):
        decoder.stream(prompt, SamplingParams(13))


def test_requests_that_cannot_be_served(tiny_target: Target):
    decoder = Decoder(tiny_target, None)
    with pytest.raises(ValueError, match="at least one token"):
        decoder.stream([], SamplingParams(3))
    with pytest.raises(ValueError, match="prompt token id 67"):
        decoder.stream([1, 67], SamplingParams(3))
    with pytest.raises(ValueError, match="stop token id -1"):
        decoder.stream([1], SamplingParams(3, stop_ids=(-1,)))
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        decoder.stream([1], SamplingParams(0))
    with pytest.raises(ValueError, match="logit_bias token id 67"):
        decoder.stream([1], SamplingParams(3, logit_bias=((5, 1.0), (67, 1.0))))
    for settings in (
        dict(max_new_tokens=-1),
        dict(temperature=-1.0),
        dict(top_p=0.0),
        dict(top_k=-2),
        dict(min_p=1.5),
        dict(presence_penalty=2.1),
        dict(frequency_penalty=math.nan),
        dict(repetition_penalty=0.0),
        dict(repetition_penalty=1e-300),  # 0 in fp32
        dict(repetition_penalty=1e40),  # inf in fp32
        dict(logit_bias=((1, 101.0),)),
        dict(logit_bias=((1, 1.0), (1, 2.0))),
        dict(logit_bias=tuple((i, 1.0) for i in range(301))),
        dict(min_new_tokens=4),
        dict(min_new_tokens=-1),
        dict(num_logprobs=21),
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            SamplingParams(**{"max_new_tokens": 3, **settings})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_reported_not_decoded(tiny_target: Target, value: float, temperature: float):
    tiny_target.lm_head[5:7, 0] = torch.tensor([value, -value])  # one of the two logits is +inf
    with pytest.raises(ValueError, match="not finite at position 5"):
        Decoder(tiny_target, None).generate(PROMPT, SamplingParams(3, temperature=temperature))


def test_target_and_draft_model_must_agree_on_the_captured_layers(target_factory: Callable[..., Target]):
    draft_model = random_draft_model(target_factory(), "argmax")
    with pytest.raises(ValueError, match=r"\(1, 3\).*\(3,\)"):
        Decoder(target_factory(num_captured=1), draft_model)


def test_observers_see_the_draft_behind_each_proposal(tiny_target: Target):
    draft_model = random_draft_model(tiny_target, "argmax")
    seen: list[tuple[DraftOutput, Proposal]] = []
    Decoder(tiny_target, draft_model).generate(
        PROMPT, SamplingParams(10), lambda draft, proposal, verdict: seen.append((draft, proposal))
    )
    assert len(seen) >= 3
    for draft, proposal in seen:
        assert torch.equal(draft.logits.argmax(-1), proposal.token_ids)
    unseen: list[DraftOutput | None] = []
    Decoder(tiny_target, None).generate(PROMPT, SamplingParams(10), lambda draft, *_: unseen.append(draft))
    assert unseen == 9 * [None]
