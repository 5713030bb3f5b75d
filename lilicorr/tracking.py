"""A training run's metrics: `metrics.jsonl` always, and the trackers that `train.trackers` names.

Place in the flow: rank 0 of `pipelines/train.py` writes one `MetricLog`. Every value goes out with its optimizer step,
so that curves of runs that were killed and went on lie over each other.

Nothing but `metrics.jsonl` is read back. A tracker that fails in the middle of a run (a server that is away) is
reported in the log and left out from then on: it ends no run, and the file has what it missed.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lilicorr.provenance import write_atomic

logger = logging.getLogger(__name__)

COLLAPSED = 0.01  # nats


class TrackedRun(NamedTuple):
    """What a tracker is told of a run."""

    folder: Path  # of the run; trackers keep their own files in it
    name: str
    identity: str  # of the recipe: the same after a restart
    project: str
    step: int  # optimizer steps done: what a tracker has of later ones is from before a kill
    config: dict[str, Any]


class Tracker(Protocol):
    """Where metrics are shown."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the values of one optimizer step."""

    def close(self) -> None:
        """Bring out what is held back; the run is done."""


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder, by tensorboardX, which `ray[train]` brings along."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


def kept_id(path: Path, identity: str) -> str:
    """A tracker's own id of a run, from its file in the run's folder; empty for a folder that has had no such run."""
    text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    kept, _, own = text.partition(" ")
    return own if kept == identity else ""


def keep_id(path: Path, identity: str, own: str) -> None:
    """Write what `kept_id` reads."""
    write_atomic(path, f"{identity} {own}".encode())


class MLflow:
    """A run of MLflow's tracking server, MLFLOW_TRACKING_URI; its id is kept in `mlflow_run` of the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        kept = run.folder / "mlflow_run"
        self.run_id = kept_id(kept, run.identity)
        if self.run_id:
            self.client.update_run(self.run_id, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(run.project)
        created = self.client.create_run(experiment_id, run_name=run.name, tags={"identity": run.identity})
        self.run_id = created.info.run_id
        for key, value in run.config.items():
            self.client.log_param(self.run_id, key, value)
        keep_id(kept, run.identity, self.run_id)

    def log(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class WandB:
    """A run of Weights & Biases; its id is kept in `wandb_run` of the run's folder. WANDB_API_KEY and WANDB_MODE apply.

    It takes no step below one that it has: of a run that went on from an older state it shows the first course.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        kept = run.folder / "wandb_run"
        run_id = kept_id(kept, run.identity) or uuid.uuid4().hex
        keep_id(kept, run.identity, run_id)
        self.run = wandb.init(
            project=run.project, name=run.name, id=run_id, resume="allow", dir=str(run.folder), config=run.config
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
PACKAGES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that is not known here or whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"train.trackers must be among {', '.join(TRACKERS)}, got {name!r}")
        if find_spec(PACKAGES[name]) is None:
            raise ValueError(f"train.trackers: {name} needs a package: pip install {PACKAGES[name]}")


def open_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """The trackers of a run. One that is away when a run goes on is left out, as one is that fails later."""
    trackers = []
    for name in names:
        try:
            trackers.append(TRACKERS[name](run))
        except Exception:
            if not run.step:  # at the start it is wrong settings, which the user can still mend
                raise
            logger.exception("%s cannot be reached and gets no metrics of the rest of run %s", name, run.name)
    return trackers


def _step_of(line: bytes) -> int | None:
    """The step of a line of the log; None for one that is no entry."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return step if type(step) is int else None


class MetricLog:
    """`metrics.jsonl`: one JSON object with a `step` per line, appended; no step stands twice after a resume."""

    def __init__(self, path: Path, step: int, trackers: Sequence[Tracker] = ()) -> None:
        """Open the log for a run that has finished `step` steps: later entries go, and what is none, as a torn line."""
        self.path, self.trackers = path, list(trackers)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
        steps = [_step_of(line) for line in lines[:-1]]  # what stands behind the last line break is torn
        if None in steps:
            logger.warning("%s: %d lines are no entries and are taken out", path, steps.count(None))
        kept = [line + b"\n" for line, found in zip(lines, steps) if found is not None and found <= step]
        write_atomic(path, b"".join(kept))

    def write(self, values: dict[str, Any]) -> None:
        """Append one entry; its numbers go to the trackers, and what is wrong with the run by them to the log."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if trouble := alarm(values):
            logger.warning("%s: %s", self.path.parent.name, trouble)
        numbers = {name: float(value) for name, value in values.items() if type(value) in (int, float)}
        step = int(numbers.pop("step"))
        if numbers:
            self._each(lambda tracker: tracker.log(step, numbers))

    def close(self) -> None:
        """The run is done: end the trackers' side of it."""
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            try:
                act(tracker)
            except Exception:
                logger.exception("%s failed and gets no more metrics; %s has them", type(tracker).__name__, self.path)
                self.trackers.remove(tracker)


def alarm(values: dict[str, Any]) -> str | None:
    """What is wrong with a run by an entry of its metrics, None while nothing is.

    `score_spread`, in nats, is the standard deviation of a slot's scores over its candidates: at 0 the head says the
    same of all of them, and its walk follows whatever breaks ties. `tau` is 1 where the target took no draft at all.
    """
    step, spread, tau = values["step"], values.get("score_spread"), values.get("tau")
    if spread is not None and not spread >= COLLAPSED:
        return f"step {step}: the head tells candidates apart by {spread:.4f} nats only, it has collapsed"
    if tau is not None and not tau > 1:
        return f"step {step}: the target accepts no draft (tau {tau:.2f}); after the first steps, training is broken"
    return None
