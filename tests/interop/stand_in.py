"""One file of a server's package, run without the server.

The head classes of SGLang and vLLM are plain PyTorch, but their files import layers that want a GPU and a started
server. `peer` runs such a file as it is, with stand-ins for what it imports: a linear layer is torch's, a norm is
torch's, Triton is Triton, which interprets kernels on a CPU, and everything else is only there to be named.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn


class Replicated(nn.Linear):
    """A replicated linear layer: SGLang's returns a pair; vLLM's the product where it is asked for no bias."""

    def __init__(self, inner: int, outer: int, return_bias: bool = True, **_: Any) -> None:
        super().__init__(inner, outer)
        self.input_size, self.return_bias, self.quant_method = inner, return_bias, None

    def forward(self, x: Tensor) -> Any:
        product = super().forward(x)
        return (product, None) if self.return_bias else product


class PlainMLP(nn.Module):
    """vLLM's ungated MLP of two layers."""

    def __init__(
        self, config: Any, hidden_size: int, intermediate_size: int, output_size: int | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, output_size or hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


def unchanged(kind: type) -> type:
    """A class decorator that does nothing."""
    return kind


NAMED: dict[str, Any] = {
    "ReplicatedLinear": Replicated,
    "LinearBase": Replicated,
    "RMSNorm": nn.RMSNorm,
    "NemotronHMLP": PlainMLP,
    "support_torch_compile": unchanged,
    "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "maybe_prefix": lambda prefix, name: f"{prefix}.{name}",
    "CUDAGraphMode": SimpleNamespace(NONE=None),
}
TRITON = {"triton": "triton", "tl": "triton.language"}  # imported when a file asks for them


class Imported(ModuleType):
    """A module of the package that is not there: whatever is asked of it exists, classes to inherit from included."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in NAMED:
            return NAMED[name]
        if name in TRITON:
            return importlib.import_module(TRITON[name])
        return type(name, (nn.Module,), {}) if name[0].isupper() else MagicMock(name=name)


class Finder:
    """Answers every import below a package with an `Imported`, but for files that are to be run."""

    def __init__(self, package: str, files: dict[str, Path]) -> None:
        self.package, self.files = package, files

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] != self.package:
            return None
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Imported(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextlib.contextmanager
def peer(package: str, *names: str) -> Iterator[list[ModuleType]]:
    """The modules `names` of an installed package, run from their own files among stand-ins for all the others."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    places = {str(file): Path(str(file.locate())) for file in files or []}
    found = {name: places[name.replace(".", "/") + ".py"] for name in names}
    before, finder = set(sys.modules), Finder(package, found)
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == package:
                del sys.modules[name]


def splat_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter fill a block with one truth value: it makes integers of it, which are no mask."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    splat = interpreter.InterpreterBuilder.create_splat

    def create_splat(builder: Any, shape: Any, value: Any) -> Any:
        handle = splat(builder, shape, value)
        if value.data.dtype == bool:
            handle.data = handle.data.astype(bool)
        return handle

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", create_splat)


def load_head(head: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load a head's tensors, all of them and no others."""
    own = {name.removeprefix("lilicorr."): value for name, value in tensors.items() if name.startswith("lilicorr.")}
    head.load_state_dict(own, strict=True)
    head.eval().materialize_inference_buffers(torch.device("cpu"), torch.float32)
