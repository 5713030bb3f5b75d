"""Compile every kernel for compute capability 9.0 on a machine without a GPU; run by `test_compile`.

As the bench launches it, and as only the engine does: with lengths, without queries, in fp32, for a candidate or 32.
The interpreter takes programs that the compiler refuses, so this is the other half of what can be known without a
GPU. A launch is replaced by a compilation for its arguments; the results are not looked at.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benches import kernels
from lilicorr.blocks import Proposal
from lilicorr.kernels.accept import accept_triton
from lilicorr.kernels.attention import paged_attention_triton
from lilicorr.kernels.norm_rope import norm_rope_triton
from lilicorr.kernels.topk_lse import topk_lse_triton
from lilicorr.verify import Sampling

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # that a block of threads may have there (CUDA programming guide, compute capability 9.0)
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
OPTIONS = ("num_warps",)
compiled: set[str] = set()


def compile_instead(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """What a launch does here."""
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, arguments, strict=True)) | named
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
    key = f"{kernel.__name__} {signature} {constants}"
    if key not in compiled:
        compiled.add(key)
        shared = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options).metadata.shared
        assert shared <= SHARED_BYTES, f"{key} takes {shared} bytes of shared memory, a block has {SHARED_BYTES}"


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """What a launch here needs of a tensor is its shape and its type."""
    return torch.zeros(shape, dtype=dtype)


def layer_launches(size: kernels.Geometry, dtype: torch.dtype) -> None:
    """A layer of Llama, the drafter's context, and passes whose rows have lengths of their own."""
    heads, kv_heads, width = size.heads, size.kv_heads, size.head_dim
    pages, positions = zeros(2, kv_heads, kernels.PAGE_SIZE, width, dtype=dtype), zeros(2)
    tables = 2 * (zeros(9, width // 2, dtype=torch.float32),)
    keys, queries, weight = (
        zeros(*shape, dtype=dtype) for shape in ((2, kv_heads, width), (2, heads, width), (width,))
    )
    for of_queries, weights in ((queries, (None, None)), (None, (None, None)), (None, (None, weight))):
        norm_rope_triton(of_queries, keys, keys, positions, *tables, pages, pages, positions, *weights)
    lengths, table = zeros(2), zeros(2, 3, dtype=torch.int32)
    for num_queries in (1, size.slots + 1, kernels.PAGE_SIZE):
        queries = zeros(2, num_queries, heads, width, dtype=dtype)
        for causal, query_lengths in ((True, None), (True, lengths), (False, None)):
            paged_attention_triton(queries, pages, pages, table, lengths, causal, query_lengths)


def vocabulary_launches(size: kernels.Geometry, dtype: torch.dtype) -> None:
    """The drafter's own probability and the table of log-probabilities; verification of all kinds with lengths."""
    logits, tokens, lengths = zeros(1, 2, size.vocab, dtype=dtype), zeros(1, 1), zeros(1)
    for num_candidates in (1, 32):
        topk_lse_triton(logits[0], num_candidates)
    laws = {count: (zeros(1, 1, count, dtype=torch.float32), zeros(1, 1, count)) for count in (1, size.candidates)}
    for sampled, filtered in ((False, False), (True, False), (True, True)):
        ones = torch.ones(1, dtype=torch.float64)
        sampling = Sampling(
            sampled * ones, lengths, ones, lengths, lengths, sampled, filtered, ones if filtered else None
        )
        accept_triton(Proposal(tokens[:, :0]), logits[:, :1], sampling)
        for law in ((None, None), *laws.values()):
            accept_triton(Proposal(tokens, *law, lengths), logits, sampling)


def main() -> None:
    JITFunction.run = compile_instead
    kernels.normal = lambda *shape, device, scale=1.0: torch.zeros(shape, dtype=torch.bfloat16)
    for size, rows in ((kernels.TOY, 1), (kernels.GEOMETRY, 1)):
        for make in (kernels.vocabulary_cases, kernels.lattice_cases, kernels.layer_cases):
            for case in make(size, rows, "cpu"):
                case.run()
        for dtype in (torch.bfloat16, torch.float32):
            layer_launches(size, dtype)
            vocabulary_launches(size, dtype)
    print(*sorted({key.partition(" ")[0] for key in compiled}))


if __name__ == "__main__":
    main()
