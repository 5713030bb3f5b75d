"""The whole path: prompts -> regenerated corpus -> co-trained draft models -> acceptance table -> endpoint.

Place in the flow: the driver behind `make demo`. Stages that are done are skipped and say why, an
interrupted one goes on where it was, and the same command line works on a laptop and on a cluster:

    python pipelines/full.py --profile demo
    ray job submit --working-dir . -- python pipelines/full.py --profile demo --run-dir /shared/runs
    python pipelines/full.py --profile demo --dry-run                  # what would run, and why
    python pipelines/full.py --profile demo --from train --until evaluate --force train
    python pipelines/full.py --profile demo --systems all --until evaluate --tables

Paper: sections 3 and 4, end to end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lilicorr.config import LiLiCorrConfig, PipelineConfig, SystemConfig, from_dict
from pipelines import inputs, local
from pipelines.errors import one_line_errors
from pipelines.stage import VERSIONS, Stage, argument_parser, execute, find, lazily, plan, resolve_config, select
from pipelines.systems import SYSTEMS, chosen, with_systems

ANSWER_TIMEOUT_S = 30.0  # one that is busy answers late, and is not deployed again for it
HEALTH_TIMEOUT_S = 5.0  # in a report, for which nobody waits longer
Change = Callable[[PipelineConfig], PipelineConfig]
REGENERATE_PACE = ("num_actors", "gpus_per_actor", "cpus_per_actor", "max_attempts")
TRAIN_PACE = (
    *("num_workers", "min_workers", "gpus_per_worker", "max_failures"),
    *("checkpoint_steps", "keep_checkpoints", "log_steps"),
    *("trackers", "tracking_project", "attention", "sharding"),
)


def endpoint_problem(config: PipelineConfig) -> str | None:
    """Why the deployed endpoint has to be deployed again, None while it answers with these weights and this code."""
    from pipelines.deploy import deployed_checkpoint, served_version, wanted_version

    endpoint = json.loads((config.directory / "deploy" / "endpoint.json").read_text(encoding="utf-8"))
    try:
        served = served_version(endpoint["url"], config.deploy.api_key_file, ANSWER_TIMEOUT_S)
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return f"the endpoint does not answer at {endpoint['url']}/v1/models: {error!r}"
    if served != endpoint["version"]:
        return f"something else is served at {endpoint['url']} now"
    if not deployed_checkpoint(config).is_dir():
        return f"run {config.deploy.run} is not trained any more"
    wanted = wanted_version(config)
    if served != wanted:
        return f"weights or code changed: version {served} is served, {wanted} is here"
    port, wished = urllib.parse.urlsplit(endpoint["url"]).port, config.deploy.port
    if port == local.serve_port(Path(config.run_dir), wished):
        return None
    return f"the endpoint listens on port {port}, deploy.port is {wished}"


def endpoint_report(config: PipelineConfig) -> str:
    """The endpoint's base URL for clients of OpenAI, its model, and whether it answers."""
    path = config.directory / "deploy" / "endpoint.json"
    if not path.is_file():
        return "endpoint: none yet"
    endpoint = json.loads(path.read_text(encoding="utf-8"))
    text, url = f"endpoint: {endpoint['url']}/v1, model {endpoint['model']}", f"{endpoint['url']}/health"
    port, wished = urllib.parse.urlsplit(endpoint["url"]).port, config.deploy.port
    if port != wished and port == local.serve_port(Path(config.run_dir), wished):
        text += f" (port {wished} was in use when the Ray head started)"
    try:
        with urllib.request.urlopen(url, timeout=HEALTH_TIMEOUT_S):
            return f"{text}: answers"
    except (OSError, http.client.HTTPException) as error:
        return f"{text}: does not answer at {url} ({error})"


def _stage(name: str, fields: tuple[str, ...], **more: Any) -> Stage:
    """The stage of `pipelines/<name>.py` in its present version."""
    hooks = {"check": getattr(inputs, name), "sources": inputs.SOURCES.get(name)}
    return Stage(name, lazily(name), fields, version=VERSIONS[name], **hooks, **more)


STAGES = (
    _stage("prepare", ("target", "prompts", "evaluate.sets")),
    _stage(
        "regenerate",
        ("target", "regenerate"),
        inputs=("prepare",),
        ignored=tuple(f"regenerate.{key}" for key in REGENERATE_PACE),
    ),
    _stage(
        "train",
        ("target", "train"),
        inputs=("prepare", "regenerate"),
        ignored=tuple(f"train.{key}" for key in TRAIN_PACE),
    ),
    _stage("evaluate", ("target", "evaluate"), inputs=("prepare", "train")),
    # It needs a cluster that outlives this process, and finds or starts one itself. Where it listens is compared with
    # the endpoint, not with an earlier config: `make demo` may have had to move it.
    _stage(
        "deploy",
        ("target", "deploy"),
        inputs=("prepare", "train"),
        ignored=("deploy.port",),
        problem=endpoint_problem,
        report=endpoint_report,
    ),
)


ABLATION = "lilicorr_no_distractor"


def with_ablations(config: PipelineConfig) -> PipelineConfig:
    """Add the run of Table 11 (Appendix C): LiLiCorr without the distractor penalty of Eq. (4).

    The weight of the head's objective in Eq. (7) is gamma * (1 + lambda) with the penalty; without it, gamma is
    raised to that. Raises ValueError if the profile has no run `lilicorr`.
    """
    if "lilicorr" not in config.train.runs:
        raise ValueError(f"ablations need a run named lilicorr; the runs are {', '.join(config.train.runs)}")
    run = config.train.runs["lilicorr"]
    full = from_dict(LiLiCorrConfig, run.head_config)
    weights = {"head_weight": full.head_weight * (1 + full.distractor_weight), "distractor_weight": 0.0}
    without = replace(run, head_config={**run.head_config, **weights})
    train = replace(config.train, runs={**config.train.runs, ABLATION: without})
    systems = {**config.evaluate.systems, ABLATION: SystemConfig(run=ABLATION, only="greedy")}
    return replace(config, train=train, evaluate=replace(config.evaluate, systems=systems))


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Change]:
    """The options, and what they change in a profile's config."""
    parser = argument_parser("Run the whole pipeline, or a part of it.")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="take earlier stages as they are")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="stop after this stage")
    parser.add_argument("--force", action="append", default=[], metavar="STAGE", help="start this stage over")
    parser.add_argument("--ablations", action="store_true", help="train and evaluate the run of Table 11 besides")
    parser.add_argument("--systems", metavar="NAMES", help=f"all, or some of {','.join(SYSTEMS)}, at equal budget")
    parser.add_argument("--tables", action="store_true", help="write evaluate/tables.md, in the form of the paper's")
    arguments = parser.parse_args(argv)
    try:
        arguments.stages = select(STAGES, arguments.first, arguments.last)
        arguments.force = [select(arguments.stages, name, name)[0].name for name in arguments.force]
        if arguments.tables and "evaluate" not in [stage.name for stage in arguments.stages]:
            raise ValueError("--tables is made by the stage evaluate, which is left out")
    except ValueError as error:
        parser.error(str(error))

    def change(config: PipelineConfig) -> PipelineConfig:
        if arguments.systems:
            config = with_systems(config, chosen(arguments.systems))
        return with_ablations(config) if arguments.ablations else config

    return arguments, change


def check_options(argv: Sequence[str]) -> None:
    """Raise what `main` would raise for these options before any stage; nothing is started or written."""
    arguments, change = parse(argv)
    change(resolve_config(arguments))


def main(argv: Sequence[str] | None = None) -> None:
    """Drive the stages the options select, write the tables if asked, print acceptance and how to call the endpoint."""
    arguments, change = parse(argv)
    config = execute(arguments.stages, arguments, arguments.force, change)
    if config is not None:
        if arguments.tables:
            write_tables(config)
        print_results(config, arguments.first)


def write_tables(config: PipelineConfig) -> None:
    """Write the paper's tables beside the results they are made from, as `python -m lilicorr.evaluate` does."""
    from lilicorr import evaluate

    folder = config.directory / "evaluate"
    with one_line_errors():
        evaluate.main(["--table", "all", "--results", str(folder), "--out", str(folder / "tables.md")])


def print_results(config: PipelineConfig, first: str | None = None) -> None:
    """Print the acceptance table, or why it is not this config's, and the curl line of the endpoint, if it answers.

    The stages before `first` count as they are.
    """
    results = config.directory / "evaluate" / "results.json"
    if results.is_file():
        evaluate = find(STAGES, "evaluate")
        begin = STAGES.index(find(STAGES, first)) if first else 0
        decision = plan([*STAGES[begin : STAGES.index(evaluate)], evaluate], config)[-1]
        if decision.runs:
            print(f"evaluate: to do: {decision.reason}")
        else:
            from lilicorr.summary import print_table

            print_table(json.loads(results.read_text(encoding="utf-8")))
    endpoint = config.directory / "deploy" / "endpoint.json"
    if endpoint.is_file() and endpoint_problem(config) is None:
        print(json.loads(endpoint.read_text(encoding="utf-8"))["curl"])


if __name__ == "__main__":
    main()
