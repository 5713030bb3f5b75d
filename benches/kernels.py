"""Microseconds of every kernel, and the share of what memory and arithmetic of the card allow at best.

    python -m benches.kernels [--dry] [--output benches/results/kernels.jsonl]

On a GPU: the geometry of Qwen3-8B and 4B, 1, 8 and 32 rows, bf16, a context of 1,536 positions. Each call is captured
as a graph, as the engine runs it, and replayed over cold caches between two device events; the median and the 10th
and 90th percentile are kept. Its result must equal the reference's first. `floor_us` is the longer of the compulsory
bytes over the card's bandwidth and the operations over its arithmetic. `--dry` runs a toy size anywhere; on a CPU it
times the reference and Triton's interpreter, which shows that everything runs and nothing about speed.

Place in the flow: docs/serving.md explains the kernels; `kernels.jsonl` has one row per measurement with provenance.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from benches.timing import RowFile, capture, device_name, device_times, floor_us, host_times, summary
from lilicorr.blocks import Proposal, Verdict
from lilicorr.kernels.accept import accept_triton
from lilicorr.kernels.attention import paged_attention_reference, paged_attention_triton
from lilicorr.kernels.match_walk import match_walk_reference, match_walk_triton
from lilicorr.kernels.nodes import NodeWeights, build_nodes_reference, build_nodes_triton
from lilicorr.kernels.norm_rope import norm_rope_reference, norm_rope_triton, rope_tables
from lilicorr.kernels.topk_lse import topk_lse_reference, topk_lse_triton
from lilicorr.lattice import build_lattice
from lilicorr.verify import Sampling, verify

PAGE_SIZE, LOGIT_SCALE, VECTOR_EPS = 64, 8.0, 1e-6
REPEATS, DRY_REPEATS = 50, 3


@dataclass(frozen=True)
class Geometry:
    """The sizes that the kernels see of a target and its draft model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    slots: int = 15
    candidates: int = 8
    head_width: int = 1024
    factor_dim: int = 1024
    context: int = 1536
    prefill: int = 512


GEOMETRY = Geometry("qwen3", 32, 8, 128, 151_936)  # 8B and 4B differ in widths that no kernel here sees
TOY = Geometry("toy", 4, 2, 32, 1100, slots=3, candidates=4, head_width=32, factor_dim=32, context=70, prefill=5)
CONCURRENCIES, DRY_CONCURRENCIES = (1, 8, 32), (1, 2)


@dataclass(frozen=True)
class Case:
    """One thing to time: two versions of the same call, and what it must move and compute."""

    name: str
    run: Callable[[], Any]
    reference: Callable[[], Any]
    num_bytes: int
    num_operations: int = 0


def normal(*shape: int, device: str, scale: float = 1.0) -> Tensor:
    """Random numbers in the type that serving uses there; Triton's interpreter has no products in bf16."""
    return (scale * torch.randn(*shape, device=device)).to(torch.bfloat16 if device == "cuda" else torch.float32)


def vocabulary_cases(size: Geometry, rows: int, device: str) -> list[Case]:
    """Top-K with normaliser over the drafter's logits, and verification of the three kinds over the target's."""
    drafted = normal(rows * size.slots, size.vocab, device=device, scale=3)
    logits = normal(rows, size.slots + 1, size.vocab, device=device, scale=3)
    support = logits[:, :-1].float().topk(size.candidates, dim=-1)
    token_ids = support.indices[..., 0].contiguous()
    numbers = torch.arange(rows, device=device)
    ones = torch.ones(rows, device=device)

    def sampling(temperature: float, top_p: float = 1.0) -> Sampling:
        flags = dict(any_sampled=temperature > 0, any_filtered=top_p < 1)
        return Sampling(temperature * ones, 0 * numbers, top_p * ones, numbers, numbers, **flags)

    point, sparse = Proposal(token_ids), Proposal(token_ids, support.values.softmax(-1), support.indices)
    calls = {
        "accept, greedy": (point, logits, sampling(0.0)),
        "accept, point mass": (point, logits, sampling(1.0)),
        "accept, sparse": (sparse, logits, sampling(1.0)),
        "accept, top-p": (point, logits, sampling(1.0, 0.95)),
    }
    k = size.candidates
    return [
        Case("topk_lse", lambda: topk_lse_triton(drafted, k), lambda: topk_lse_reference(drafted, k), drafted.nbytes),
        *(
            Case(name, lambda call=call: accept_triton(*call), lambda call=call: verify(*call), logits.nbytes)
            for name, call in calls.items()
        ),
    ]


def lattice_cases(size: Geometry, rows: int, device: str) -> list[Case]:
    """Node build from a projected table of every token, and matching with both walks."""
    width, shape = size.head_width, (rows, size.slots, size.candidates)
    token_ids = torch.randint(0, size.vocab, shape, device=device)
    log_probs = torch.randn(shape, device=device).log_softmax(-1).sort(dim=-1, descending=True).values
    table, terms = normal(size.vocab, width, device=device), normal(rows, size.slots, width, device=device)
    weights = NodeWeights(
        norm_weight=normal(5, device=device),
        norm_bias=normal(5, device=device),
        norm_eps=1e-5,
        up_weight=normal(width, 5, device=device),
        up_bias=normal(width, device=device),
        down_weight=normal(width, width, device=device, scale=width**-0.5),
        down_bias=normal(width, device=device),
        slot_embedding=normal(size.slots, width, device=device),
        rank_embedding=normal(size.candidates, width, device=device),
    )
    inputs = (build_lattice(token_ids, log_probs), table, token_ids, terms, weights)
    out, into = (normal(*shape, size.factor_dim, device=device) for _ in range(2))
    vectors = (normal(rows, size.factor_dim, device=device), out, into, LOGIT_SCALE, VECTOR_EPS)
    nodes = token_ids.numel()
    match_work = (vectors[0].nbytes + out.nbytes + into.nbytes, 2 * nodes * size.candidates * size.factor_dim)
    node_bytes = table.element_size() * 2 * nodes * width + weights.down_weight.nbytes + terms.nbytes
    return [
        Case(
            "build_nodes",
            lambda: build_nodes_triton(*inputs),
            lambda: build_nodes_reference(*inputs),
            node_bytes,
            2 * nodes * width * (width + 5),
        ),
        *(
            Case(
                f"match_walk, {walk}",
                lambda walk=walk: match_walk_triton(*vectors, walk),
                lambda walk=walk: match_walk_reference(*vectors, walk),
                *match_work,
            )
            for walk in ("greedy", "exact")
        ),
    ]


def layer_cases(size: Geometry, rows: int, device: str) -> list[Case]:
    """One layer's attention in its three modes, and the norm, rotation and write before it."""
    width, block = size.head_dim, size.slots + 1
    pages_each = -(-(size.context + block) // PAGE_SIZE)
    pages = [normal(rows * pages_each, size.kv_heads, PAGE_SIZE, width, device=device) for _ in range(2)]
    table = torch.randperm(rows * pages_each, device=device).int().view(rows, pages_each)
    lengths = torch.full((rows,), size.context + block, dtype=torch.int32, device=device)
    cases = []
    for name, causal, num_rows, num_queries in (
        ("attention, verify", True, rows, block),
        ("attention, draft", False, rows, block),
        ("attention, prefill", True, 1, size.prefill),
    ):
        queries = normal(num_rows, num_queries, size.heads, width, device=device)
        call = (queries, *pages, table[:num_rows], lengths[:num_rows], causal)
        keys = num_rows * (size.context + block)
        num_bytes = 2 * queries.element_size() * keys * size.kv_heads * width + 2 * queries.nbytes
        seen = keys - num_rows * (num_queries - 1) // 2 if causal else keys  # by a query in the mean
        operations = 4 * num_queries * seen * size.heads * width
        cases.append(
            Case(
                name,
                lambda call=call: paged_attention_triton(*call),
                lambda call=call: paged_attention_reference(*call),
                num_bytes,
                operations,
            )
        )
    tokens = rows * block
    qkv = normal(tokens, size.heads + 2 * size.kv_heads, width, device=device)
    split = qkv.split([size.heads, size.kv_heads, size.kv_heads], dim=1)
    positions = torch.arange(tokens, device=device) % size.context
    tables = rope_tables(10_000.0 ** -(torch.arange(0, width, 2, device=device) / width), size.context)
    norms = (normal(width, device=device), normal(width, device=device))

    def write(version: Callable[..., Tensor | None]) -> tuple[Tensor | None, Tensor, Tensor]:
        return version(*split, positions, *tables, *pages, positions, *norms), *pages

    return [
        *cases,
        Case("norm_rope", lambda: write(norm_rope_triton), lambda: write(norm_rope_reference), 2 * qkv.nbytes),
    ]


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, copied: some calls write into the same ones again."""
    parts = (result.num_accepted, result.next_ids) if isinstance(result, Verdict) else result
    return [part.clone() for part in ([parts] if isinstance(parts, Tensor) else parts)]


def check(case: Case) -> None:
    """Raise AssertionError where the kernel's result is not the reference's."""
    for found, expected in zip(tensors(case.run()), tensors(case.reference()), strict=True):
        if expected.is_floating_point():
            scale = float(expected.float().abs().max())
            error = float((found.float() - expected.float()).abs().max())
            assert error <= 0.02 * max(scale, 1.0), f"{case.name}: off by {error} at a scale of {scale}"
        else:
            assert torch.equal(found, expected), f"{case.name}: integers differ from the reference's"


def measure(case: Case, on_gpu: bool, repeats: int) -> list[dict[str, Any]]:
    """The rows of one case: the kernel on a GPU, or the reference and the interpreted kernel on a CPU."""
    check(case)
    work = {"kernel": case.name, "bytes": case.num_bytes, "operations": case.num_operations}
    if not on_gpu:
        versions = {"reference": case.reference, "interpreted": case.run}
        return [{**work, "version": name, **summary(host_times(run, repeats))} for name, run in versions.items()]
    floor = floor_us(case.num_bytes, case.num_operations)
    graph, _ = capture(case.run)
    times = summary(device_times(graph.replay, repeats))
    share = {"floor_us": floor, "share_of_floor": floor / times["median_us"]}
    return [{**work, "version": "triton", "device": device_name(), **times, **share}]


def bench(dry: bool, file: RowFile) -> None:
    """All measurements; writes and prints each as it comes."""
    on_gpu = torch.cuda.is_available()
    device, repeats = ("cuda" if on_gpu else "cpu"), DRY_REPEATS if dry else REPEATS
    print(
        f"{'geometry':10}{'c':>4}  {'kernel':20}{'version':12}{'median us':>11}{'p10':>10}{'p90':>10}{'of floor':>10}"
    )
    size = TOY if dry else GEOMETRY
    for concurrency in DRY_CONCURRENCIES if dry else CONCURRENCIES:
        torch.manual_seed(0)
        for make in (vocabulary_cases, lattice_cases, layer_cases):
            for case in make(size, concurrency, device):
                for row in measure(case, on_gpu, repeats):
                    row = file.add({"kind": "kernel", "geometry": size.name, "concurrency": concurrency, **row})
                    print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    share = f"{row['share_of_floor']:.0%}" if "share_of_floor" in row else "-"
    times = "".join(f"{row[key]:{width}.1f}" for key, width in (("median_us", 11), ("p10_us", 10), ("p90_us", 10)))
    return f"{row['geometry']:10}{row['concurrency']:4}  {row['kernel']:20}{row['version']:12}{times}{share:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="a toy size, on any machine")
    parser.add_argument("--output", type=Path, help="a .jsonl file that the rows are appended to")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("no GPU here: the kernels are timed on one; --dry runs them anywhere at a toy size")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads it when it is imported, which has happened: start again
        command = [sys.executable, "-m", "benches.kernels", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "TRITON_INTERPRET": "1"})
    with torch.no_grad(), numpy.errstate(divide="ignore"):  # NumPy, the interpreter's, warns of log(0)
        bench(arguments.dry, RowFile(arguments.output))


if __name__ == "__main__":
    main()
