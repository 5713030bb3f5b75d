"""Other weights by `user_config`: streams go on, what does not fit changes nothing, and Serve restarts no replica."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from fakes import wait_until
from models import DRAFTER, ROOT, replica_pids, running_replicas, save_random_checkpoint
from test_faults import STREAMS, case, read_while  # noqa: F401
from test_load import Case, models  # noqa: F401
from test_metrics import samples

from lilicorr.checkpoint import checkpoint_tensors, load_draft_model
from lilicorr.decode import SamplingParams
from lilicorr.engine.request import Request
from lilicorr.tiny import tiny_target_folder
from pipelines import local
from serve_app.args import AppArgs
from serve_app.controller import Controller
from serve_app.reload import Reloader
from serve_app.replica import Replica, ReplicaDeadError
from serve_app.served_model import open_model


class Opened:
    """A replica over the real engine, and what exchanges its weights."""

    def __init__(self, target: Path, checkpoint: Path, **arguments: Any) -> None:
        arguments = {"engine": {"max_running": 4}} | arguments
        args = AppArgs(checkpoint=str(checkpoint), target=str(target), **arguments)
        self.model, self.engine = open_model(args)
        self.replica = Replica(self.engine, args.max_requests, args.stall_s)
        self.reloader = Reloader(args, self.engine, self.model, self.replica)

    def holds(self, folder: Path) -> bool:
        """Whether the weights are those of a checkpoint."""
        wanted = checkpoint_tensors(load_draft_model(folder, self.engine.target))
        return all(
            (tensor == wanted[name]).all() for name, tensor in checkpoint_tensors(self.engine.draft_model).items()
        )


@pytest.fixture
def opened(models: tuple[Path, Path]) -> Iterator[Opened]:  # noqa: F811
    opened = Opened(*models)
    yield opened
    opened.replica.close()


@pytest.fixture(scope="module")
def other(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A checkpoint of the same kind with other weights."""
    folder = tmp_path_factory.mktemp("other") / "checkpoint"
    save_random_checkpoint(folder, models[0], seed=1)
    return folder


@pytest.mark.parametrize("steps_behind", [0, 1])
def test_a_stream_goes_on_with_the_weights_it_did_not_begin_with(
    models: tuple[Path, Path],  # noqa: F811
    other: Path,
    steps_behind: int,
) -> None:
    opened = Opened(*models, engine={"max_running": 4, "steps_behind": steps_behind})
    request = Request("a", [*b"go on and on"], SamplingParams(200))
    wanted = opened.engine.generate([request.prompt_ids], request.params)[0].token_ids
    before = opened.model.fingerprint

    async def run() -> tuple[list[int], int]:
        token_ids, num_seen = [], None
        ticket = opened.replica.submit([request])
        async for _, chunk in ticket:
            token_ids += chunk.token_ids
            if num_seen is None:
                num_seen = len(token_ids)
                await opened.reloader.apply({"checkpoint": str(other)})
        ticket.close()
        return token_ids, num_seen

    token_ids, num_seen = asyncio.run(run())
    assert token_ids == wanted and num_seen < len(wanted)
    assert opened.holds(other) and not opened.holds(models[1])
    assert opened.model.fingerprint not in ("", before)
    assert opened.reloader.counts == {"applied": 1}
    wait_until(lambda: opened.replica.snapshot().num_finished == {"length": 1})
    assert opened.replica.snapshot().num_preemptions == 0
    histograms = opened.replica.recorder.histograms()
    assert histograms["vllm:request_generation_tokens"].sum == len(wanted)
    opened.replica.close()


def test_the_same_config_twice_changes_the_weights_once(opened: Opened, other: Path) -> None:
    async def run() -> None:
        for version in ("one", "one", "two"):
            await opened.reloader.apply({"checkpoint": str(other), "version": version})

    asyncio.run(run())
    assert opened.reloader.counts == {"applied": 2} and opened.model.fingerprint == "two"


def test_another_checkpoint_of_the_same_version_is_taken(
    opened: Opened,
    models: tuple[Path, Path],  # noqa: F811
    other: Path,
) -> None:
    for checkpoint in (other, models[1]):
        asyncio.run(opened.reloader.apply({"checkpoint": str(checkpoint), "version": "prod"}))
        assert opened.holds(checkpoint) and opened.model.fingerprint == "prod"


def test_without_a_config_the_weights_are_those_of_the_arguments(
    opened: Opened,
    models: tuple[Path, Path],  # noqa: F811
    other: Path,
) -> None:
    before = opened.model.fingerprint
    for user_config in (None, {"checkpoint": str(other)}, None):
        asyncio.run(opened.reloader.apply(user_config))
    assert opened.holds(models[1]) and opened.model.fingerprint == before
    assert opened.reloader.counts == {"applied": 2}


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(
    opened: Opened,
    models: tuple[Path, Path],  # noqa: F811
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hashes = iter(["one", "two"])
    monkeypatch.setattr("serve_app.reload.fingerprint", lambda _: next(hashes))
    asyncio.run(opened.reloader.apply({"checkpoint": str(other)}))
    assert "changed while it was read" in caplog.text and opened.holds(models[1])


def test_whatever_goes_wrong_in_reading_leaves_the_replica_as_it_is(
    opened: Opened,
    models: tuple[Path, Path],  # noqa: F811
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("serve_app.reload.replacement_weights", no_memory)
    asyncio.run(opened.reloader.apply({"checkpoint": str(other)}))
    assert opened.reloader.counts == {"refused": 1} and opened.holds(models[1])


def test_who_waits_for_an_exchange_learns_that_the_decoding_thread_stalls(models: tuple[Path, Path]) -> None:  # noqa: F811
    opened = Opened(*models, stall_s=0.5)
    go_on = threading.Event()
    with pytest.raises(ReplicaDeadError, match="has been in one step"):
        asyncio.run(opened.replica.reload(lambda: go_on.wait(60), "x"))
    go_on.set()
    opened.replica.close()


def test_of_two_changes_at_once_the_later_one_holds(
    opened: Opened,
    models: tuple[Path, Path],  # noqa: F811
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the earlier one takes longer to read."""
    read, delays = opened.reloader._read, iter([0.5, 0.0])

    def read_slowly(user_config: Any) -> Any:
        time.sleep(next(delays))
        return read(user_config)

    monkeypatch.setattr(opened.reloader, "_read", read_slowly)

    async def run() -> None:
        await asyncio.gather(*(opened.reloader.apply({"checkpoint": str(path)}) for path in (other, models[1])))

    asyncio.run(run())
    assert opened.holds(models[1]) and opened.reloader.counts == {"applied": 2}


def test_a_config_that_was_refused_is_tried_again(opened: Opened, other: Path, tmp_path: Path) -> None:
    user_config = {"checkpoint": str(tmp_path / "late")}
    asyncio.run(opened.reloader.apply(user_config))
    shutil.copytree(other, tmp_path / "late")
    asyncio.run(opened.reloader.apply(user_config))
    assert opened.holds(other) and opened.reloader.counts == {"refused": 1, "applied": 1}


def changed(good: Path, folder: Path, name: str, value: Any) -> dict[str, str]:
    """A config that names a copy of a checkpoint in which a field has another value wherever it stands."""

    def change(fields: Any) -> Any:
        items = fields.items() if isinstance(fields, dict) else ()
        return {key: value if key == name else change(old) for key, old in items} if items else fields

    shutil.copytree(good, folder / name)
    for path in (folder / name / "config.json", folder / name / "lilicorr.json"):
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return {"checkpoint": str(folder / name)}


def refusals(target: Path, good: Path, folder: Path) -> list[tuple[Any, str]]:
    """What cannot be applied, and what the log says of it."""
    deeper = tiny_target_folder(folder / "deeper target", num_layers=8)
    save_random_checkpoint(folder / "deeper", deeper, seed=1)
    shutil.copytree(good, folder / "damaged")
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    shutil.copytree(good, folder / "llama")
    info = folder / "llama" / "lilicorr.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"target": {"model_type": "llama"}}))
    wider = DRAFTER.__class__(num_layers=2, block_size=6, num_candidates=3)
    save_random_checkpoint(folder / "wider", target, seed=1, drafter=wider)
    save_random_checkpoint(folder / "argmax", target, seed=1, head="argmax", settings={})
    return [
        ({"checkpoint": str(folder / "damaged")}, "is damaged or cut off"),
        ({"checkpoint": str(folder / "wider")}, "block_size is 6, of the draft model in use it is 4"),
        ({"checkpoint": str(folder / "argmax")}, "head is argmax, of the draft model in use it is lilicorr"),
        (changed(good, folder, "mask_token_id", 260), "mask_token_id is 260, of the draft model in use it is 259"),
        (changed(good, folder, "target_layer_ids", [2, 4]), "target_layer_ids is (2, 4), of the draft model in use"),
        (changed(good, folder, "layout", "anchor_first"), "layout of the head lilicorr must be in_place"),
        (changed(good, folder, "vocab_size", 300), "vocab_size is 300, the target's embedding has 264"),
        ({"checkpoint": str(folder / "deeper")}, "num_target_layers is 8, the target has 6"),
        ({"checkpoint": str(folder / "llama")}, "target.model_type is llama, the target is a qwen3"),
        ({"checkpoint": str(folder / "none")}, "is not a draft model"),
        ({"checkpoints": str(good)}, "checkpoint"),
        ([str(good)], "dict"),
    ]


def test_what_does_not_fit_changes_nothing_and_is_said(
    opened: Opened,
    models: tuple[Path, Path],  # noqa: F811
    other: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = opened.model.fingerprint
    cases = refusals(models[0], other, tmp_path)
    for count, (user_config, message) in enumerate(cases, 1):
        caplog.clear()
        asyncio.run(opened.reloader.apply(user_config))
        assert opened.reloader.counts == {"refused": count}
        assert message in caplog.text and "the weights stay as they are" in caplog.text
    assert opened.holds(models[1]) and opened.model.fingerprint == before
    asyncio.run(opened.reloader.apply({"checkpoint": str(other)}))
    assert opened.holds(other)


def test_a_dead_replica_takes_no_weights(opened: Opened, other: Path) -> None:
    opened.replica.close()
    wait_until(lambda: not opened.replica._thread.is_alive())
    with pytest.raises(ReplicaDeadError):
        asyncio.run(opened.reloader.apply({"checkpoint": str(other)}))


def test_an_exchange_that_breaks_ends_the_replica_and_the_waiting(opened: Opened) -> None:
    def broken() -> None:
        raise RuntimeError("the device is gone")

    with pytest.raises(ReplicaDeadError, match="the device is gone"):
        asyncio.run(opened.replica.reload(broken, "x"))
    with pytest.raises(ReplicaDeadError, match="the device is gone"):
        opened.replica.check()


@pytest.mark.ray
@pytest.mark.slow
def test_serve_changes_weights_under_clients_without_a_new_replica(
    ray_cluster: None,
    models: tuple[Path, Path],  # noqa: F811
    case: Case,  # noqa: F811
    other: Path,
) -> None:
    """Two replicas of a deployed file, of which only `user_config` changes; and one that is refused."""
    from ray import serve

    target, checkpoint = models
    port = local.free_port(set())
    config = yaml.safe_load((ROOT / "serve_app" / "config.manual.yaml").read_text(encoding="utf-8"))
    (application,) = config["applications"]
    args = {"checkpoint": str(checkpoint), "target": str(target), "target_dtype": "float32", "model_name": "tiny"}
    args |= {"max_model_len": 1000, "gpus": 0, "cpus": 0.5, "engine": {"max_running": STREAMS}}
    application["args"] = application["args"] | args
    application["deployments"][0]["num_replicas"] = 2
    application["runtime_env"] = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    config["http_options"]["port"] = port
    url = f"http://127.0.0.1:{port}"

    def reloads(outcome: str) -> float:
        found = samples(httpx2.get(url + "/metrics", timeout=60).text)["lilicorr:weight_reloads_total"]
        return sum(count for labels, count in found if labels["outcome"] == outcome)

    def change(checkpoint: Path) -> None:
        application["deployments"][0]["user_config"] = {"checkpoint": str(checkpoint)}
        Controller().deploy(config)

    def fingerprints() -> set[str]:
        return {httpx2.get(url + "/version", timeout=60).json()["fingerprint"] for _ in range(12)}

    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        Controller().deploy(config)
        wait_until(lambda: len(running_replicas()) == 2, 300)
        before, (old,) = replica_pids(), fingerprints()

        def exchange() -> None:
            change(other)
            wait_until(lambda: reloads("applied") == 2, 120)

        ended = asyncio.run(read_while(url, case, exchange))
        assert len(ended) > STREAMS and not [error for error in ended if error is not None]
        (new,) = fingerprints()
        assert new != old
        change(other / "nothing")
        wait_until(lambda: reloads("refused") == 2, 120)
        assert fingerprints() == {new} and replica_pids() == before
        del application["deployments"][0]["user_config"]
        Controller().deploy(config)
        wait_until(lambda: fingerprints() == {old}, 120)
        assert replica_pids() == before
    finally:
        serve.shutdown()
