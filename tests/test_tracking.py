"""Metrics of a training run: the file that is always there, and what each tracker is told."""

from __future__ import annotations

import json
import logging
import struct
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lilicorr.tracking import (
    TRACKERS,
    MetricLog,
    MLflow,
    TensorBoard,
    TrackedRun,
    WandB,
    alarm,
    check_trackers,
    kept_id,
    open_trackers,
)


def tracked(folder: Path, step: int = 0, identity: str = "abc") -> TrackedRun:
    return TrackedRun(folder, "lilicorr", identity, "papers", step, {"head": "lilicorr", "steps": 4})


class Recorder:
    """A tracker that remembers; it fails from its `fails_at`-th call on."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.calls: list[Any] = []
        self.left = fails_at

    def log(self, step: int, values: dict[str, float]) -> None:
        self.left -= 1
        if self.left <= 0:
            raise ConnectionError("no server")
        self.calls.append((step, values))

    def close(self) -> None:
        self.calls.append("closed")


def test_the_log_is_cut_at_the_restored_step(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "run" / "metrics.jsonl", 0)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1.0})
    with log.path.open("a") as file:
        file.write('{"step": 6, "lo')
    log = MetricLog(log.path, 3)
    log.write({"step": 4, "loss": 2.0})
    entries = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4] and entries[-1]["loss"] == 2.0


def test_what_is_no_entry_is_taken_out_and_ends_no_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    entries = [b'{"step": 1, "note": "two\xe2\x80\xa8lines"}', b'{"step": 2}', b'{"step": 9}']
    damaged = [b"", b"null", b"7", b"[]", b"{}", b'{"step": "2"}', b'{"step": NaN}', b'{"step": 2', b"\xff\xfe"]
    path.write_bytes(b"\n".join([entries[0], *damaged, *entries[1:], b'{"step": 2, "torn": "\xc3']))
    MetricLog(path, 2)
    assert path.read_bytes() == b"\n".join([*entries[:2], b""])
    assert caplog.messages == [f"{path}: {len(damaged)} lines are no entries and are taken out"]
    (tmp_path / "wandb_run").write_bytes(b"abc \xff\xfe")
    assert kept_id(tmp_path / "wandb_run", "other") == ""


def test_five_metrics_without_a_checkpoint_have_their_steps_in_the_file_and_at_the_tracker(tmp_path: Path) -> None:
    recorder = Recorder()
    log = MetricLog(tmp_path / "metrics.jsonl", 0, [recorder])
    for step in range(10, 60, 10):
        log.write({"step": step, "loss": 1.0 / step, "epoch": 0})
    log.write({"step": 50, "resumed": True})  # no number: for the file only
    log.close()
    steps = [json.loads(line)["step"] for line in log.path.read_text().splitlines()]
    assert steps == [10, 20, 30, 40, 50, 50]
    assert recorder.calls == [*((s, {"loss": 1.0 / s, "epoch": 0.0}) for s in range(10, 60, 10)), "closed"]


def test_a_tracker_that_fails_is_reported_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = Recorder(), Recorder(fails_at=2)
    log = MetricLog(tmp_path / "metrics.jsonl", 0, [broken, whole])
    with caplog.at_level(logging.ERROR):
        for step in range(1, 5):
            log.write({"step": step, "loss": 1.0})
        log.close()
    assert [record.message.split(" failed")[0] for record in caplog.records] == ["Recorder"]
    assert [step for step, _ in broken.calls] == [1] and len(whole.calls) == 5
    assert len(log.path.read_text().splitlines()) == 4


def test_a_tracker_that_is_away_at_a_restart_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(run: TrackedRun) -> Recorder:
        raise ConnectionError("nobody there")

    monkeypatch.setattr("lilicorr.tracking.TRACKERS", {"mlflow": away, "tensorboard": lambda run: Recorder()})
    run = TrackedRun(tmp_path, "a", "id", "project", 10, {})
    assert len(open_trackers(["mlflow", "tensorboard"], run)) == 1
    assert "mlflow cannot be reached" in caplog.text
    with pytest.raises(ConnectionError):  # at the start the user is there to mend it
        open_trackers(["mlflow"], run._replace(step=0))


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Step, name and value of all events in a folder of TensorBoard."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)  # then its checksum, the event, the event's checksum
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + length
    return found


def test_tensorboard_holds_every_value_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    tracker = TensorBoard(tracked(tmp_path))
    tracker.log(10, {"loss": 2.0, "tau": 1.5})
    tracker.log(20, {"loss": 1.0})
    tracker.close()
    assert scalars(tmp_path / "tensorboard") == [(10, "loss", 2.0), (10, "tau", 1.5), (20, "loss", 1.0)]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeClient:
    """The part of MLflow's client that is used, with a server's memory in the class."""

    experiments: dict[str, str] = {}
    runs: dict[str, dict[str, Any]] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"experiment {len(self.experiments)}")

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> Any:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"of": experiment_id, "name": run_name, "tags": tags, "params": {}, "metrics": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_param(self, run_id: str, key: str, value: Any) -> None:
        self.runs[run_id]["params"][key] = value

    def log_batch(self, run_id: str, metrics: list[tuple[Any, ...]]) -> None:
        self.runs[run_id]["metrics"] += metrics

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["status"] = "FINISHED"


def test_mlflow_goes_on_in_the_run_that_a_kill_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "mlflow", MlflowClient=FakeClient)
    stand_in(monkeypatch, "mlflow.entities", Metric=lambda name, value, time, step: (name, value, step))
    monkeypatch.setattr(FakeClient, "experiments", {})
    monkeypatch.setattr(FakeClient, "runs", {})
    MLflow(tracked(tmp_path)).log(10, {"loss": 2.0})
    again = MLflow(tracked(tmp_path, step=10))
    again.log(20, {"loss": 1.0, "tau": 1.5})
    again.close()
    (run,) = FakeClient.runs.values()
    assert run["metrics"] == [("loss", 2.0, 10), ("loss", 1.0, 20), ("tau", 1.5, 20)]
    assert run["params"] == {"head": "lilicorr", "steps": 4} and run["status"] == "FINISHED"
    MLflow(tracked(tmp_path, identity="other recipe"))
    assert len(FakeClient.runs) == 2 and FakeClient.experiments == {"papers": "experiment 0"}


def test_wandb_goes_on_in_the_run_of_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished")
    )
    stand_in(monkeypatch, "wandb", init=lambda **options: calls.append(options) or run)
    tracker = WandB(tracked(tmp_path))
    tracker.log(10, {"loss": 2.0})
    tracker.close()
    options = calls.pop(0)
    assert (options["resume"], options["project"], options["dir"]) == ("allow", "papers", str(tmp_path))
    assert calls == [(10, {"loss": 2.0}), "finished"]
    # W&B takes no step twice: the same recipe trained again, in another folder or after `--force`, is another run
    (tmp_path / "elsewhere").mkdir()
    for folder, identity, same in ((".", "abc", True), ("elsewhere", "abc", False), (".", "other recipe", False)):
        WandB(tracked(tmp_path / folder, identity=identity))
        assert (calls.pop()["id"] == options["id"]) == same


def test_an_unknown_tracker_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(())
    with pytest.raises(ValueError, match="must be among tensorboard, mlflow, wandb, got 'tensorbord'"):
        check_trackers(["tensorbord"])
    monkeypatch.setattr("lilicorr.tracking.find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(ValueError, match=f"{name} needs a package: pip install .+"):
            check_trackers([name])


@pytest.mark.parametrize(
    ("values", "trouble"),
    [
        ({"loss": 2.0}, None),
        ({"score_spread": 0.5}, None),
        ({"tau": None}, None),
        ({"tau": 1.002}, None),
        ({"score_spread": 0.001}, "step 10: the head tells candidates apart by 0.0010 nats only"),
        ({"score_spread": float("nan")}, "step 10: the head tells candidates apart by nan nats only"),
        ({"tau": 1.0}, "step 10: the target accepts no draft (tau 1.00)"),
        ({"tau": float("nan")}, "step 10: the target accepts no draft (tau nan)"),
    ],
)
def test_the_alarm(
    values: dict[str, Any], trouble: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {"step": 10, **values}
    MetricLog(tmp_path / "lilicorr" / "metrics.jsonl", 0).write(entry)
    found = alarm(entry)
    if trouble is None:
        assert found is None and not caplog.records
    else:
        assert trouble in str(found) and caplog.messages == [f"lilicorr: {found}"]
