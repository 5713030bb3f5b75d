"""Verification in part: which drafts it takes, that no answer changes, and how the width is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import toys

from lilicorr.blocks import Proposal
from lilicorr.config import EngineConfig, from_dict
from lilicorr.decode import SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.trim import Planner, choose, survival_of
from lilicorr.heads import HEADS
from lilicorr.lattice import candidates


def costs_of(num_tokens: int, best: int) -> tuple[tuple[float, ...], ...]:
    """A table for batches of two and more in which one width is by far the cheapest."""
    return tuple((2.0, float(width), 1.0 if width == best else 1000.0) for width in (2, 3, num_tokens))


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_the_likeliest_drafts_are_chosen_and_packing_is_undone(width: int) -> None:
    torch.manual_seed(width)
    survival = torch.rand(6, 7).cumprod(dim=1)
    packing = choose(survival, width)
    assert len(packing.order) == 6 * width == int(packing.lengths.sum()) + 6
    taken = torch.arange(7) < packing.lengths[:, None]
    if 1 < width < 8:
        assert survival[taken].min() > survival[~taken].max()
    x = torch.arange(6 * 8).view(6, 8, 1)
    spread = packing.spread(packing.pack(x))
    run = torch.arange(8) <= packing.lengths[:, None]
    assert torch.equal(spread[run], x[run]) and packing.order.diff().gt(0).all()


def test_equal_drafts_and_rows_that_are_not_active() -> None:
    packing = choose(torch.ones(4, 3), 2)
    assert int(packing.lengths.sum()) == 4 and len(packing.order) == 8
    active = torch.tensor([True, False, True])
    survival = survival_of(torch.full((3, 4), 0.5), torch.tensor([4, 4, 1]), active)
    assert survival[0].tolist() == [0.5, 0.25, 0.125, 0.0625] and survival[2].tolist() == [0.5, 0, 0, 0]
    assert choose(survival, 2).lengths.tolist()[1] == 0 and survival[1].eq(-1).all()


@pytest.mark.parametrize("head", HEADS)
def test_no_answer_changes_at_any_temperature(head: str) -> None:
    target = toys.toy_target()
    draft_model = toys.toy_draft_model(target, head)
    temperatures = (0.0, 0.9)
    prompts = [prompt[:70] for prompt in toys.random_prompts(6)]
    requests = toys.requests_of(
        prompts, lambda i: SamplingParams(20 + i, temperatures[i % 2], top_k=7 * (i == 3), seed=i, stop_ids=(10,))
    )
    expected = toys.reference_runs(target, None, requests)
    whole = draft_model.spec.num_slots + 1
    engine = toys.toy_engine(target, draft_model, verify_costs=costs_of(whole, 2), num_pages=9, steps_behind=1)
    chunks = toys.run_all(engine, requests)
    for request in requests:
        assert toys.answer_of(chunks[request.id]) == sum(expected[request.id], [])
    blocks = [chunk for of_one in chunks.values() for chunk in of_one[1:]]
    assert all(chunk.num_accepted <= chunk.num_drafted for chunk in blocks)
    drafted = {chunk.num_drafted for chunk in blocks}
    assert whole - 1 in drafted and min(drafted) <= 1  # the first step, and batches of one, are whole
    assert engine.pool.num_free == 9 and engine.counters.tau > 1.0


class SureHead(toys.ScriptedHead):
    """Drafts the text; sure of a slot by the request's seed."""

    samples = False
    sureness: dict[int, float] = {}

    def step_confidence(self, draft, proposal: Proposal) -> torch.Tensor:
        return torch.tensor([[self.sureness[seed]] for seed in self.seeds]).expand(proposal.token_ids.shape)

    def propose(self, draft, sampling) -> Proposal:
        self.seeds = sampling.seeds.tolist()
        return super().propose(draft, sampling)


def test_drafts_go_to_the_rows_that_are_sure() -> None:
    target = toys.toy_target(vocab=67)
    requests = toys.requests_of([[3, 1, 4], [5, 9, 2]], lambda i: SamplingParams(33, seed=i))
    expected = toys.reference_runs(target, None, requests)
    draft_model = toys.toy_draft_model(target, "argmax", block_size=8)
    texts = {r.params.seed: r.prompt_ids + sum(expected[r.id], []) for r in requests}
    draft_model.head = SureHead(texts, lambda seed, position, token: token)
    draft_model.head.sureness = {0: 0.5, 1: 0.99}
    engine = toys.toy_engine(target, draft_model, verify_costs=((2, 4, 1.0), (2, 8, 1000.0)))
    chunks = toys.run_all(engine, requests)
    assert {id: toys.answer_of(of_one) for id, of_one in chunks.items()} == {
        id: sum(e, []) for id, e in expected.items()
    }
    sure, unsure = ([c.num_drafted for c in chunks[id][1:]] for id in "10")
    # six drafts a step: 0.99^6 > 0.5; the surer row ends first, and a batch of one is verified whole
    assert sure[0] == unsure[0] == 7 and set(sure[1:]) == {6} and unsure[1:5] == 4 * [0] and unsure[-1] == 7


def observed(planner: Planner, survival: list[list[float]], width: int | None, accepted: int, times: int = 60) -> None:
    for _ in range(times):
        planner.observe(np.array(survival), width, np.full(len(survival), accepted / len(survival)))


def test_the_width_gives_most_tokens_for_the_time() -> None:
    planner = Planner(((4, 2, 5.0), (4, 3, 6.0), (4, 4, 10.0), (16, 2, 5.0), (16, 4, 50.0)), 4)
    assert planner.width(4) is None  # nothing is known yet
    assert planner.widths == {4: (2, 3), 16: (2,)}
    observed(planner, 4 * [[0.9, 0.8, 0.7]], None, 10)
    # expected tokens 1.9, 2.7, 3.4 of (2, 3, 4) positions: 0.38, 0.45, 0.34 a millisecond
    assert (planner.width(3), planner.width(4), planner.width(15), planner.width(16)) == (None, 3, 3, 2)
    observed(planner, 4 * [[0.9, 0.1, 0.0]], 3, 4)
    assert planner.width(4) == 2
    observed(planner, 4 * [[1.0, 1.0, 1.0]], 2, 4)
    cheap = Planner(((1, 2, 9.9), (1, 4, 10.0)), 4)
    observed(cheap, [[0.9, 0.5, 0.5]], None, 2)
    assert cheap.width(1) is None


def test_heads_that_promise_too_much_are_trusted_less() -> None:
    costs = ((2, 2, 6.0), (2, 4, 10.0))
    honest, vain = Planner(costs, 4), Planner(costs, 4)
    observed(honest, 2 * [[0.9, 0.9, 0.9]], None, 5)
    observed(vain, 2 * [[0.9, 0.9, 0.9]], None, 1)
    assert honest.width(2) is None and vain.width(2) == 2


def test_confidence_is_the_heads_own_where_it_has_one() -> None:
    target = toys.toy_target(vocab=67)
    for name in HEADS:
        model = toys.toy_draft_model(target, name)
        context = model.new_context(20)
        model.extend_context(context, target.forward(torch.tensor([[3, 1, 4]])).features)
        with torch.no_grad():
            draft = model.draft(torch.tensor([5]), context)
            proposal = model.head.propose(draft)
            found = model.head.step_confidence(draft, proposal)
            if name == "dspark":
                expected = torch.sigmoid(model.head.confidence(draft, proposal.token_ids))
                without = replace_config(model, enable_confidence_head=False)
                assert torch.allclose(without(draft, proposal), draft.logits.softmax(-1).amax(-1))
            elif name == "lilicorr":
                scores = model.head.scores(draft, candidates(draft, 3))
                assert torch.allclose(found[:, 0], scores[0].softmax(-1).amax(-1), atol=1e-5)
                expected = proposal.confidence
            else:
                expected = draft.logits.softmax(-1).amax(-1)
        assert torch.allclose(found, expected, atol=1e-6) and found.shape == proposal.token_ids.shape


def replace_config(model: DraftModel, **changes: object):
    """The confidence of the same head configured otherwise."""
    model.head.config = replace(model.head.config, **changes)
    return model.head.step_confidence


def test_what_cannot_be_verified_in_part_is_refused() -> None:
    target, costs = toys.toy_target(), costs_of(4, 2)
    with pytest.raises(ValueError, match="autoregression has none"):
        toys.toy_engine(target, None, verify_costs=costs)
    with pytest.raises(ValueError, match="a width must be in 2..4, got 5"):
        toys.toy_engine(target, toys.toy_draft_model(target, "argmax"), verify_costs=((2, 5, 1.0),))
    with pytest.raises(ValueError, match="2 rows need the time of whole blocks, width 4"):
        toys.toy_engine(target, toys.toy_draft_model(target, "argmax"), verify_costs=((2, 3, 1.0),))
    drawn = toys.toy_draft_model(target, "lilicorr", head_config={"contract": "sampled"})
    with pytest.raises(ValueError, match="head of the deterministic contract: .* lilicorr"):
        toys.toy_engine(target, drawn, verify_costs=costs)
    with pytest.raises(ValueError, match="verify_costs .* deterministic"):
        EngineConfig(verify_costs=costs, deterministic=True)
    with pytest.raises(ValueError, match=r"verify_costs must be rows of .*, got \(0, 2, 1.0\)"):
        EngineConfig(verify_costs=((0, 2, 1.0),))
    assert from_dict(EngineConfig, {"verify_costs": [[8, 4, 2.5]]}).verify_costs == ((8.0, 4.0, 2.5),)
