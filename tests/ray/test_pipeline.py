"""The whole pipeline on Ray, its driver killed in every stage: the end is that of a driver that was left alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import test_shards
from lilicorr.config import PipelineConfig
from lilicorr.provenance import sha256_file
from pipelines import local
from pipelines.stage import PROFILES, read_marker

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 600.0
pytestmark = [pytest.mark.ray, pytest.mark.timeout(3600)]

Sign = Callable[[Path], bool]
# What shows that a stage is in the middle of its work, in the run directory.
SIGNS: dict[str, Sign] = {
    "prepare": lambda folder: (folder / "prepare").is_dir(),
    "regenerate": lambda folder: any((folder / "regenerate" / "manifest").glob("*.json")),
    "train": lambda folder: any((folder / "train" / "lilicorr" / "checkpoints").glob("step_*")),
    "evaluate": lambda folder: (folder / "evaluate").is_dir(),
    "deploy": lambda folder: (folder / "deploy" / "serve.yaml").is_file(),
}


def write_profile(path: Path) -> None:
    """The tiny profile with fewer prompts and runs."""
    values = yaml.safe_load((PROFILES / "tiny.yaml").read_text(encoding="utf-8"))
    prompts = [{"messages": [{"role": "user", "content": f"Say {word} twice."}]} for word in "abcdefghijklmnop"]
    source = path.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    values["prompts"] = {"source": str(source), "held_out_fraction": 0.25}
    values["regenerate"] |= {"batch_size": 4, "shard_size": 4, "max_new_tokens": 16}  # shard by shard
    for name in ("trunk", "lilicorr"):
        values["train"]["runs"][name]["steps"] = 6
    del values["train"]["runs"]["dflash"]
    values["train"]["checkpoint_steps"] = 2
    values["evaluate"] |= {"max_new_tokens": 16, "systems": {"autoregressive": {}, "lilicorr": {"run": "lilicorr"}}}
    values["deploy"]["port"] = local.free_port(set())
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")  # runs are in order


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory with a Ray head of its own."""
    folder = tmp_path_factory.mktemp("full")
    local.start(folder / ".ray")
    write_profile(folder / "killed.yaml")
    (folder / "alone.yaml").write_text((folder / "killed.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    yield folder
    assert local.stop(folder / ".ray") > 0
    shutil.rmtree(folder / "killed")


def driver(run_dir: Path, profile: str, *options: str) -> subprocess.Popen[str]:
    """Start `pipelines/full.py`; its output goes to a file, named by the profile."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"LILICORR_CACHE": str(run_dir / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "pipelines/full.py", "--profile", str(run_dir / f"{profile}.yaml")]
    command += ["--run-dir", str(run_dir), *options]
    with open(run_dir / f"{profile}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log, text=True)


def finish(run_dir: Path, profile: str, *options: str) -> None:
    """Run the driver to its end."""
    process = driver(run_dir, profile, *options)
    try:
        status = process.wait(timeout=WAIT_S)
    finally:
        process.kill()
    assert status == 0, (run_dir / f"{profile}.log").read_text(encoding="utf-8")[-6000:]


def answers(folder: Path) -> dict[str, list[list[int]]]:
    """The tokens of every turn that was regenerated, by conversation."""
    everything = test_shards.content(folder / "regenerate")
    return {cid: [turn["completion_ids"] for turn in turns] for cid, turns in everything.items()}


def test_a_driver_killed_in_every_stage_ends_like_one_left_alone(run_dir: Path) -> None:
    finish(run_dir, "alone", "--until", "train")
    for name, sign in SIGNS.items():
        process = driver(run_dir, "killed")
        deadline = time.monotonic() + WAIT_S
        while not sign(run_dir / "killed"):
            log = (run_dir / "killed.log").read_text(encoding="utf-8")
            assert process.poll() is None and time.monotonic() < deadline, f"no sign of {name}:\n{log[-6000:]}"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (run_dir / "killed" / name / "_SUCCESS.json").exists(), f"{name} was over before it could be killed"
    finish(run_dir, "killed")

    log = (run_dir / "killed.log").read_text(encoding="utf-8")
    assert log.count("taking over the lock") == len(SIGNS)
    summary = json.loads((run_dir / "killed" / "regenerate" / "summary.json").read_text(encoding="utf-8"))
    assert summary["ok"] + summary["dead"] + summary["duplicate"] == summary["planned"]
    assert answers(run_dir / "killed") == answers(run_dir / "alone")
    for run in ("trunk", "lilicorr"):
        for file in ("final/model.safetensors", "checkpoints/step_4/state.safetensors"):  # the last state with moments
            path = Path("train") / run / file
            assert sha256_file(run_dir / "killed" / path) == sha256_file(run_dir / "alone" / path), path
    endpoint = json.loads((run_dir / "killed" / "deploy" / "endpoint.json").read_text(encoding="utf-8"))
    assert endpoint["curl"] in log
    with urllib.request.urlopen(f"{endpoint['url']}/v1/models", timeout=30) as response:
        assert json.load(response)["data"][0]["fingerprint"] == endpoint["version"]


def test_a_second_run_does_nothing(run_dir: Path) -> None:
    config = PipelineConfig(profile="killed", run_dir=str(run_dir))
    before = [read_marker(config, name) for name in SIGNS]
    assert all(before)
    finish(run_dir, "killed")
    assert [read_marker(config, name) for name in SIGNS] == before
    assert (run_dir / "killed.log").read_text(encoding="utf-8").count(": skipped: same hash ") >= len(SIGNS)


def test_a_job_given_from_another_folder_finds_what_it_names(run_dir: Path, tmp_path: Path) -> None:
    """The paths are those of where the command was given, the code is what was uploaded, and no variable says where."""
    write_profile(tmp_path / "given.yaml")
    values = yaml.safe_load((tmp_path / "given.yaml").read_text(encoding="utf-8"))
    values["prompts"]["source"] = "./given.jsonl"
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    variables = {n: value for n, value in os.environ.items() if not n.startswith("RAY_") and n != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "pipelines" / "local.py"), "demo", "--run-dir", str(run_dir)]
    command += ["--profile", "given.yaml", "--until", "prepare"]
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert re.search(r"job lilicorr-\w+: SUCCEEDED", ended.stdout)
    marker = read_marker(PipelineConfig(profile="given", run_dir=str(run_dir)), "prepare")
    assert marker is not None and marker["metrics"]["rows"] == 16
