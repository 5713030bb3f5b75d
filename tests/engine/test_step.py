"""The step on the device's side: rows beside each other, the dummy, and what graphs ask of it."""

from __future__ import annotations

import pytest
import torch
from toys import (
    random_prompts,
    reference_runs,
    requests_of,
    run_all,
    runs_of,
    toy_draft_model,
    toy_engine,
    toy_target,
)

from lilicorr.decode import SamplingParams
from lilicorr.engine.engine import Engine
from lilicorr.engine.graphs import BATCH_SIZES, EagerDecode, decode_runner, fill, next_size
from lilicorr.engine.request import Request
from lilicorr.engine.step import Mix
from lilicorr.heads import HEADS
from lilicorr.target import Target


def started(head: str | None = "lilicorr") -> Engine:
    """An engine whose three rows have been prefilled and have decoded one block."""
    target = toy_target(vocab=67)
    engine = toy_engine(target, toy_draft_model(target, head) if head else None)
    for index, prompt in enumerate(random_prompts(3, vocab=60)):
        engine.submit(Request(str(index), prompt, SamplingParams(40)))
    engine.step()
    return engine


def snapshot(engine: Engine) -> list[torch.Tensor]:
    """State of all rows, and all pages."""
    values = [*vars(engine.state).values(), *vars(engine.state.processing).values()]
    state = [value for value in values if isinstance(value, torch.Tensor)]
    layers = [*engine._step.target.layers, *(engine._step.drafter.layers if engine._step.drafter else [])]
    return [tensor.clone() for tensor in (*state, *(p for layer in layers for p in (layer.k_pages, layer.v_pages)))]


@pytest.mark.parametrize("head", [None, "argmax", "lilicorr"])
def test_rows_that_are_not_active_change_nothing(head: str | None) -> None:
    engine = started(head)
    dummy = engine.state.dummy
    for row in range(3):
        engine.state.leave(row)
    before = snapshot(engine)
    output = engine._step.decode(torch.tensor([0, 2, dummy, dummy]), 4, Mix()).runs
    assert output[:, -4].tolist() == [0, 0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_batch_filled_with_the_dummy_decodes_the_same(size: int) -> None:
    plain, filled = started(), started()
    expected = EagerDecode(plain._step, None)([0, 1, 2], 8, Mix()).runs
    got = EagerDecode(filled._step, size)([0, 1, 2], 8, Mix()).runs
    assert torch.equal(got[:3], expected) and expected[:, -3].gt(0).all()
    assert torch.equal(filled.state.lengths[:3], plain.state.lengths[:3])
    assert filled.state.lengths[filled.state.dummy] == 0 and not filled.state.active[filled.state.dummy]


def test_order_and_company_of_rows_do_not_matter() -> None:
    expected = started()._step.decode(torch.tensor([0, 1, 2]), 8, Mix())
    found = started()._step.decode(torch.tensor([2, 0]), 8, Mix())
    assert torch.equal(found.runs, expected.runs[[2, 0]])
    torch.testing.assert_close(found.logprobs[..., 0], expected.logprobs[[2, 0], :, 0])


def test_batch_sizes() -> None:
    assert [next_size(n, list(BATCH_SIZES)) for n in (1, 3, 5, 9, 32)] == [1, 4, 8, 12, 32]
    with pytest.raises(AssertionError, match="257 rows"):
        next_size(257, list(BATCH_SIZES))
    assert fill([4, 1], 4, 9) == [4, 1, 9, 9]
    engine = started()
    assert isinstance(decode_runner(engine._step, 8, one_shape=False, widths={}), EagerDecode)


def test_warming_up_changes_nothing() -> None:
    engine = started()
    before = snapshot(engine)
    engine.warm_up()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
@pytest.mark.parametrize("head", [None, *HEADS])
def test_captured_steps_decode_what_the_reference_decodes(head: str | None) -> None:
    on_cpu = toy_target(vocab=67, head_dim=32)  # a width and a K that the kernels take
    target = Target(on_cpu.model.to("cuda"), None, on_cpu.layer_ids, on_cpu.mask_token_id)
    draft_model = toy_draft_model(target, head, num_candidates=4) if head else None

    def params(i: int) -> SamplingParams:
        asked = {} if i < 6 else dict(frequency_penalty=0.5, repetition_penalty=1.2, min_p=0.01, num_logprobs=2)
        return SamplingParams(40, temperature=i % 2, seed=i, **asked)

    requests = requests_of(random_prompts(12, vocab=60), params)
    expected = reference_runs(target, draft_model, requests)
    engine = toy_engine(target, draft_model)
    engine.warm_up()
    assert {name: runs_of(chunks) for name, chunks in run_all(engine, requests).items()} == expected
