"""Five small stages for tests of the driver; as a script, `pipelines/full.py` with these stages.

Every stage makes `NUM_STEPS` files, each once, from its part of the config and the results of its inputs, and
goes on from the files that are there. The environment variable KILL_AT=stage:step ends the process by SIGKILL
before that step; step NUM_STEPS is after the last one, before the marker.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lilicorr.config import PipelineConfig, fingerprint, to_dict
from lilicorr.provenance import write_atomic
from pipelines import full, stage

NUM_STEPS = 3
NAMES = tuple(real.name for real in full.STAGES)


def fake(real: stage.Stage) -> stage.Stage:
    """The stage with the same dependencies and `steps` as its work."""

    def run(config: PipelineConfig) -> dict[str, Any]:
        return steps(real, config)

    return replace(real, run=run, problem=None, sources=None, check=None)


def steps(real: stage.Stage, config: PipelineConfig) -> dict[str, Any]:
    """Make the files that are missing; each step made is one line in `log.txt` of the run directory."""
    inputs = [sorted(path.read_text() for path in (config.directory / name).glob("step_*")) for name in real.inputs]
    section = [to_dict(config).get(real.name), *inputs]
    for step in range(NUM_STEPS + 1):
        if os.environ.get("KILL_AT") == f"{real.name}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == NUM_STEPS:
            break
        path = config.directory / real.name / f"step_{step}"
        content = fingerprint(section, step)
        if not path.is_file() or path.read_text() != content:
            write_atomic(path, content.encode())
            with open(config.directory / "log.txt", "a", encoding="utf-8") as log:
                log.write(f"{real.name}:{step}\n")
    return {"steps": NUM_STEPS}


def made(directory: Path) -> list[str]:
    """The steps made so far, in order."""
    path = directory / "log.txt"
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


STAGES: Sequence[stage.Stage] = tuple(fake(real) for real in full.STAGES)

if __name__ == "__main__":
    full.STAGES = STAGES
    full.main()
