"""Milliseconds of every stage of one block, for every head: the paper's Table 3, measured on the engine.

    python -m benches.head_latency [--geometry 8b|4b] [--dry] [--output benches/results/head_latency.jsonl]

Stages: `target verify` (the target on [anchor, drafts] and its lm_head), `draft backbone`, `LM head` (the drafter's
logits), `speculative head` (candidates, network and walk; an argmax or a roll-out for the other heads), `accept`, and
what the paper's table does not have: `context` (fused features into the drafter's cache) and `block`, the whole step
with the bookkeeping between the stages. Random weights of Qwen3's sizes, bf16, 1, 8 and 32 rows, greedy, a context of
1,500 positions. `eager` starts call after call, `captured` replays a CUDA graph, which is what the engine does.

First every head's answers in fp32 at a toy size must be those of `generate` on this device, and every graph must give
what the calls gave. `floor_us` is from compulsory bytes (every weight, key, value and logit once, in the model's type)
and operations; that of a block is the sum of its stages'. `--dry` runs a toy size anywhere.

Place in the flow: `head_latency.jsonl` has one row per measurement with provenance; `plots` stacks the stages.
Paper: Table 3.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lilicorr.engine.step as engine_step
from benches import decode
from benches.geometry import SIZES, TOY, ModelSize, here, num_weights, random_draft_model, random_target
from benches.timing import RowFile, capture, device_name, device_times, floor_us, host_times, nothing, summary
from lilicorr.blocks import DraftOutput, Proposal, Verdict
from lilicorr.config import EngineConfig
from lilicorr.draft_model import DraftModel
from lilicorr.engine.engine import Engine
from lilicorr.engine.model import PagedLayer
from lilicorr.engine.pages import num_pages_for
from lilicorr.engine.step import Mix
from lilicorr.heads import HEADS
from lilicorr.target import Target

STAGES = ("target verify", "draft backbone", "LM head", "speculative head", "accept", "context")
VERIFY, BACKBONE, LM_HEAD, HEAD, ACCEPT, CONTEXT = STAGES
BLOCK = "block"
CONTEXT_LENGTH, DRY_CONTEXT_LENGTH = 1500, 70
CONCURRENCIES, DRY_CONCURRENCIES = (1, 8, 32), (1, 2)
REPEATS, DRY_REPEATS = 30, 2
GREEDY = Mix(sampled=False, filtered=False, processed=False, logprobs=False)


@dataclass(frozen=True)
class Stage:
    """One call to time, and what it must move and compute."""

    run: Callable[[], Any]
    num_bytes: int
    num_operations: int


class Block:
    """An engine with every row at the same length, and the calls that its step makes for one block."""

    def __init__(self, target: Target, draft_model: DraftModel, num_rows: int, context: int) -> None:
        max_model_len = context + 64
        num_pages = num_rows * num_pages_for(max_model_len + draft_model.spec.num_slots + 1)
        config = EngineConfig(num_rows, max_model_len=max_model_len, num_pages=num_pages, prefix_cache=False)
        self.engine = Engine(target, draft_model, config)
        self.step, self.state, self.context = self.engine._step, self.engine.state, context
        self.rows = torch.arange(num_rows, device=target.device)
        self.num_pages = self.state.page_table.shape[1]
        self.state.page_table[:num_rows] = torch.arange(num_pages, device=target.device).view(num_rows, -1).int()
        for layer in (*self.step.target.layers, *self.step.drafter.layers):
            layer.k_pages.normal_()
            layer.v_pages.normal_()
        self.state.anchor_context.normal_()
        self.reset()
        self.calls: dict[str, Callable[[], Any]] = {}
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self._record()

    def reset(self) -> None:
        """Back to where the block began."""
        state = self.state
        state.active[self.rows] = True
        state.lengths[self.rows] = self.context
        state.anchor_ids[self.rows] = 1 + self.rows
        state.remaining[self.rows] = 1 << 30

    def run(self) -> Tensor:
        """The whole step."""
        return self.step.decode(self.rows, self.num_pages, GREEDY).runs

    def _record(self) -> None:
        """Run the step once and keep each stage's call with its arguments, so that what is timed is what it does."""
        drafter, target = self.step.drafter, self.step.target
        places = (
            *((target, "forward"), (target, "logits"), (drafter, "backbone"), (drafter.draft_model, "draft_output")),
            *((drafter.head, "propose"), (engine_step, "accept"), (drafter, "append")),
        )
        with ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, self._keeping(name, getattr(owner, name))))
            self.run()
        self.reset()

    def _keeping(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.calls[name], self.arguments[name] = lambda: call(*arguments), arguments
            return call(*arguments)

        return run


def stages_of(block: Block) -> dict[str, Stage]:
    """The stages of a block in the order of Table 3."""
    step, calls = block.step, block.calls
    drafter, target = step.drafter, step.target
    model, (num_rows, num_tokens) = drafter.draft_model, block.arguments["forward"][0].shape
    draft: DraftOutput = block.arguments["propose"][0]
    size, vocab = target.lm_head.element_size(), len(target.lm_head)
    drafted, verified = num_rows * drafter.num_slots, num_rows * num_tokens
    projection = (target.lm_head.numel(), vocab)  # weights; elements a position writes
    with FlopCounterMode(display=False) as counter:
        calls["propose"]()
    head_bytes = size * (draft.logits.numel() + num_weights(read_weights(model.head)))
    context_weights = drafter.fuse.__self__.fc.weight.numel() + drafter.context_weights.numel()
    return {
        VERIFY: Stage(
            lambda: step.target.logits(calls["forward"]().hidden),
            *layers_work(target.layers, num_rows, num_tokens, block.context, *projection),
        ),
        BACKBONE: Stage(
            calls["backbone"], *layers_work(drafter.layers, num_rows, drafter.block_size, block.context, 0, 0)
        ),
        LM_HEAD: Stage(
            calls["draft_output"],
            size * (model.draft_rows.numel() + draft.logits.numel()),
            2 * drafted * model.draft_rows.numel(),
        ),
        HEAD: Stage(calls["propose"], head_bytes, counter.get_total_flops()),
        ACCEPT: Stage(calls["accept"], size * verified * vocab, 0),
        CONTEXT: Stage(
            calls["append"],
            size * (context_weights + block.arguments["append"][0].numel()),
            2 * verified * context_weights,
        ),
    }


def layers_work(
    layers: list[PagedLayer], num_rows: int, num_tokens: int, context: int, num_more: int, written: int
) -> tuple[int, int]:
    """Bytes and operations of a stack of layers, and of `num_more` weights behind it, over a context.

    Every weight is read once, keys and values of every position too; `written` elements of output per position.
    """
    first, size, positions = layers[0], layers[0].qkv.element_size(), num_rows * num_tokens
    per_layer = num_weights([first.qkv, first.output.weight, first.gate_up, first.down.weight])
    weights, seen = len(layers) * per_layer + num_more, context + num_tokens
    cached = 2 * len(layers) * num_rows * seen * first.num_kv_heads * first.head_dim
    attention = 4 * len(layers) * positions * seen * first.num_heads * first.head_dim
    return size * (weights + cached + positions * written), 2 * positions * weights + attention


def read_weights(head: nn.Module) -> list[Tensor]:
    """The head's weights that every block needs whole: those of tables are gathered."""
    modules = [module for module in head.modules() if not isinstance(module, nn.Embedding)]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a stage's result."""
    parts = {
        DraftOutput: lambda: [result.logits],
        Proposal: lambda: [result.token_ids],
        Verdict: lambda: [result.num_accepted, result.next_ids],
    }
    return parts.get(type(result), lambda: [result])()


def agreement(name: str, eager: list[Tensor], captured: list[Tensor]) -> float:
    """Share of equal elements among the integers of a graph's result and of its calls' (1 where there are none).

    Raises RuntimeError where numbers differ. Integers may: a library may take another kernel inside a graph, and the
    ids of random weights nearly tie.
    """
    equal = []
    for first, second in zip(eager, captured, strict=True):
        if not first.is_floating_point():
            equal += (first == second).flatten().tolist()
        elif float((first.double() - second.double()).abs().max()) > 0.02 * max(1.0, float(first.abs().max())):
            raise RuntimeError(f"{name}: the captured graph's result is not that of its calls")
    return sum(equal) / len(equal) if equal else 1.0


def measure(name: str, stage: Stage, repeats: int, reset: Callable[[], None] = nothing) -> list[dict[str, Any]]:
    """The rows of one stage: eager, and captured on a GPU."""
    work = {"stage": name, "bytes": stage.num_bytes, "operations": stage.num_operations}
    if not torch.cuda.is_available():
        return [{**work, "version": "eager", **summary(host_times(stage.run, repeats, reset))}]
    rows = [{**work, "version": "eager", **summary(device_times(stage.run, repeats, reset))}]
    graph, result = capture(stage.run)
    reset()
    eager = [tensor.clone() for tensor in tensors(stage.run())]
    reset()
    graph.replay()
    agreed = agreement(name, eager, tensors(result))
    times = summary(device_times(graph.replay, repeats, reset))
    return [*rows, {**work, "version": "captured", **times, "graph_agreement": agreed}]


def with_floor(row: dict[str, Any], floor: float | None) -> dict[str, Any]:
    """The row with its floor and the share of it that was reached; both None on a CPU."""
    share = None if floor is None else floor / row["median_us"]
    return {**row, "floor_us": floor, "share_of_floor": share}


@torch.no_grad()
def bench(size: ModelSize, dry: bool, file: RowFile) -> None:
    """All rows of one size, head after head; a head that fails is reported, and SystemExit raised in the end."""
    setup, failed = decode.dry_setup(), []
    decode.check(setup, decode.systems(setup))
    target = random_target(size, *here())
    columns = f"{'geometry':10}{'head':10}{'c':>4}  {'stage':18}{'version':10}"
    print(f"{columns}{'median ms':>10}{'floor':>8}{'of floor':>10}")
    for head in HEADS:
        try:
            bench_head(size, target, head, dry, file)
        except Exception:
            traceback.print_exc()
            failed.append(head)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def bench_head(size: ModelSize, target: Target, head: str, dry: bool, file: RowFile) -> None:
    """The rows of one head; writes and prints each as it comes."""
    repeats = DRY_REPEATS if dry else REPEATS
    draft_model = random_draft_model(size, target, head, target.embed.dtype)
    for concurrency in DRY_CONCURRENCIES if dry else CONCURRENCIES:
        block = Block(target, draft_model, concurrency, DRY_CONTEXT_LENGTH if dry else CONTEXT_LENGTH)
        where = {"kind": "head_latency", "geometry": size.name, "head": head, "concurrency": concurrency}
        where |= {"context": block.context, "device": device_name()}
        stages = stages_of(block)
        floors = {name: floor_us(stage.num_bytes, stage.num_operations) for name, stage in stages.items()}
        rows = [row for name, stage in stages.items() for row in measure(name, stage, repeats)]
        work = [sum(values) for values in zip(*((s.num_bytes, s.num_operations) for s in stages.values()))]
        rows += measure(BLOCK, Stage(block.run, *work), repeats, block.reset)
        floors[BLOCK] = None if None in floors.values() else sum(floors.values())
        for row in rows:
            print(line(file.add(with_floor({**where, **row}, floors[row["stage"]]))), flush=True)


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    floor, share = "-", "-"
    if row["floor_us"] is not None:
        floor, share = f"{row['floor_us'] / 1000:.3f}", f"{row['share_of_floor']:.0%}"
    what = f"{row['geometry']:10}{row['head']:10}{row['concurrency']:4}  {row['stage']:18}{row['version']:10}"
    return f"{what}{row['median_us'] / 1000:10.3f}{floor:>8}{share:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=SIZES, default="8b")
    parser.add_argument("--dry", action="store_true", help="a toy size, on any machine")
    parser.add_argument("--output", type=Path, help="a .jsonl file that the rows are appended to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry:
        parser.error("no GPU here: the stages are timed on one; --dry runs them anywhere at a toy size")
    bench(TOY if arguments.dry else SIZES[arguments.geometry], arguments.dry, RowFile(arguments.output))


if __name__ == "__main__":
    main()
