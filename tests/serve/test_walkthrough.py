"""The commands of docs/serving.md from a checkpoint to an autoscaled endpoint, as far as they need no cluster; and that
the tables of fields and metrics leave nothing out."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import EchoEngine
from fastapi.testclient import TestClient
from models import ROOT
from operated import operated_app

from serve_app.args import AppArgs
from serve_app.metrics import COUNTERS, GAUGES
from serve_app.openapi import POSTS
from serve_app.protocol import IGNORED
from serve_app.recorder import HISTOGRAMS

SERVING, OPERATIONS = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("serving.md", "operations.md"))
HOME = "http://127.0.0.1:8000"


def commands() -> list[str]:
    """The commands of the walk-through, each as one line."""
    (block,) = re.findall(r"```sh\n(.*?)```", SERVING, re.DOTALL)
    return re.sub(r"\\\n|(?<=\|)\n", " ", block).splitlines()


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """What the command writes that makes a configuration for two cores."""
    (command,) = (command for command in commands() if command.startswith("sed "))
    shutil.copytree(ROOT / "serve_app", tmp_path / "serve_app", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "runs").mkdir()
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    return yaml.safe_load((tmp_path / "runs" / "endpoint.yaml").read_text(encoding="utf-8"))


def test_the_configuration_is_what_serve_and_the_application_take(config: dict[str, Any], tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    args, (endpoint,) = AppArgs.model_validate(application["args"]), application["deployments"]
    assert args.checkpoint == str(tmp_path / "runs" / "demo" / "train" / "lilicorr" / "final")
    assert (args.target, args.target_dtype, args.gpus, args.engine_config.max_running) == ("embedded", "float32", 0, 4)
    scaling = endpoint["autoscaling_config"]
    assert scaling["max_replicas"] * args.cpus <= 1 < scaling["max_replicas"]
    given = yaml.safe_load((ROOT / "serve_app" / "config.yaml").read_text(encoding="utf-8"))["applications"][0]
    assert application["autoscaling_policy"] == given["autoscaling_policy"]
    assert application["args"].keys() == given["args"].keys() | {"cpus"}


def test_the_requests_are_answered(config: dict[str, Any]) -> None:
    """By an application of that name: routes, bodies and the metrics that the query asks for."""
    app, replica = operated_app(EchoEngine())
    asked = [command for command in commands() if HOME in command and " -d " in command]
    with TestClient(app) as client:
        for command in asked:
            words = shlex.split(command, comments=True)
            path = next(word for word in words if word.startswith(HOME)).removeprefix(HOME)
            body = json.loads(words[words.index("-d") + 1])
            assert body["model"] == config["applications"][0]["args"]["model_name"]
            assert client.post(path, json=body | {"model": "echo", "max_tokens": 9}).status_code == 200
        (waiting,) = (command for command in commands() if command.startswith("serve deploy"))
        assert client.get(re.search(rf"curl -sf {HOME}(/\w+)", waiting)[1]).status_code == 200
        known = client.get("/metrics").text
    replica.close()
    (query,) = (command for command in commands() if "api/v1/query" in command)
    names = re.findall(r"[a-z]+:[a-z_]+", query.partition("query=")[2])
    assert len(asked) == 2 and names and all(f"\n{name}{{" in known for name in names)


def test_the_files_that_it_names_exist() -> None:
    named = re.findall(r"(?:serve_app|pipelines)/[\w/]+\.\w+", " ".join(commands()))
    assert len(named) > 3 and all((ROOT / name).is_file() for name in named)


def test_every_field_is_in_a_table() -> None:
    for kind, _ in POSTS.values():
        for name in kind.model_fields.keys() | kind.neutral.keys() | IGNORED:
            assert f"`{name}`" in SERVING, f"{kind.__name__}: {name}"


def test_every_metric_is_in_the_table() -> None:
    for key in (*GAUGES, *COUNTERS, *HISTOGRAMS):
        name = key.partition("{")[0]
        short = name.replace("vllm:spec_decode", "...")  # one line has three of them
        assert f"`{name}" in OPERATIONS or f"`{short}" in OPERATIONS, name
