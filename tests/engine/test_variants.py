"""Draft models of every kind through the engine: stretched positions, drawn proposals, draft vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from torch.utils._python_dispatch import TorchDispatchMode

from lilicorr.config import YarnConfig
from lilicorr.decode import SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.request import Request
from lilicorr.engine.step import Mix
from lilicorr.heads import HEADS
from lilicorr.target import Target

DRAWING = [head for head in HEADS if head != "argmax"]  # these have the sampled contract


def engine_is_the_reference(target: Target, draft_model: DraftModel, requests: list[Request]) -> int:
    """Every block equals the reference's, with three rows at once; returns how many drafts were accepted."""
    expected = toys.reference_runs(target, draft_model, requests)
    engine = toys.toy_engine(target, draft_model, max_running=3)
    chunks = toys.run_all(engine, requests)
    assert {id: toys.runs_of(of_one) for id, of_one in chunks.items()} == expected
    return sum(engine.counters.accepted_at)


def requests_with(*temperatures: float) -> list[Request]:
    """Four requests of up to 70 + 24 tokens."""
    prompts = [prompt[:70] for prompt in toys.random_prompts(4)]
    return toys.requests_of(
        prompts, lambda i: SamplingParams(24, temperature=temperatures[i % len(temperatures)], seed=i)
    )


@pytest.mark.parametrize("head", HEADS)
def test_a_drafter_of_stretched_positions(head: str) -> None:
    target = toys.toy_target()
    yarn = YarnConfig(factor=4.0, original_max_position_embeddings=32)
    stretched, plain = (toys.toy_draft_model(target, head, yarn=y) for y in (yarn, None))
    assert engine_is_the_reference(target, stretched, requests_with(0.0, 0.8)) > 0
    engines = [toys.toy_engine(target, model) for model in (stretched, plain)]
    tables = [engine._step.drafter.rope[0] for engine in engines]
    assert float(tables[0][0].amax()) > 1.1  # YaRN scales cosines too
    assert not torch.allclose(tables[0] / tables[0][0], tables[1])


@pytest.mark.parametrize("vocab", [None, (1, 3, 4, 8, 9, 11)])
@pytest.mark.parametrize("head", DRAWING)
def test_proposals_that_are_drawn(head: str, vocab: tuple[int, ...] | None) -> None:
    target = toys.toy_target()
    ids = torch.tensor(vocab) if vocab else None
    draft_model = toys.toy_draft_model(target, head, head_config={"contract": "sampled"}, vocab_ids=ids)
    assert engine_is_the_reference(target, draft_model, requests_with(0.0, 0.7, 1.3)) > 0


@pytest.mark.parametrize("head", HEADS)
def test_a_draft_vocabulary(head: str) -> None:
    target = toys.toy_target()
    ids = torch.tensor([1, 3, 4, 8, 9, 11])
    draft_model = toys.toy_draft_model(target, head, vocab_ids=ids)
    drafted: set[int] = set()
    propose = draft_model.head.propose

    def watched(draft, sampling):
        proposal = propose(draft, sampling)
        drafted.update(proposal.token_ids.flatten().tolist())
        return proposal

    draft_model.head.propose = watched
    assert engine_is_the_reference(target, draft_model, requests_with(0.0, 0.8)) > 0
    assert len(drafted) > 1 and drafted <= set(ids.tolist())


WAITS = {  # operations whose result, or its shape, the host must know before it goes on
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "repeat_interleave"),
    *("_unique2", "unique_dim", "unique_consecutive"),
    "lift_fresh",  # a tensor made of host values: on a GPU a copy that a graph cannot hold
}
CAPTURED = [(head, {}) for head in HEADS] + [
    *((head, {"contract": "sampled"}) for head in DRAWING),
    ("domino", {"pool": 4}),
    ("dspark", {"confidence_threshold": 0.5}),
    ("lilicorr", {"walk": "exact"}),
]


class Waiting(TorchDispatchMode):
    """Notes the operations that would make the host wait for the device, or end the capture of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # a mask as an index asks how many places it has
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITS or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mix", [Mix(filtered=False), Mix(filtered=True)], ids=["unfiltered", "filtered"])
@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize(("head", "head_config"), CAPTURED)
def test_the_step_of_every_head_never_looks_at_a_value(
    head: str, head_config: dict[str, Any], width: int | None, mix: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would make the host wait for the device, and break a captured graph; the references of kernels may look."""
    if width is not None and head_config.get("contract") == "sampled":
        pytest.skip("such blocks are always verified whole")
    target = toys.toy_target(vocab=67)
    engine = toys.toy_engine(target, toys.toy_draft_model(target, head, head_config=head_config))
    for index, prompt in enumerate(toys.random_prompts(3, vocab=60)):
        engine.submit(Request(str(index), prompt, SamplingParams(40)))
    engine.step()
    step = engine._step
    step.trims = width is not None

    def top(logits: torch.Tensor, count: int, *_: object) -> tuple[torch.Tensor, ...]:
        return (*logits.topk(count, dim=-1), logits.logsumexp(dim=-1))

    monkeypatch.setattr("lilicorr.engine.model.paged_attention", lambda queries, *_, **__: queries)
    monkeypatch.setattr("lilicorr.engine.model.norm_rope", lambda queries, *_: queries)
    for name in ("plan_reading", "plan_writing"):
        monkeypatch.setattr(f"lilicorr.engine.model.{name}", lambda *_: None)
    for module in ("lattice", "heads.base", "logprobs"):
        monkeypatch.setattr(f"lilicorr.{module}.topk_lse", top)
    with Waiting() as waiting:
        step.decode(torch.arange(2), 4, mix, width)
    assert waiting.found == []


def test_operations_that_wait_are_seen() -> None:
    x = torch.arange(4.0)
    for wait in (
        lambda: x.sum().item(),
        lambda: bool(x.any()),
        lambda: x[x > 1],
        lambda: x.index_put((x > 1,), x[0]),
        lambda: torch.tensor([1, 2]),
        lambda: x.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    ):
        with Waiting() as waiting:
            wait()
        assert waiting.found
    with Waiting() as waiting:
        x[torch.arange(2)] = x.where(x > 1, 0.0)[:2]
    assert waiting.found == []
