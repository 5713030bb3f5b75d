"""Stages: what each depends on, when it is skipped, and the command line that all of them share.

Place in the flow: `pipelines/full.py` drives `STAGES` in order; `python pipelines/<stage>.py` drives one of
them. A finished stage leaves `<run directory>/<stage>/_SUCCESS.json`, written last. It is skipped as long as
the part of the config it reads, the content of its upstream stages and of the user's files it reads, its own version
and its outputs are those of the marker. A stage that was interrupted goes on from its own unfinished work.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lilicorr.config import PipelineConfig, fingerprint, load_profile, to_dict
from lilicorr.provenance import provenance, write_atomic, write_json
from pipelines import local
from pipelines.errors import one_line_errors
from pipelines.inputs import in_full
from pipelines.lock import Lock, describe, read_owner, why_dead
from pipelines.record import MARKER, changed_outputs, changed_sources, list_outputs, list_sources

logger = logging.getLogger(__name__)

PROFILES = Path(__file__).parent / "profiles"
LOCK = "_lock.json"
# Raised when the code of a stage makes something else of the same input. A stage has its version in the identity of
# whatever it may go on from or keep, so that it never does so with the work of another version.
VERSIONS = {"prepare": 2, "regenerate": 1, "train": 3, "evaluate": 3, "deploy": 2}

Run = Callable[[PipelineConfig], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline."""

    name: str
    run: Run
    fields: tuple[str, ...]  # dotted parts of the config it depends on
    inputs: tuple[str, ...] = ()  # stages whose outputs it reads
    ignored: tuple[str, ...] = ()  # parts of `fields` that change how it runs, not what comes out
    version: int = 1  # see VERSIONS
    sources: Callable[[PipelineConfig], dict[str, Path]] | None = None  # files from outside that it reads, by name
    problem: Callable[[PipelineConfig], str | None] | None = None  # why a finished stage must run again after all
    check: Callable[[PipelineConfig], list[str]] | None = None  # for what in its inputs it would fail
    report: Callable[[PipelineConfig], str] | None = None  # one more line of its status


@dataclass(frozen=True)
class Decision:
    """Whether a stage runs, and why."""

    stage: str
    runs: bool
    reason: str


def lazily(name: str) -> Run:
    """`run` of `pipelines.<name>`, imported when it is called."""
    return lambda config: importlib.import_module(f"pipelines.{name}").run(config)


def relevant(stage: Stage, config: PipelineConfig) -> dict[str, Any]:
    """The config values the stage depends on, by dotted name."""

    return _kept(stage, flatten(to_dict(config)))


def _kept(stage: Stage, values: dict[str, Any]) -> dict[str, Any]:
    """The part of dotted `values` that a stage depends on; a marker may hold what it no longer does."""

    def below(path: str, parents: tuple[str, ...]) -> bool:
        return any(path == parent or path.startswith(parent + ".") for parent in parents)

    return {path: v for path, v in values.items() if below(path, stage.fields) and not below(path, stage.ignored)}


def flatten(node: Any, path: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted name, below `path`."""
    if not isinstance(node, dict) or not node:
        return {path: node}
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        leaves |= flatten(value, f"{path}.{key}" if path else key)
    return leaves


def read_marker(config: PipelineConfig, name: str) -> dict[str, Any] | None:
    """The marker of a finished stage, None if it has not finished."""
    path = config.directory / name / MARKER
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def input_hash(stage: Stage, config: PipelineConfig, upstream: dict[str, str]) -> str:
    """The key of the stage's result: its config, the content of its inputs, its version."""
    return fingerprint(stage.name, stage.version, relevant(stage, config), upstream)


def decide(stage: Stage, config: PipelineConfig, forced: bool = False) -> Decision:
    """Whether the stage has to run, judged by its marker and the markers of its inputs."""
    if forced:
        return Decision(stage.name, True, "forced")
    marker = read_marker(config, stage.name)
    if marker is None:
        folder = config.directory / stage.name
        unfinished = folder.is_dir() and any(folder.iterdir())
        return Decision(stage.name, True, "goes on from unfinished work" if unfinished else "not done yet")
    upstream = {name: _content(config, name) for name in stage.inputs}
    problem = (
        _changed_version(stage, marker)
        or _changed_config(relevant(stage, config), _kept(stage, marker["config"]))
        or _changed_upstream(upstream, marker["upstream"])
        or changed_sources(stage.sources(config) if stage.sources else {}, marker.get("sources", []))
        or changed_outputs(config.directory / stage.name, marker["outputs"])
        or (stage.problem(config) if stage.problem else None)
    )
    if problem:
        return Decision(stage.name, True, problem)
    return Decision(stage.name, False, f"same hash {marker['hash']}, finished {marker['finished']}")


def _content(config: PipelineConfig, name: str) -> str | None:
    marker = read_marker(config, name)
    return marker["content"] if marker else None


def _changed_version(stage: Stage, marker: dict[str, Any]) -> str | None:
    if marker["version"] == stage.version:
        return None
    return f"the stage's code changed: version {marker['version']} -> {stage.version}"


def _changed_config(now: dict[str, Any], before: dict[str, Any]) -> str | None:
    keys = [key for key in sorted(now.keys() | before.keys()) if now.get(key) != before.get(key)]
    changes = [f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in keys]
    return f"config changed: {', '.join(changes)}" if changes else None


def _changed_upstream(now: dict[str, str | None], before: dict[str, str]) -> str | None:
    names = [name for name in now if now[name] != before.get(name)]
    return f"upstream changed: {', '.join(names)}" if names else None


def run_stage(stage: Stage, config: PipelineConfig, forced: bool) -> dict[str, Any]:
    """Run one stage and write its marker; returns the marker.

    Raises ValueError if one of its inputs has not finished.
    """
    upstream = {name: _content(config, name) for name in stage.inputs}
    missing = [name for name, content in upstream.items() if content is None]
    for problem in _missing_inputs(stage, missing, config):
        raise ValueError(problem)
    folder = config.directory / stage.name
    if forced and folder.exists():
        _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    started, clock = _now(), time.monotonic()
    sources = list_sources(stage.sources(config) if stage.sources else {})
    result = stage.run(pinned(config) if "prepare" in stage.inputs else config)
    outputs = list_outputs(folder)
    marker = {
        "stage": stage.name,
        "version": stage.version,
        "hash": input_hash(stage, config, upstream),
        "content": fingerprint([[output["path"], output["sha256"]] for output in outputs]),
        "config": relevant(stage, config),
        "upstream": upstream,
        "sources": sources,
        "started": started,
        "finished": _now(),
        "seconds": round(time.monotonic() - clock, 1),
        "outputs": outputs,
        "metrics": result,
        "provenance": provenance(),
    }
    write_json(folder / MARKER, marker)
    return marker


def pinned(config: PipelineConfig) -> PipelineConfig:
    """The config with the target's revision as `prepare` found it: a branch may mean another commit by now."""
    path = config.directory / "prepare" / "target.json"
    if not path.is_file():  # a stage that needs it says so
        return config
    described = json.loads(path.read_text(encoding="utf-8"))
    return replace(config, target=replace(config.target, revision=described["revision"]))


def _set_aside(folder: Path) -> None:
    """Move a stage's outputs out of the way of a forced run; nothing is deleted."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    aside = folder.parent / "_replaced" / f"{folder.name}-{stamp}"
    aside.parent.mkdir(exist_ok=True)
    folder.rename(aside)
    logger.info("%s: moved the former outputs to %s", folder.name, aside)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def select(stages: Sequence[Stage], first: str | None, last: str | None) -> list[Stage]:
    """The stages from `first` to `last`, both included; None is no limit.

    Raises ValueError for an unknown name or an empty range.
    """
    begin = stages.index(find(stages, first)) if first else 0
    end = stages.index(find(stages, last)) if last else len(stages) - 1
    if begin > end:
        raise ValueError(f"no stage from {first} to {last}: {last} comes first")
    return list(stages[begin : end + 1])


def plan(stages: Sequence[Stage], config: PipelineConfig, forced: Sequence[str] = ()) -> list[Decision]:
    """What `drive` would do now. A stage behind one that runs is decided only when that one has run."""
    decisions: list[Decision] = []
    for stage in stages:
        decision = decide(stage, config, stage.name in forced)
        ahead = [d.stage for d in decisions if d.runs and d.stage in stage.inputs]
        if not decision.runs and ahead:
            decision = Decision(stage.name, True, f"unless {' and '.join(ahead)} makes the same as before")
        decisions.append(decision)
    return decisions


def drive(stages: Sequence[Stage], config: PipelineConfig, forced: Sequence[str] = ()) -> list[Decision]:
    """Run the stages in order under the lock of the run directory, skipping what is done.

    The resolved config is printed and saved first. Raises LockedError while another driver is at work, and ValueError
    before anything runs for what one of the stages to run would fail for.
    """
    with Lock(config.directory / LOCK):
        save_config(config)
        for stage, decision in zip(stages, plan(stages, config, forced), strict=True):
            if decision.runs and stage.check and (problems := stage.check(config)):
                raise ValueError("; ".join(problems))
        decisions = []
        for index, stage in enumerate(stages, start=1):
            decision = decide(stage, config, stage.name in forced)
            decisions.append(decision)
            title = f"[{index}/{len(stages)}] {stage.name}"
            if not decision.runs:
                logger.info("%s: skipped: %s", title, decision.reason)
                continue
            logger.info("%s: runs: %s", title, decision.reason)
            marker = run_stage(stage, config, stage.name in forced)
            logger.info("%s: finished in %s, hash %s", title, duration(marker["seconds"]), marker["hash"])
    return decisions


def save_config(config: PipelineConfig) -> None:
    """Print the resolved config and save it as `<run directory>/config.yaml`."""
    text = yaml.safe_dump(to_dict(config), sort_keys=False)
    logger.info("resolved config of profile %s:\n%s", config.profile, text)
    write_atomic(config.directory / "config.yaml", text.encode())


def duration(seconds: float) -> str:
    """Seconds in words: 7.5 s, 3 min 05 s, 2 h 04 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def print_status(stages: Sequence[Stage], config: PipelineConfig) -> None:
    """Print what is done, what is not and who is at work, from the markers alone."""
    owner = read_owner(config.directory / LOCK)
    at_work = owner is not None and why_dead(owner) is None
    print(f"{config.directory}: {describe(owner) + ' at work' if at_work else 'nobody at work'}")
    for stage, decision in zip(stages, plan(stages, config)):
        marker = read_marker(config, stage.name)
        took = f" in {duration(marker['seconds'])}" if marker else ""
        print(f"  {stage.name:<11} {'to do' if decision.runs else 'done' + took}: {decision.reason}")
        if stage.report:
            print(f"  {'':<11} {stage.report(config)}")


def print_plan(stages: Sequence[Stage], config: PipelineConfig, decisions: Sequence[Decision]) -> bool:
    """Print the plan of a dry run and for what it would fail; returns whether nothing of the kind was found."""
    sound = True
    for stage, decision in zip(stages, decisions, strict=True):
        print(f"  {stage.name:<11} {'runs' if decision.runs else 'skipped'}: {decision.reason}")
        for problem in foresee(stages, stage, config) if decision.runs else ():
            print(f"  {'':<11} would fail: {problem}")
            sound = False
    return sound


def foresee(stages: Sequence[Stage], stage: Stage, config: PipelineConfig) -> list[str]:
    """Why one of the `stages` would fail, as far as that can be told without running those before it."""
    ahead = [other.name for other in stages[: stages.index(stage)]]
    missing = [name for name in stage.inputs if name not in ahead and read_marker(config, name) is None]
    return [*_missing_inputs(stage, missing, config), *(stage.check(config) if stage.check else ())]


def _missing_inputs(stage: Stage, missing: Sequence[str], config: PipelineConfig) -> list[str]:
    return [f"{stage.name} needs {' and '.join(missing)}, not finished in {config.directory}"] if missing else []


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options every stage and the whole pipeline share."""
    parser = argparse.ArgumentParser(description=description)
    known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.yaml")))
    parser.add_argument("--profile", default="demo", help=f"a profile's name ({known}) or the path of a YAML file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--run-dir", help="outputs go to RUN_DIR/PROFILE (default: runs)")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and why, and stop")
    parser.add_argument("--status", action="store_true", help="print what is done, and stop")
    return parser


def resolve_config(arguments: argparse.Namespace) -> PipelineConfig:
    """The config of parsed options, its paths and its run directory in full.

    Raises ValueError for a profile or an override that is wrong, and for a run directory that is a file.
    """
    config = in_full(load_profile(arguments.profile, PROFILES, arguments.overrides))
    config = replace(config, run_dir=str(Path(arguments.run_dir or config.run_dir).resolve()))
    there = next(path for path in (config.directory, *config.directory.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"outputs go to {config.directory}, but {there} is a file; choose another --run-dir")
    return config


def find(stages: Sequence[Stage], name: str) -> Stage:
    """The stage of that name; raises ValueError with the known names for any other."""
    for stage in stages:
        if stage.name == name:
            return stage
    raise ValueError(f"unknown stage {name!r}; the stages are {', '.join(stage.name for stage in stages)}")


def main(run: Run, name: str, argv: Sequence[str] | None = None) -> None:
    """The command line of one stage: drive it alone, on the outputs of the stages before it."""
    from pipelines.full import STAGES

    parser = argument_parser(f"Run the stage {name} alone.")
    parser.add_argument("--force", action="store_true", help="start over; the former outputs are moved aside")
    arguments = parser.parse_args(argv)
    stage = replace(find(STAGES, name), run=run)
    execute([stage], arguments, [name] if arguments.force else [])


def execute(
    stages: Sequence[Stage],
    arguments: argparse.Namespace,
    forced: Sequence[str],
    change: Callable[[PipelineConfig], PipelineConfig] | None = None,
) -> PipelineConfig | None:
    """Do what the options ask for; returns the config if the stages were driven rather than described.

    `change` is applied to the config of the profile and its overrides. A foreseen error ends the process with status 1
    and one line, and so does a dry run that foresees one.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    with one_line_errors():
        config = resolve_config(arguments)
        if change is not None:
            config = change(config)
        if arguments.status:
            print_status(stages, config)
        elif arguments.dry_run:
            if not print_plan(stages, config, plan(stages, config, forced)):
                raise SystemExit(1)
        else:
            local.set_environment(config.directory)
            drive(stages, config, forced)
            return config
    return None
