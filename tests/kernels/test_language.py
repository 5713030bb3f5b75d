"""Without Triton the references work, and a launch says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lilicorr.kernels.language import ceil_div, next_power

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from lilicorr.kernels.topk_lse import topk_lse, topk_lse_triton
logits = torch.tensor([[0.0, 2.0, 1.0]])
assert topk_lse(logits, 2)[1].tolist() == [[1, 2]]
try:
    topk_lse_triton(logits, 2)
except RuntimeError as error:
    print(error)
"""


def test_without_triton_there_are_references_and_a_clear_error():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "the kernel _slice_kernel needs Triton, which is not installed"


def test_whole_pieces_and_powers_of_two():
    assert [ceil_div(count, 4) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power(count) for count in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
