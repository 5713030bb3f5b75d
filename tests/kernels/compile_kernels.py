"""Compile every kernel of the bench for compute capability 9.0 on a machine without a GPU; run by `test_compile`.

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

HOPPER = GPUTarget("cuda", 90, 32)
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
        triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)


def main() -> None:
    JITFunction.run = compile_instead
    kernels.normal = lambda *shape, device, scale=1.0: torch.zeros(shape, dtype=torch.bfloat16)
    for size, rows in ((kernels.TOY, 1), (kernels.GEOMETRY, 1)):
        for make in (kernels.vocabulary_cases, kernels.lattice_cases, kernels.layer_cases):
            for case in make(size, rows, "cpu"):
                case.run()
    print(*sorted({key.partition(" ")[0] for key in compiled}))


if __name__ == "__main__":
    main()
