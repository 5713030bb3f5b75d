"""What the kernel tests share: the device, and memory that shows where a kernel wrote nothing.

Without a GPU the Triton versions run in Triton's interpreter, which `tests/conftest.py` turns on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where the kernels under test run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def half() -> torch.dtype:
    """A half precision that matrix products have there: the interpreter multiplies the bits of bfloat16."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """`torch.empty` gives NaN and the largest integers, so an element that a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    with numpy.errstate(divide="ignore", invalid="ignore"):  # the interpreter's log(0), and tests with NaN
        yield
    torch.use_deterministic_algorithms(False)
