"""Every kernel compiles for a GPU; the machine needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lilicorr.kernels import accept, attention, match_walk, nodes, norm_rope, topk_lse

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.slow
def test_every_kernel_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    files = (accept, attention, match_walk, nodes, norm_rope, topk_lse)
    assert set(done.stdout.split()) == {name for file in files for name in vars(file) if name.endswith("_kernel")}
