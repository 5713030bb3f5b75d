"""Triton where it is installed: a CPU build of PyTorch comes without it, and the references need none.

Place in the flow: the kernel files take `jit` and `tl` from here. Without Triton a kernel can be defined and not
launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

try:
    import triton.language as tl
    from triton import jit
except ImportError:
    tl = None

    class _Unavailable:
        """A kernel of a machine without Triton."""

        def __init__(self, kernel: Callable[..., None]) -> None:
            self.name = kernel.__name__

        def __getitem__(self, grid: Any) -> NoReturn:
            raise RuntimeError(f"the kernel {self.name} needs Triton, which is not installed")

    jit = _Unavailable


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


def next_power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


__all__ = ["ceil_div", "jit", "next_power", "tl"]
