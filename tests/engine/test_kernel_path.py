"""The engine on the way that a GPU takes, on a machine without one: every call goes to the kernels.

The choice between a kernel and its reference is `Tensor.is_cuda` everywhere, so these tests make it true. Most of them
let each Triton version check, shape and lay out what it is given, look at its launches instead of running them, and put
the reference's numbers into its results: that is as fast as the references, and what only kernels ask for (strides,
types, shapes, sizes that are powers of two) is asked for. Two run the kernels in Triton's interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import toys
from test_trim import costs_of
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from lilicorr.blocks import Verdict
from lilicorr.decode import SamplingParams
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.engine.graphs import EagerDecode, next_size
from lilicorr.engine.request import Request
from lilicorr.engine.step import Mix, Outcome, Step
from lilicorr.heads import HEADS
from lilicorr.kernels import accept, attention, match_walk, nodes, norm_rope, topk_lse
from lilicorr.target import Target
from lilicorr.verify import verify

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU every engine test of it takes the kernels")

KERNELS = {
    "accept_triton": (accept, verify),
    "build_nodes_triton": (nodes, nodes.build_nodes_reference),
    "match_walk_triton": (match_walk, match_walk.match_walk_reference),
    "norm_rope_triton": (norm_rope, norm_rope.norm_rope_reference),
    "paged_attention_triton": (attention, attention.paged_attention_reference),
    "topk_lse_triton": (topk_lse, topk_lse.topk_lse_reference),
}
COMMON = [7 * i % 60 for i in range(64)]  # the first page of several prompts
SETTINGS = (
    {},
    dict(temperature=1.0, top_k=9, top_p=0.9, min_p=0.02),
    dict(frequency_penalty=0.5, num_logprobs=2),
    dict(temperature=1.0),
    dict(temperature=0.7, repetition_penalty=1.2, min_new_tokens=3),
)


def requests_of(max_new_tokens: int = 12) -> list[Request]:
    """Prompts that outgrow the pages together, that come in pieces, and that share a page; all kinds of sampling."""
    prompts = [[3, 7] * 28, COMMON[:55], [5, 3, 8] * 19, 2 * COMMON + [6], [*COMMON, 9, 2]]
    return [
        Request(str(i), prompt, SamplingParams(max_new_tokens, seed=i, **settings), "", 1 if i == 3 else None)
        for i, (prompt, settings) in enumerate(zip(prompts, SETTINGS, strict=True))
    ]


def parts_of(result: Any) -> tuple[Tensor, ...]:
    """The tensors of what a kernel gives."""
    if isinstance(result, Verdict):
        return result.num_accepted, result.next_ids
    return () if result is None else result if isinstance(result, tuple) else (result,)


def looked_at(version: Callable[..., Any], reference: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    """`version` with the numbers of `reference` in its results, which are laid out as `version` does it."""

    def call(*arguments: Any) -> Any:
        called.add(version.__name__)
        result, expected = version(*arguments), reference(*arguments)
        assert (result is None) == (expected is None), version.__name__
        for found, wanted in zip(parts_of(result), parts_of(expected), strict=True):
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), version.__name__
            found.copy_(wanted)
        return result

    return call


def look_at_launch(executor: GridExecutor, *arguments: Any, **named: Any) -> None:
    """What a launch does here: see that a kernel knows where the numbers of each tensor lie."""
    bound = inspect.signature(executor.fn).bind(
        *arguments, **{k: v for k, v in named.items() if k in executor.arg_names}
    )
    numbers = {value for value in bound.arguments.values() if isinstance(value, int)}
    for name, x in bound.arguments.items():
        if isinstance(x, Tensor) and not x.is_contiguous():
            # one stride may be told, that of rows
            assert x.stride(-1) == 1 and numbers & set(x.stride()[:-1]), (executor.fn.__name__, name, x.stride())


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make all tensors look as if they were on a GPU."""
    return lambda: monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)


@pytest.fixture
def looking(on_gpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Call it to take the kernels' way with the references' numbers; gives the names of what is called from then on."""

    def start() -> set[str]:
        called: set[str] = set()
        on_gpu()
        monkeypatch.setattr(GridExecutor, "__call__", look_at_launch)
        for name, (module, reference) in KERNELS.items():
            monkeypatch.setattr(module, name, looked_at(getattr(module, name), reference, called))
        return called

    return start


class FilledDecode:
    """What `GraphDecode` captures, call by call: batches of a few sizes, filled up, over the whole page table."""

    def __init__(self, step: Step, sizes: list[int]) -> None:
        self.step, self.sizes = step, sizes

    def __call__(self, rows: list[int], num_pages: int, mix: Mix, width: int | None = None) -> Outcome:
        whole = self.step.state.page_table.shape[1]
        return EagerDecode(self.step, next_size(len(rows), self.sizes))(rows, whole, mix, width)

    def warm_up(self) -> None:
        self([self.step.state.dummy], 1, Mix())


def gpu_engine(target: Target, draft_model: DraftModel | None, **config: Any) -> Engine:
    """An engine of three rows that does what one on a GPU does: fixed shapes, a step behind; few pages."""
    config = dict(max_running=3, max_model_len=256, num_pages=4, prefill_tokens=64, steps_behind=1) | config
    engine = toys.toy_engine(target, draft_model, **config)
    engine._fixed_shapes = True
    engine._decode = FilledDecode(engine._step, [engine.config.max_running] if engine.config.deterministic else [1, 3])
    engine.warm_up()
    return engine


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[list[int]]]:
    """The tokens of every request, block by block."""
    return {name: toys.runs_of(chunks) for name, chunks in toys.run_all(engine, requests).items()}


def kernel_target(**changes: Any) -> Target:
    """A target with heads of a width that the kernels take."""
    return toys.toy_target(**(dict(vocab=67, head_dim=32) | changes))


def kernel_draft_model(target: Target, head: str, **changes: Any) -> DraftModel:
    """A draft model with as many candidates as the kernels take."""
    return toys.toy_draft_model(target, head, **(dict(num_candidates=4) | changes))


@pytest.mark.parametrize("variant", ["plain", "deterministic", "trimmed"])
@pytest.mark.parametrize("head", [None, *HEADS])
def test_every_step_of_every_head(head: str | None, variant: str, looking: Callable[[], set[str]]) -> None:
    target, requests = kernel_target(), requests_of()
    draft_model = kernel_draft_model(target, head) if head else None
    trimmed = variant == "trimmed"
    if trimmed and head is None:
        pytest.skip("autoregression has no drafts to leave out")
    expected = toys.reference_runs(target, None if trimmed else draft_model, requests)
    called = looking()
    config = dict(deterministic=variant == "deterministic")
    if trimmed:
        config["verify_costs"] = costs_of(draft_model.spec.num_slots + 1, 2)
    engine = gpu_engine(target, draft_model, **config)
    found = answers(engine, requests)
    if trimmed:  # what is verified at once changes with the batch, and no token does
        found, expected = ({name: sum(runs, []) for name, runs in of.items()} for of in (found, expected))
    assert found == expected
    assert engine.scheduler.num_cached_tokens > 0 and engine.scheduler.num_preemptions > 0
    own = {"build_nodes_triton", "match_walk_triton"} if head == "lilicorr" else set()
    assert called == {"accept_triton", "norm_rope_triton", "paged_attention_triton", "topk_lse_triton"} | own


@pytest.mark.parametrize("head", [None, "argmax"])
def test_an_engine_of_one_row_with_passes_wider_than_its_blocks(
    head: str | None, looking: Callable[[], set[str]]
) -> None:
    target, requests = kernel_target(), requests_of(6)
    draft_model = kernel_draft_model(target, head) if head else None
    expected = toys.reference_runs(target, draft_model, requests)
    looking()
    assert answers(gpu_engine(target, draft_model, deterministic=True, max_running=1), requests) == expected


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("domino", dict(head_config=dict(contract="sampled"))),
        ("domino", dict(head_config=dict(pool=4), block_size=1)),  # anchor-first: one position of a row
        ("dspark", dict(head_config=dict(contract="sampled", confidence_threshold=0.5))),
        ("dspark", dict(head_config=dict(confidence_threshold=0.5), vocab_ids=torch.arange(0, 64, 2))),
        ("lilicorr", dict(head_config=dict(contract="sampled"))),
        ("lilicorr", dict(head_config=dict(walk="exact"), vocab_ids=torch.arange(0, 64, 2))),
        ("lilicorr", dict(head_config=dict(walk="lookahead", hidden_size=0), block_size=2, num_candidates=1)),
    ],
)
def test_draft_models_of_every_kind(head: str, changes: dict[str, Any], looking: Callable[[], set[str]]) -> None:
    target, requests = kernel_target(), requests_of()
    draft_model = kernel_draft_model(target, head, **changes)
    expected = toys.reference_runs(target, draft_model, requests)
    looking()
    assert answers(gpu_engine(target, draft_model), requests) == expected


@pytest.mark.parametrize("changes", [dict(family="llama"), dict(family="qwen2"), dict(head_dim=64), dict(head_dim=128)])
def test_targets_of_every_kind(changes: dict[str, Any], looking: Callable[[], set[str]]) -> None:
    target, requests = kernel_target(**changes), requests_of(4)
    draft_model = kernel_draft_model(target, "argmax")
    expected = toys.reference_runs(target, draft_model, requests)
    looking()
    assert answers(gpu_engine(target, draft_model), requests) == expected


def test_tables_that_end_in_rows_of_no_token(looking: Callable[[], set[str]]) -> None:
    target, requests = kernel_target(), requests_of(6)
    draft_model = kernel_draft_model(target, "lilicorr")
    draft_model.num_ids = 61
    expected = toys.reference_runs(target, draft_model, requests)
    looking()
    assert answers(gpu_engine(target, draft_model), requests) == expected


@pytest.mark.parametrize("head", [None, *HEADS])
def test_half_precision(head: str | None, looking: Callable[[], set[str]]) -> None:
    """Types are those that the kernels make; with passes of one shape an answer has the same bits in any company."""
    target, requests = kernel_target(dtype=torch.bfloat16), requests_of(6)
    draft_model = kernel_draft_model(target, head) if head else None
    looking()
    together = answers(gpu_engine(target, draft_model, deterministic=True), requests)
    alone = gpu_engine(target, draft_model, deterministic=True)
    assert {request.id: answers(alone, [request])[request.id] for request in requests} == together


def interpreted_is_the_reference(
    head: str | None, requests: list[Request], start: Callable[[], None], block_size: int, **config: Any
) -> None:
    """The kernels themselves give the reference's tokens."""
    target = kernel_target(num_layers=1)
    draft_model = kernel_draft_model(target, head, block_size=block_size) if head else None
    expected = toys.reference_runs(target, draft_model, requests)
    start()
    engine = toys.toy_engine(target, draft_model, max_running=3, max_model_len=144, prefill_tokens=64, **config)
    with numpy.errstate(divide="ignore", invalid="ignore"):  # the interpreter's log(0)
        assert answers(engine, requests) == expected


@pytest.mark.parametrize("head", [None, *HEADS])
def test_the_kernels_of_every_head(head: str | None, on_gpu: Callable[[], None]) -> None:
    settings = SETTINGS[:2]
    requests = toys.requests_of([[5, 3], [1, 4, 2]], lambda i: SamplingParams(4, seed=i, **settings[i]))
    interpreted_is_the_reference(head, requests, on_gpu, 3)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head", [None, *HEADS])
def test_the_kernels_over_pages(head: str | None, deterministic: bool, on_gpu: Callable[[], None]) -> None:
    config = dict(deterministic=deterministic, deterministic_width=8)
    interpreted_is_the_reference(head, requests_of(6), on_gpu, 4, num_pages=4, **config)


def test_heads_of_other_widths_are_refused(looking: Callable[[], set[str]]) -> None:
    target = toys.toy_target()
    looking()
    with pytest.raises(ValueError, match="a head on a GPU must be 32, 64 or 128, got 8"):
        toys.toy_engine(target, None)


def test_what_a_kernel_would_misread_is_seen() -> None:
    executor = GridExecutor(accept._verdict_kernel.fn, accept._verdict_kernel.arg_names, (1,))
    x = torch.zeros(4, dtype=torch.int64)
    look_at_launch(executor, x, x, x, x, 2, 2)
    with pytest.raises(AssertionError, match="_verdict_kernel.*drawn"):
        look_at_launch(executor, torch.zeros(4, 3)[:, 0], x, x, x, 2, 2)
