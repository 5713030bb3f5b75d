"""The Makefile's environments with a Python that only says what it would do: wrong, half made, incomplete, whole."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

# OLD, BROKEN and NO_PIP are what it is asked to be; an environment holds a copy of it.
PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) [ -z "$OLD" ];;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && [ -z "$BROKEN" ];;
  *"import pip"*) [ -z "$NO_PIP" ];;
  *) echo "python $*";;
esac
"""
FOLDERS = {name: f".venv{name.removeprefix('test')}" for name in ("test-vllm", "test-interop", "test-clients")}


def make(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`make` in a folder that has nothing else of the checkout than what decides about environments."""
    python = folder / "python"
    if not python.exists():
        python.write_text(PYTHON)
        python.chmod(0o755)
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-C", str(folder), f"PYTHON={python}", *arguments]
    return subprocess.run(command, env=kept | variables, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(("target", "name"), [("setup", ".venv"), *FOLDERS.items()])
def test_a_wrong_or_half_made_environment_is_told_and_recovered_from(tmp_path: Path, target: str, name: str) -> None:
    folder = tmp_path / name
    old = make(tmp_path, target, OLD="1")
    assert old.returncode != 0 and "is no Python 3.11 or newer; name one that is: PYTHON=python3.12" in old.stderr
    assert not folder.exists()
    half = make(tmp_path, target, BROKEN="1")
    assert half.returncode != 0 and "python3-venv" in half.stderr and not folder.exists()
    whole = make(tmp_path, target)
    assert whole.returncode == 0, whole.stderr
    assert "-m pip install" in whole.stdout and list(folder.glob(".installed-*"))
    for stamp in folder.glob(".installed-*"):
        stamp.unlink()
    for problem in ("OLD", "NO_PIP"):
        wrong = make(tmp_path, target, **{problem: "1"})
        assert wrong.returncode != 0 and f"remove it (rm -rf {name}) and run this again" in wrong.stderr
    assert make(tmp_path, target).returncode == 0


def test_other_projects_kernels_are_interpreted_on_a_machine_with_a_gpu_too(tmp_path: Path) -> None:
    lines = make(tmp_path, "-n", "test-interop").stdout.splitlines()
    assert [line for line in lines if line.startswith("TRITON_INTERPRET=1 ") and "pytest" in line]


def test_the_tables_are_the_pipelines_own(tmp_path: Path) -> None:
    """Where a profile's outputs lie is for the pipeline to know: PROFILE may be a path."""
    done = make(tmp_path, "-n", "tables", "PROFILE=mine.yaml", f"RUNS={tmp_path}/runs")
    assert done.returncode == 0, done.stderr
    assert "--profile mine.yaml --systems all --ablations --tables --until evaluate" in " ".join(done.stdout.split())
    assert "runs/mine.yaml" not in done.stdout
