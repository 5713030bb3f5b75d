"""The pipeline as a job of the head on this machine: submitted, and followed to its end.

Place in the flow: `pipelines/local.py demo`, which is `make demo`. The job runs in a copy of the checkout that Ray
uploads, so paths that the user gave relative to the current folder are made absolute before.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lilicorr.config import PipelineConfig, load_profile, to_dict
from lilicorr.provenance import COMMIT_VARIABLE, source_version
from pipelines import full, local
from pipelines.inputs import in_full
from pipelines.lock import describe, read_owner, why_dead
from pipelines.stage import LOCK, PROFILES, flatten, resolve_config
from pipelines.start import absolute

ROOT = local.ROOT
FOLLOW_POLL_S = 1.0
EXCLUDED = (".venv", ".venv-vllm", "runs", ".git", "build", "__pycache__", "*.egg-info")


def demo(folder: Path, arguments: Sequence[str]) -> int:
    """Submit `pipelines/full.py` with `arguments` to our head, follow it; returns 0 if the job succeeded.

    The same job of an earlier command that still goes on is followed instead. Options that the job would refuse are
    refused before a head is started. Raises ValueError where a job with other options has the run directory.
    """
    excluded = [*EXCLUDED, *excluded_run_directory(folder.parent)]
    full.check_options(arguments)
    arguments = [*arguments, *absolute_paths(arguments)]
    head = local.start(folder)
    local.use_head(folder)
    os.environ.pop("RAY_ADDRESS", None)
    from ray.job_submission import JobSubmissionClient  # reads the variables when it is imported

    if head["serve_port"] != local.SERVE_PORT:
        print(f"port {local.SERVE_PORT} was in use when the head started: the endpoint listens on {head['serve_port']}")
        arguments = ["--set", f"deploy.port={head['serve_port']}", *arguments]
    # Ray's own command line would quote it by the rules of Windows, and the job is run by a shell.
    entrypoint = shlex.join([sys.executable, "pipelines/full.py", *arguments])
    client = JobSubmissionClient(head["dashboard"])
    with local.one_starter(folder):  # a job is known to the head only when its upload is over
        job = job_to_follow(client, entrypoint, at_work(arguments))
        if job is None:
            job = f"lilicorr-{uuid.uuid4().hex[:8]}"
            print(f"job {job}: {entrypoint}", flush=True)
            runtime = {"working_dir": str(ROOT), "excludes": excluded, "env_vars": job_variables(job, head)}
            client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=runtime)
        else:
            print(f"job {job} of an earlier command goes on and is followed: {entrypoint}", flush=True)
    try:
        status = asyncio.run(follow(folder, head["dashboard"], job))
    except KeyboardInterrupt:
        print(f"\nthe job {job} goes on; `make demo` follows it again, `make demo-stop` ends it")
        return 130
    print(f"job {job}: {status}; dashboard {head['dashboard']}; `make demo-stop` ends the head and its endpoint")
    return 0 if status == "SUCCEEDED" else 1


def job_variables(job: str, head: dict[str, Any]) -> dict[str, str]:
    """The environment of the job's driver and of its workers."""
    variables = {"COLUMNS": "120", "PYTHONUNBUFFERED": "1", "LILICORR_JOB": job, "RAY_ADDRESS": head["address"]}
    commit, dirty = source_version(ROOT)
    if commit:
        variables[COMMIT_VARIABLE] = f"{commit}+dirty" if dirty else commit
    return variables | local.cache_variable()


def at_work(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The job's driver that has the run directory of these options; None where none has, or they ask for a plan."""
    parsed, _ = full.parse(arguments)
    owner = read_owner(resolve_config(parsed).directory / LOCK)
    if owner is None or why_dead(owner) is not None or parsed.dry_run or parsed.status:
        return None
    return owner if owner["job"] else None


def job_to_follow(client: Any, entrypoint: str, owner: dict[str, Any] | None) -> str | None:
    """The job that does this entrypoint's work already: `owner`'s, or one that has yet to take its run directory.

    Raises ValueError where the owner does other work, or is a driver that the head of this client does not know.
    """
    jobs = {info.submission_id: info.entrypoint for info in client.list_jobs() if not info.status.is_terminal()}
    if owner is None:
        return next((job for job, running in jobs.items() if job and running == entrypoint), None)
    job = owner["job"]
    if job not in jobs:
        raise ValueError(
            f"the run directory is in use by {describe(owner)}, which is none of this head's: wait or end it"
        )
    if jobs[job] != entrypoint:
        raise ValueError(f"job {job} is at work with other options: {jobs[job]}; `make demo-stop` ends it")
    return job


def excluded_run_directory(run_dir: Path) -> list[str]:
    """What keeps a run directory inside the checkout out of the upload, in the form of a .gitignore.

    Raises ValueError where it is the checkout itself or a folder above, which holds more than runs.
    """
    if ROOT.is_relative_to(run_dir):
        raise ValueError(f"outputs cannot go to {run_dir}, it holds the code {ROOT}; choose another --run-dir")
    if not run_dir.is_relative_to(ROOT):
        return []
    return ["/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", run_dir.relative_to(ROOT).as_posix())]


def absolute_paths(arguments: Sequence[str]) -> list[str]:
    """Options to put behind those of `full.py`, which give every relative path in them and in the profile in full."""
    parsed, _ = full.parse(arguments)
    options = []
    if parsed.profile.endswith((".yaml", ".yml")):
        options += ["--profile", absolute(parsed.profile)]
    for key, value in paths_of(load_profile(parsed.profile, PROFILES, parsed.overrides)).items():
        options += ["--set", f"{key}={json.dumps(value)}"]
    return options


def paths_of(config: PipelineConfig) -> dict[str, str | list[str]]:
    """The config's paths in full, by the key that holds them; those that are so already are left out."""
    given = flatten(to_dict(config))
    return {key: value for key, value in flatten(to_dict(in_full(config))).items() if value != given[key]}


async def follow(folder: Path, dashboard: str, job: str) -> str:
    """Print the job's log until the job has ended; returns its status.

    A connection that breaks is made again; raises RuntimeError where the head of `folder` is gone.
    """
    import aiohttp  # both come with Ray's client
    import requests
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(dashboard)
    printed = breaks = 0
    while True:
        seen = 0
        try:
            async for text in client.tail_job_logs(job):
                fresh = text[max(0, printed - seen) :]  # a broken connection starts again at the top
                seen += len(text)
                printed = max(printed, seen)
                print(fresh, end="", flush=True)
            breaks = 0
        except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:  # the first is Ray's own
            breaks += 1
            print(f"\nthe connection to the log of job {job} broke, trying again: {error!r}", flush=True)
        try:
            status = client.get_job_status(job)
            if status.is_terminal() and breaks != 1:  # behind a break once more, for the rest of the log
                return status.value
        except requests.exceptions.ConnectionError as error:
            if local.living_head(folder) is None:
                raise RuntimeError(f"the Ray head of {folder} has ended, and the job {job} with it") from error
        await asyncio.sleep(FOLLOW_POLL_S)
