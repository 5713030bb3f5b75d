"""What ends a command in one line and what keeps its traceback, also on its way out of a Ray worker."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lilicorr import wheels
from lilicorr.config import PipelineConfig, with_overrides
from lilicorr.heads.base import Head
from pipelines.errors import UserError, explain, one_line_errors, problem_of, sent_home
from pipelines.full import STAGES
from pipelines.lock import LockedError
from pipelines.stage import Stage, foresee

ROOT = Path(__file__).resolve().parents[1]


def caught(function: Callable[..., Any], *arguments: Any) -> Exception:
    with pytest.raises(Exception) as found:
        function(*arguments)
    return found.value


def operation_that_fails() -> None:
    """A ValueError of `list.index` in our own code: a stage that is none of the stages."""
    foresee(STAGES, Stage("x", lambda _: {}, ()), PipelineConfig())


def test_what_our_code_and_the_system_say_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert explain(caught(with_overrides, PipelineConfig(), ["x"])) == "an override has the form a.b=value, got 'x'"
    assert explain(caught(os.mkdir, file / "x")) == f"Not a directory: {file / 'x'}"
    assert explain(caught(open, tmp_path / "none")) == f"No such file or directory: {tmp_path / 'none'}"
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        assert explain(OSError(number, "no room", "file")) == "no room: file"
    assert explain(OSError(errno.ENOSPC, "no room")) == "[Errno 28] no room"
    assert explain(OSError(errno.EIO, "x")) is None
    missing = explain(caught(wheels.wheel, "evals", tmp_path))
    assert missing is not None and "is missing; get it with: python pipelines/fetch.py" in missing


def test_a_full_disk_is_told_by_safetensors_too(tmp_path: Path) -> None:
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert explain(SafetensorError(text)) == text
    assert explain(RuntimeError(text)) is None
    missing = caught(save_file, {"x": torch.zeros(1)}, tmp_path / "no" / "folder")
    assert isinstance(missing, SafetensorError) and "(os error 2)" in str(missing) and explain(missing) is None


def test_faults_are_not_explained() -> None:
    assert isinstance(caught(operation_that_fails), ValueError) and explain(caught(operation_that_fails)) is None
    assert explain(caught(int, "x")) is None  # nobody raised it here on purpose
    assert explain(caught(Head.propose, None, None)) is None  # NotImplementedError is a RuntimeError
    assert explain(KeyError("x")) is None and explain(LockedError("never raised")) is None


def test_a_command_ends_in_one_line_or_with_a_traceback() -> None:
    with pytest.raises(SystemExit, match=r"^error: an override has the form a\.b=value, got 'x'$"), one_line_errors():
        with_overrides(PipelineConfig(), ["x"])
    with pytest.raises(ValueError, match="not in tuple|tuple.index"), one_line_errors():
        operation_that_fails()


def test_a_worker_sends_its_line_home_in_whatever_wraps_it() -> None:
    def worker() -> None:
        with sent_home():
            with_overrides(PipelineConfig(), ["two\nlines"])

    error = caught(worker)
    assert type(error) is UserError and type(pickle.loads(pickle.dumps(error))) is UserError
    text = "".join(traceback.format_exception(error))
    line = r"an override has the form a.b=value, got 'two\nlines'"
    assert explain(error) == explain(RuntimeError(f"The actor died: {text}\nmore of the wrapper")) == line
    with pytest.raises(ValueError, match="tuple"), sent_home():
        operation_that_fails()


def test_problems_are_collected_and_faults_are_not() -> None:
    assert problem_of(with_overrides, PipelineConfig(), []) == []
    assert problem_of(with_overrides, PipelineConfig(), ["x"]) == ["an override has the form a.b=value, got 'x'"]
    with pytest.raises(ValueError, match="tuple"):
        problem_of(operation_that_fails)


@pytest.mark.parametrize(
    ("stage", "options", "line"),
    [
        (
            "prepare",
            ("--set", "prompts.source=nowhere.jsonl"),
            f"prompt file or folder {ROOT}/nowhere.jsonl does not exist",
        ),
        ("train", (), "train needs prepare and regenerate, not finished in "),
        ("train", ("--set", "train.seed=[1"), "train.seed=[1 is not YAML: "),
    ],
)
def test_the_command_of_a_stage(tmp_path: Path, stage: str, options: tuple[str, ...], line: str) -> None:
    command = [sys.executable, f"pipelines/{stage}.py", "--profile", "tiny", "--run-dir", str(tmp_path), *options]
    variables = {**os.environ, "LILICORR_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"error: {line}") and "Traceback" not in done.stderr
