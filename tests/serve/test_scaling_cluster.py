"""Scaling on a Ray head with token authentication: load raises replicas and quiet lowers them, the command and the page
set them, streams are finished by replicas that go, and no counter falls. This process is no part of the cluster: it
speaks HTTP, as an operator does.

    make test-slow, or pytest -m slow tests/serve/test_scaling_cluster.py
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from fakes import wait_until
from models import ROOT, save_random_checkpoint
from test_metrics import samples

from lilicorr.tiny import tiny_target_folder
from pipelines import local
from ray_variables import RAY_VARIABLES
from serve_app.dashboard import Dashboard
from serve_app.scale import scaling_of, wait_until_scaled

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

KEY = "a key for the test of scaling"
QUESTION = "go on"  # its greedy answer has more than MAX_TOKENS tokens
MAX_TOKENS = 400
PATIENCE_S = 400.0  # a replica takes a minute to start on a machine with other work


@dataclass
class Cluster:
    """A head with the endpoint's config on it."""

    dashboard: Dashboard
    url: str  # of the endpoint
    variables: dict[str, str]  # of Ray's own commands
    configs: dict[str, dict[str, Any]]  # by name of the file

    def scale(self, argument: str) -> str:
        """`python -m serve_app.scale`; returns what it printed."""
        command = [sys.executable, "-m", "serve_app.scale", argument, "--address", self.dashboard.url]
        options = {"env": self.variables, "cwd": ROOT, "capture_output": True, "text": True, "timeout": PATIENCE_S}
        done = subprocess.run([*command, "--timeout", str(PATIENCE_S)], **options, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def metrics(self) -> str:
        return httpx2.get(f"{self.url}/metrics", timeout=60).raise_for_status().text

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {scaling_of(self.dashboard.details())}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    target = tiny_target_folder(folder / "target")
    save_random_checkpoint(folder / "checkpoint", target, seed=0)
    (folder / "key").write_text(KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in RAY_VARIABLES.items():
            if name != "RAY_AUTH_MODE":
                patch.setenv(name, value)
        patch.setenv("RAY_DASHBOARD_STARTUP_TIMEOUT_S", "300")
        patch.setattr(local, "START_TIMEOUT_S", PATIENCE_S)
        head = local.start(folder / ".ray")
    try:
        variables = local.environment(folder / ".ray")
        dashboard = Dashboard(head["dashboard"], Path(variables["RAY_AUTH_TOKEN_PATH"]).read_text())
        port = local.free_port(set())
        args = {"checkpoint": str(folder / "checkpoint"), "target": str(target), "admin_key_file": str(folder / "key")}
        args |= {"target_dtype": "float32", "model_name": "tiny", "max_model_len": 600, "gpus": 0, "cpus": 0.5}
        args |= {"engine": {"max_running": 1, "num_pages": 40}}
        # Serve looks more often than on a real cluster, for what the replicas report more often.
        often = {"PYTHONPATH": str(ROOT), "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
        configs = {}
        for name in ("config.yaml", "config.manual.yaml"):
            config = yaml.safe_load((ROOT / "serve_app" / name).read_text(encoding="utf-8"))
            (application,) = config["applications"]
            application["args"] |= args
            application["runtime_env"] = {"env_vars": often}
            config["http_options"]["port"] = port
            scaling = application["deployments"][0].get("autoscaling_config")
            if scaling is not None:
                fast = {"look_back_period_s": 2.0, "upscale_delay_s": 0.5, "downscale_delay_s": 4.0}
                scaling |= {"max_replicas": 2, **fast}
            configs[name] = config
        wait_until(lambda: answers(dashboard), PATIENCE_S)
        yield Cluster(dashboard, f"http://127.0.0.1:{port}", {**os.environ, **RAY_VARIABLES, **variables}, configs)
    finally:
        local.stop(folder / ".ray")


def answers(dashboard: Dashboard) -> bool:
    """A dashboard that is up may still take its time to find the cluster behind it."""
    try:
        dashboard.details()
    except RuntimeError:
        return False
    return True


@dataclass
class Load:
    """Clients that stream the same answer again and again, each until it is told to stop."""

    url: str
    texts: list[str] = field(default_factory=list)  # of whole answers
    problems: list[str] = field(default_factory=list)
    going: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    @contextlib.contextmanager
    def of(self, clients: int) -> Iterator[None]:
        """While it lasts there are so many clients; it ends when each has its last answer."""
        self.going.set()
        self.threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]
        for thread in self.threads:
            thread.start()
        try:
            yield
        finally:
            self.going.clear()
            for thread in self.threads:
                thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self.threads)

    def _client(self) -> None:
        while self.going.is_set():
            try:
                self.texts.append(stream(self.url))
            except Exception as error:
                self.problems.append(repr(error))
                return


def stream(url: str) -> str:
    """One whole streamed answer of MAX_TOKENS tokens."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    body |= {"max_tokens": MAX_TOKENS, "stream_options": {"include_usage": True}}
    events = []
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
    assert events[-1] == "[DONE]", events[-1]
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == MAX_TOKENS, chunks[-1]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def tokens(text: str) -> dict[str, float]:
    """Tokens of answers by replica."""
    return {labels["replica"]: value for labels, value in samples(text)["vllm:generation_tokens_total"]}


def sum_of(counts: dict[str, float]) -> float:
    return sum(counts.values())


def running_by_replica(text: str) -> dict[str, float]:
    return {labels["replica"]: value for labels, value in samples(text)["vllm:num_requests_running"]}


def test_load_raises_replicas_quiet_lowers_them_and_streams_drain(cluster: Cluster) -> None:
    dashboard = cluster.dashboard
    dashboard.deploy(cluster.configs["config.yaml"])
    cluster.until(lambda: "lilicorr" in dashboard.details()["applications"], "deploying")
    cluster.until(lambda: scaling_of_or_none(dashboard) == 1, "the first replica")
    expected = stream(cluster.url)

    load = Load(cluster.url)
    with load.of(4):  # one row: one runs, three wait
        assert wait_until_scaled(dashboard, 2, 2, PATIENCE_S).kind == "autoscaled"
        cluster.until(lambda: sorted(running_by_replica(cluster.metrics()).values()) == [1, 1], "both decode")
    assert not load.problems and set(load.texts) == {expected}
    assert wait_until_scaled(dashboard, 1, 1, PATIENCE_S).kind == "autoscaled"  # nobody told it to

    cluster.scale("2")
    assert scaling_of(dashboard.details()).minimum == 2
    load, seen = Load(cluster.url), [tokens(cluster.metrics())]
    with load.of(4):
        cluster.until(lambda: sorted(running_by_replica(cluster.metrics()).values()) == [1, 1], "both decode")
        cluster.scale("1")  # one of the two replicas goes, with a stream on it and perhaps another one waiting

        def alone() -> bool:
            seen.append(tokens(cluster.metrics()))
            return scaling_of(dashboard.details()).states == {"RUNNING": 1}

        cluster.until(alone, "the other one ends")
    assert not load.problems and set(load.texts) == {expected}
    seen.append(tokens(cluster.metrics()))
    assert seen == sorted(seen, key=sum_of)
    each = seen[-1]
    assert sum_of(each) - sum_of(seen[0]) == len(load.texts) * MAX_TOKENS  # also of the one that is no more
    assert len(each) >= 3 and all(count % MAX_TOKENS == 0 for count in each.values())  # whole answers, every one

    cluster.scale("1..2")
    after = scaling_of(dashboard.details())
    assert (after.kind, after.minimum, after.maximum) == ("autoscaled", 1, 2)


def scaling_of_or_none(dashboard: Dashboard) -> int | None:
    """Running replicas, None before the deployment is there."""
    try:
        now = scaling_of(dashboard.details())
    except ValueError:
        return None
    assert now.status != "DEPLOY_FAILED", now
    return now.running


def test_an_externally_scaled_endpoint_by_command_and_by_page(cluster: Cluster) -> None:
    cluster.dashboard.deploy(cluster.configs["config.manual.yaml"])
    cluster.until(lambda: scaling_of_or_none(cluster.dashboard) == 1, "the first replica")
    cluster.until(lambda: httpx2.get(f"{cluster.url}/health", timeout=60).status_code == 200, "serving")
    assert scaling_of(cluster.dashboard.details()).kind == "external"
    cluster.scale("2")
    state = httpx2.get(f"{cluster.url}/ui/state", timeout=60).json()
    assert state["scaling"]["kind"] == "external" and state["scaling"]["enabled"]
    assert (state["replicas"]["running"], state["replicas"]["wanted"]) == (2, 2)
    cluster.until(
        lambda: len(httpx2.get(f"{cluster.url}/ui/state", timeout=60).json()["replicas"]["list"]) == 2, "both report"
    )
    wrong = httpx2.post(f"{cluster.url}/ui/replicas", json={"replicas": 1}, headers={"x-admin-key": "no"}, timeout=60)
    assert wrong.status_code == 401
    right = httpx2.post(f"{cluster.url}/ui/replicas", json={"replicas": 1}, headers={"x-admin-key": KEY}, timeout=60)
    assert right.status_code == 202, right.text
    assert wait_until_scaled(cluster.dashboard, 1, 1, PATIENCE_S).running == 1
    before = copy.deepcopy(cluster.dashboard.details()["applications"]["lilicorr"]["deployed_app_config"])
    assert before["deployments"] == cluster.configs["config.manual.yaml"]["applications"][0]["deployments"]


def test_weights_of_another_target_fail_the_deployment_and_stop_nobody(cluster: Cluster) -> None:
    """The checkpoint's mask token is not the one that the file asks for."""
    dashboard, right = cluster.dashboard, cluster.configs["config.manual.yaml"]
    dashboard.deploy(right)
    cluster.until(lambda: scaling_of_or_none(dashboard) == 1, "the first replica")
    expected, before = stream(cluster.url), running_by_replica(cluster.metrics()).keys()
    wrong = copy.deepcopy(right)
    wrong["applications"][0]["args"]["mask_token_id"] = 260
    load = Load(cluster.url)
    with load.of(2):
        dashboard.deploy(wrong)
        cluster.until(lambda: application(cluster)["status"] == "DEPLOY_FAILED", "the refusal")
        assert "mask_token_id is 259, the target's is set to 260" in application(cluster)["message"]
    assert not load.problems and set(load.texts) == {expected}
    assert running_by_replica(cluster.metrics()).keys() == before
    dashboard.deploy(right)
    cluster.until(lambda: application(cluster)["status"] == "RUNNING", "the file that was there before")
    assert stream(cluster.url) == expected


def application(cluster: Cluster) -> dict[str, Any]:
    """What Serve says of it."""
    return cluster.dashboard.details()["applications"]["lilicorr"]
