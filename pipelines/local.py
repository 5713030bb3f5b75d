"""A Ray head on this machine for `make demo`, and the connection every stage makes to a Ray cluster.

Place in the flow: `make demo` = `python pipelines/local.py demo --profile P`: start a head bound to the
loopback interface, or use ours that runs already, and give `pipelines/full.py` to it as a job (`job.py`). `make
demo-stop` ends the processes that were started here and no others (`ray stop` would end everybody's).

    python pipelines/local.py start | demo [options of full.py] | status | env | stop
    eval "$(python pipelines/local.py env)"        # lets the `ray` and `serve` commands talk to this head

Everything about the head is in `<run dir>/.ray`: `head.json`, `head.log` and the token (mode 0600) that
jobs, the dashboard and the Serve API ask for. The endpoint itself needs no token.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lilicorr.folder import ASIDE
from lilicorr.provenance import write_json
from lilicorr.wheels import CACHE_VARIABLE, cache_dir
from pipelines.errors import one_line_errors
from pipelines.lock import process_start
from pipelines.process import descendants, identity, is_alive

ROOT = Path(__file__).resolve().parents[1]
FREE_PORTS = range(20_000, 32_000)  # outside Ray's worker ports (10002-19999) and the kernel's ephemeral ones
MIN_CPUS = 4  # logical: Serve, a trainer, its worker and an actor have to fit on a machine of two cores
OBJECT_STORE_BYTES = 500_000_000
SERVE_PORT = 8000  # of Ray Serve and of the profiles
START_TIMEOUT_S = 180.0
ANSWER_POLL_S = 0.5
STOP_TIMEOUT_S = 10.0
OTHER_TOKEN = "RAY_AUTH_TOKEN"  # the user's for another cluster; for Ray it comes before RAY_AUTH_TOKEN_PATH
# Tensors of a step are made and freed all the time: kept in the process and on huge pages, they cost no page faults.
ALLOCATOR = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.arena_max=1"
)
MAX_TEMPORARY_BYTES = 20  # of the path of the default temporary folder


def environment(folder: Path) -> dict[str, str]:
    """The variables under which Ray processes and commands of this head run; makes the token if there is none.

    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 is what makes Ray listen on the loopback interface only.
    """
    token = folder / "token"
    if not token.is_file() or token.stat().st_size == 0:
        make_token(token)
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # the default of 15 starves the workers on a machine with other work
    }


def make_token(path: Path) -> None:
    """Put a new token at `path`, readable by its user only; one that another process has put there first stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(prefix=ASIDE, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        if path.is_file() and path.stat().st_size == 0:
            path.unlink(missing_ok=True)  # left by an earlier version that was killed, or by a full disk
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        os.unlink(aside)


def use_head(folder: Path) -> None:
    """Set the variables of `environment` in this process, for our head: it takes its own token and no other."""
    os.environ.update(environment(folder))
    os.environ.pop(OTHER_TOKEN, None)


def cache_variable() -> dict[str, str]:
    """The variable that moves the cache with its folder in full, as workers need it; nothing where it is not set."""
    return {CACHE_VARIABLE: str(cache_dir())} if os.environ.get(CACHE_VARIABLE) else {}


def set_environment(run_directory: Path) -> None:
    """Set the variables of `environment` in this process unless it belongs to a cluster (RAY_ADDRESS).

    Ray reads some of them when it is imported, so this has to come first. What is set already stays; only a
    relative folder of the cache is given in full.
    """
    os.environ.update(cache_variable())
    if "RAY_ADDRESS" not in os.environ:
        for name, value in environment(run_directory.parent / ".ray").items():
            os.environ.setdefault(name, value)


def connect(run_directory: Path) -> None:
    """Connect this process to Ray, once: to RAY_ADDRESS, else to our running head, else to an own instance.

    The own instance lives as long as this process. `run_directory` is `<run dir>/<profile>`. A head that is alive and
    busy is waited for, as in `start`.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address is not None and address.startswith(("http://", "https://")):
        raise ValueError(
            f"RAY_ADDRESS={address} is a dashboard, by which one can only deploy: give the cluster's own HOST:PORT, or "
            f"run this there by ray job submit --address {address}"
        )
    set_environment(run_directory)
    folder = run_directory.parent / ".ray"
    head = None if address is not None else living_head(folder)
    if head is not None:
        use_head(folder)  # whatever the user's mode is
    import ray
    from ray._raylet import Config

    if ray.is_initialized():
        return
    Config.initialize("")  # reads the authentication mode again, should Ray have been imported before
    if address is not None:
        try:
            ray.init()
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error
    elif head is not None:
        # Workers that look for "the" cluster of this machine find this one.
        variables = {"RAY_ADDRESS": head["address"], **cache_variable()}
        ray.init(address=head["address"], runtime_env={"env_vars": variables})
    else:
        temporary = temporary_folder()
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        ray.init(
            address="local",
            num_cpus=num_cpus(),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=temporary,
        )


def temporary_folder() -> str:
    """A new folder for Ray, which adds some 65 bytes to it for its sockets, whose paths may have 107 in all."""
    default = tempfile.gettempdir()
    short = len(os.fsencode(default)) <= MAX_TEMPORARY_BYTES
    return tempfile.mkdtemp(prefix="lilicorr-", dir=default if short else "/tmp")


def owns_instance() -> bool:
    """Whether this process is connected to an own Ray instance, which ends with it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray._private.worker.global_worker.node is not None


def num_cpus() -> int:
    """Logical cores for Ray."""
    return max(MIN_CPUS, len(os.sched_getaffinity(0)))


def free_port(taken: set[int]) -> int:
    """A port nobody listens on, added to `taken`; a random one, so that two who look at once find different ones."""
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        if port not in taken and is_free(port):
            taken.add(port)
            return port
    raise RuntimeError(f"no free port in {FREE_PORTS.start}-{FREE_PORTS.stop - 1}")


def is_free(port: int) -> bool:
    """Whether `port` of the loopback interface can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def read_head(folder: Path) -> dict[str, Any] | None:
    """The record of our head while its process lives, else None."""
    path = folder / "head.json"
    if not path.is_file():
        return None
    head = json.loads(path.read_text(encoding="utf-8"))
    return head if is_alive(head["process"]) else None


def living_head(folder: Path) -> dict[str, Any] | None:
    """The record of our head as soon as it answers, None if its process is gone; it may be coming up, or busy.

    Raises RuntimeError if it lives and does not answer within START_TIMEOUT_S.
    """
    head, deadline = read_head(folder), time.monotonic() + START_TIMEOUT_S
    while head is not None and not answers(head["dashboard"], folder):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the Ray head of {folder} is alive (process {head['process']['pid']}), but {head['dashboard']} has "
                f"not answered for {START_TIMEOUT_S:.0f} s; head.log there may say why, `make demo-stop` ends it"
            )
        time.sleep(ANSWER_POLL_S)
        head = read_head(folder)
    return head


def serve_port(run_dir: Path, wished: int) -> int:
    """Where the endpoint of a config with `deploy.port: wished` belongs: where `make demo` moves it, if it does.

    A head that finds SERVE_PORT in use when it starts chooses a free port for the endpoint, and keeps it.
    """
    path = run_dir / ".ray" / "head.json"
    if wished != SERVE_PORT or not path.is_file():
        return wished
    return json.loads(path.read_text(encoding="utf-8")).get("serve_port", wished)


def answers(dashboard: str, folder: Path) -> bool:
    """Whether the dashboard, and with it the job API, answers with our token."""
    token = (folder / "token").read_text(encoding="utf-8")
    request = urllib.request.Request(f"{dashboard}/api/version", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def start(folder: Path) -> dict[str, Any]:
    """Start a head, or find ours running; returns its record once it answers.

    One process at a time starts; another one waits and finds the head. Only a head whose process is gone is cleared
    away. Raises RuntimeError if it does not come up, or is alive and does not answer.
    """
    with one_starter(folder):
        head = living_head(folder)
        if head is not None:
            print(f"using the Ray head that is running: dashboard {head['dashboard']}")
            return head
        stop(folder)  # what a crash may have left of an earlier head
        process, head = launch(folder)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(head["dashboard"], folder):
            if process.poll() is not None or time.monotonic() > deadline:
                text = (folder / "head.log").read_text(encoding="utf-8", errors="replace")
                stop(folder)
                raise RuntimeError(f"the Ray head did not come up:\n{text[-4000:]}")
            time.sleep(ANSWER_POLL_S)
    print(f"started a Ray head: dashboard {head['dashboard']}, token in {folder / 'token'}")
    return head


@contextlib.contextmanager
def one_starter(folder: Path) -> Iterator[None]:
    """Hold the lock under which a head is started or given a job; the system frees it with the process that has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "start.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def launch(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start the process of a head on free ports; returns it and its record, which is written."""
    taken: set[int] = set()
    port, dashboard_port, client_port, *agent_ports = (free_port(taken) for _ in range(7))
    temporary = temporary_folder()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"]
    command += [f"--ray-client-server-port={client_port}"]
    # Ray gives an agent 15 s to say which port it chose, less than it takes to start on a busy machine.
    agents = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
    command += [f"--{agent}-port={number}" for agent, number in zip(agents, agent_ports, strict=True)]
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--num-cpus={num_cpus()}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={temporary}", "--disable-usage-stats"]
    variables = {"GLIBC_TUNABLES": ALLOCATOR, **os.environ, **environment(folder)}  # workers have the head's
    for name in ("RAY_ADDRESS", OTHER_TOKEN):
        variables.pop(name, None)
    with open(folder / "head.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    head = {
        "address": f"127.0.0.1:{port}",
        "dashboard": f"http://127.0.0.1:{dashboard_port}",
        "serve_port": SERVE_PORT if is_free(SERVE_PORT) else free_port(taken),
        "temporary": temporary,
        "process": identity(process.pid),
    }
    write_json(folder / "head.json", head)
    return process, head


def stop(folder: Path) -> int:
    """End the recorded head and the processes it started, nothing else; returns how many were alive."""
    path = folder / "head.json"
    if not path.is_file():
        return 0
    head = json.loads(path.read_text(encoding="utf-8"))
    process = head["process"]
    if process_start(process["pid"]) not in (process["started"], None):
        processes = []  # the machine was restarted, and the id is somebody else's
    else:
        processes = [process, *(identity(pid) for pid in sorted(descendants(process["pid"])))]
    processes = [process for process in processes if is_alive(process)]
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile, here and below
            os.kill(process["pid"], signal.SIGTERM)  # `ray start --block` ends its own children
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(is_alive(p) for p in processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in filter(is_alive, processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["pid"], signal.SIGKILL)
    shutil.rmtree(head["temporary"], ignore_errors=True)
    path.unlink()
    return len(processes)


def main() -> None:
    """The command line; see the module's first lines."""
    parser = argparse.ArgumentParser(description="A Ray head on this machine.")
    parser.add_argument("action", choices=("start", "demo", "status", "env", "stop"))
    parser.add_argument("--run-dir", default=str(ROOT / "runs"))
    options, rest = parser.parse_known_args()
    if rest and options.action != "demo":
        parser.error(f"{options.action} takes no {' '.join(rest)}")
    run_dir = Path(options.run_dir).resolve()
    folder = run_dir / ".ray"
    none = f"no Ray head in {folder}: start one with python pipelines/local.py start, or give --run-dir"
    if options.action in ("start", "demo"):
        with one_line_errors():
            if options.action == "demo":
                from pipelines.job import demo  # which imports this module

                sys.exit(demo(folder, [*rest, "--run-dir", str(run_dir)]))
            start(folder)
    elif options.action == "status":
        head = read_head(folder)
        silent = "" if head is None or answers(head["dashboard"], folder) else ", which does not answer yet"
        print(f"running: dashboard {head['dashboard']}{silent}" if head else none)
    elif options.action == "env":
        head = read_head(folder)
        if head is None:
            print("false")  # for `eval` to end with
            sys.exit(f"error: {none}")
        variables = {**environment(folder), "RAY_ADDRESS": head["address"]}
        variables |= {"RAY_API_SERVER_ADDRESS": head["dashboard"], "RAY_DASHBOARD_ADDRESS": head["dashboard"]}
        print(f"unset {OTHER_TOKEN}")
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
    else:
        print(f"ended {stop(folder)} processes")


if __name__ == "__main__":
    main()
