"""Every kernel compiles for a GPU, which the machine needs not have, and stands in the list of docs/serving.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lilicorr.kernels import accept, attention, match_walk, nodes, norm_rope, topk_lse

SCRIPT = Path(__file__).with_name("compile_kernels.py")
FILES = (accept, attention, match_walk, nodes, norm_rope, topk_lse)


@pytest.mark.slow
def test_every_kernel_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {name for file in FILES for name in vars(file) if name.endswith("_kernel")}


def test_every_kernel_stands_in_the_list_with_its_test():
    names = {path.stem for path in Path(accept.__file__).parent.glob("*.py")} - {"__init__", "language"}
    assert {file.__name__.rpartition(".")[2] for file in FILES} == names
    text = (SCRIPT.parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| `(test_\w+\.py)` \|$", text, re.MULTILINE))
    versions = {name.removesuffix("_triton") for file in FILES for name in vars(file) if name.endswith("_triton")}
    assert set(listed) == versions
    for name, test in listed.items():
        assert f"{name}_triton(" in SCRIPT.with_name(test).read_text(encoding="utf-8"), (name, test)
