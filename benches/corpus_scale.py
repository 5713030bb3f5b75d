"""The paper's 1,397,187 conversations through prepare, regenerate and build, with nothing but the model left out.

    python -m benches.corpus_scale [--rows N] [--kills 0.5 0.9] [--actors 2] [--folder DIR] [--output FILE] [--keep]

Makes a corpus of that size and shape (`benches/corpus.py`), then runs the pipeline's own stages on it in a driver
process, with an engine that answers at once with canned tokens. The driver is killed (SIGKILL) when the given shares
of the shards are made, and started again. In the end every content id must be in exactly one place.

Needs Ray. At full size: 17 GB of disk in `--folder` (a temporary folder by default), removed in the end,
after an error or SIGTERM too, unless `--keep`. SIGKILL leaves it, and its driver at work: end that by hand.

The result is one JSON object: `rows` of the source; `ok`, `dead`, `duplicate`, `dropped`, `held_out` which add up to
them; `kills`; `seconds` from the start of the first driver to the training set (kills and restarts included) and by
stage; `rows_per_s`; `resume_seconds` from the start of the driver after the last kill to the first shard it commits;
`status_seconds` of `pipelines/regenerate.py --status`; `loader`, rows and tokens a second that one process draws from
the training set (`benches/loader.py`); `peak_rss_gb` of the largest driver
and `peak_tree_gb` of a driver and all processes below it (proportional set size, sampled); sizes; provenance.

Place in the flow: it writes `corpus_scale.json`; docs/scale.md explains what is counted.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import yaml

from benches.corpus import NUM_ROWS, Replay, make_corpus
from benches.options import positive
from lilicorr.config import PipelineConfig, load_profile
from lilicorr.provenance import provenance, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "benches" / "results" / "corpus_scale.json"
PROFILE = "corpus_scale"
POLL_S = 0.2
TREE_S = 5.0  # between two samples of the processes' memory
DEATH_S = 8.0  # until what a killed driver started is gone; of Ray's own, two agents stay
GB = 1e9


def make_profile(folder: Path, actors: int, shard_size: int) -> PipelineConfig:
    """Write the profile of the run in `folder` and load it."""
    values = {
        "run_dir": str(folder / "runs"),
        "target": {"source": "embedded"},
        "prompts": {"source": "nemotron_v2", "data_dir": str(folder / "corpus"), "held_out_fraction": 0.001},
        "regenerate": {
            "engine": "transformers",  # no more than a name here: `drive` puts its own engine in its place
            "max_model_len": 131_072,
            "shard_size": shard_size,
            "num_actors": actors,
            "gpus_per_actor": 0.0,
        },
        "train": {"runs": {"lilicorr": {"epochs": 6.0}}},
        "evaluate": {"sets": []},
    }
    (folder / f"{PROFILE}.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return load_profile(PROFILE, folder)


def make_replay(config: PipelineConfig) -> tuple[PreTrainedTokenizerBase, Replay]:
    """The target's tokenizer and an engine without a model, in place of `regenerate.make_engine`."""
    from transformers import AutoTokenizer

    from lilicorr.target import resolve_target

    tokenizer = AutoTokenizer.from_pretrained(resolve_target(config.target))
    return tokenizer, Replay(tokenizer, config.regenerate.max_model_len, config.regenerate.batch_size)


def drive(folder: str) -> None:
    """The driver's process: prepare, regenerate, and the training set of `train`, each going on where it was."""
    from pipelines import full, regenerate, stage

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    config = load_profile(PROFILE, Path(folder))
    regenerated = stage.find(full.STAGES, "regenerate")
    regenerated = replace(regenerated, run=lambda config: regenerate.run(config, make_replay))
    stage.drive([stage.find(full.STAGES, "prepare"), regenerated], config)
    from pipelines.train import ensure_training_set

    ensure_training_set(config)


@dataclass
class Watch:
    """What is seen of the drivers from outside."""

    folder: Path
    config: PipelineConfig
    temporary: Path  # of the drivers' Ray instances
    start: float = field(default_factory=time.monotonic)
    stages: dict[str, float] = field(default_factory=dict)  # when each was finished
    peak_rss: int = 0
    peak_tree: int = 0
    resume_s: float | None = None
    num_shards: int | None = None  # of the plan

    def run(self, kill_at: float | None) -> None:
        """One driver, to its end or until it is killed at that share of the shards."""
        command = [sys.executable, "-c", f"from benches.corpus_scale import drive; drive({str(self.folder)!r})"]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        variables.pop("RAY_ADDRESS", None)
        known, began, last_tree, killed = self._manifests(), time.time(), 0.0, False
        with (self.folder / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            while driver.poll() is None:
                now = time.monotonic()
                self._look(driver.pid, now - last_tree >= TREE_S)
                last_tree = now if now - last_tree >= TREE_S else last_tree
                if kill_at is not None and self.share_done() >= kill_at:
                    killed = True
                    break
                time.sleep(POLL_S)
        finally:
            self._end(driver)
        new = [written for name, written in self._manifests().items() if name not in known]
        if known and new:
            self.resume_s = min(new) - began
        status = driver.returncode
        if status not in ((0, -signal.SIGKILL) if killed else (0,)):
            text = (self.folder / "driver.log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the driver ended by itself with {status}:\n{text[-4000:]}")
        if kill_at is not None and status == 0:
            raise RuntimeError(f"the driver was done before it could be killed at {kill_at:.0%}; give more rows")

    def _end(self, driver: subprocess.Popen[bytes]) -> None:
        """Kill the driver if it runs, then whatever is left of the processes it started."""
        from pipelines import local

        below = [local.identity(pid) for pid in local.descendants(driver.pid)]
        if driver.poll() is None:
            driver.kill()
        driver.wait()
        deadline = time.monotonic() + DEATH_S
        while any(map(local.is_alive, below)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in filter(local.is_alive, below):
            os.kill(process["pid"], signal.SIGKILL)

    def _manifests(self) -> dict[str, float]:
        """The shards that are done, each with the time of its manifest in seconds since the epoch."""
        folder = self.config.directory / "regenerate" / "manifest"
        entries = os.scandir(folder) if folder.is_dir() else ()
        return {entry.name: entry.stat().st_mtime for entry in entries if not entry.name.startswith(".")}

    def share_done(self) -> float:
        """Share of the planned shards that have a manifest."""
        from pipelines.shards import read_plan

        folder = self.config.directory / "regenerate"
        if not (folder / "plan.json").is_file():
            return 0.0
        if self.num_shards is None:
            self.num_shards = len(read_plan(folder).shards)
        return len(self._manifests()) / self.num_shards

    def _look(self, pid: int, whole_tree: bool) -> None:
        """Note memory and finished stages."""
        for name in ("prepare", "regenerate"):
            if name not in self.stages and (self.config.directory / name / "_SUCCESS.json").is_file():
                self.stages[name] = time.monotonic() - self.start
        self.peak_rss = max(self.peak_rss, read_kib(f"/proc/{pid}/status", "VmHWM:"))
        if whole_tree:
            from pipelines.local import descendants

            tree = sum(read_kib(f"/proc/{one}/smaps_rollup", "Pss:") for one in {pid, *descendants(pid)})
            self.peak_tree = max(self.peak_tree, tree)


def read_kib(path: str, name: str) -> int:
    """Bytes of an entry in KiB of a file of the kernel's; 0 where the process is gone."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def check_ids(config: PipelineConfig) -> dict[str, int]:
    """Conversations answered and dead; RuntimeError unless each prompt is in exactly one shard or dead letter."""
    folder = config.directory / "regenerate"
    asked = np.sort(read_ids(config.directory / "prepare" / "prompts.parquet"))
    shards, letters = sorted(folder.glob("shards/*.parquet")), sorted(folder.glob("dead_letter/*.parquet"))
    # a shard has a conversation's turns together, so a repeated id is one that stands in two places
    answered = [ids[np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))] for ids in map(read_ids, shards) if len(ids)]
    dead = [read_ids(path) for path in letters]
    found = np.sort(np.concatenate([*answered, *dead]))
    if len(found) != len(asked) or not np.array_equal(found, asked):
        raise RuntimeError(f"{len(found)} ids in shards and dead letters, {len(asked)} were asked")
    if (asked[1:] == asked[:-1]).any():
        raise RuntimeError("prompts.parquet holds an id twice")
    return {"ok": sum(map(len, answered)), "dead": sum(map(len, dead))}


def read_ids(path: Path) -> np.ndarray:
    """The content ids of a file's rows."""
    return np.array(pq.read_table(path, columns=["cid"])["cid"].to_pylist(), dtype="S32")


def bench(folder: Path, rows: int, kills: list[float], actors: int, shard_size: int) -> dict[str, Any]:
    """Make the corpus, run it through, check it; returns the result."""
    began = time.monotonic()
    source_bytes = make_corpus(folder / "corpus", rows)
    made = time.monotonic() - began
    config = make_profile(folder, actors, shard_size)
    with tempfile.TemporaryDirectory(prefix="cs-") as temporary:  # short: it holds sockets
        watch = Watch(folder, config, Path(temporary))
        for share in [*sorted(kills), None]:
            watch.run(share)
        seconds = time.monotonic() - watch.start
    result = account(config, rows) | sizes(config) | {"kills": sorted(kills), "seconds": round(seconds, 1)}
    stages = {"prepare": watch.stages["prepare"], "regenerate": watch.stages["regenerate"], "build": seconds}
    starts = [0.0, *list(stages.values())[:-1]]
    return result | {
        "stage_seconds": {name: round(end - start, 1) for (name, end), start in zip(stages.items(), starts)},
        "make_seconds": round(made, 1),
        "rows_per_s": round(rows / seconds, 1),
        "resume_seconds": None if watch.resume_s is None else round(watch.resume_s, 1),
        "status_seconds": round(status_seconds(folder), 2),
        "peak_rss_gb": round(watch.peak_rss / GB, 3),
        "peak_tree_gb": round(watch.peak_tree / GB, 3),
        "source_gb": round(source_bytes / GB, 3),
        "provenance": provenance(config, actors=actors, shard_size=shard_size),
    }


def account(config: PipelineConfig, rows: int) -> dict[str, int]:
    """Where every row of the source went; RuntimeError unless that adds up."""
    from pipelines.stage import read_marker

    counts = read_marker(config, "prepare")["metrics"]
    numbers = read_marker(config, "regenerate")["metrics"]
    ids = check_ids(config)
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped_"))
    result = {"rows": counts["rows"], **ids, "duplicate": counts["duplicate"] + numbers["duplicate"]}
    result |= {"dropped": dropped, "held_out": counts["held_out"] + counts["not_chosen"]}
    together = sum(count for name, count in result.items() if name != "rows")
    if together != rows or (numbers["ok"], numbers["dead"]) != (ids["ok"], ids["dead"]):
        raise RuntimeError(f"{together} of {rows} rows accounted for: {result}, {numbers}")
    return result | {"turns": numbers["turns"], "shards": numbers["shards"]}


def sizes(config: PipelineConfig) -> dict[str, Any]:
    """Of what was written."""
    from benches.loader import loader_rates
    from lilicorr.corpus import TrainingSet
    from pipelines.train import TRAINING_SET

    folders = [config.directory / name for name in ("prepare", "regenerate", "train")]
    on_disk = {folder.name: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders}
    training_set = TrainingSet.open(config.directory / "train" / TRAINING_SET)
    written = {name: round(size / GB, 3) for name, size in on_disk.items()}
    loader = loader_rates(training_set, config.train)
    return {"written_gb": written, "training_set": training_set.meta["report"], "loader": loader}


def status_seconds(folder: Path) -> float:
    """Seconds that `--status` takes, the interpreter's start included."""
    command = [sys.executable, "pipelines/regenerate.py", "--status", "--profile", str(folder / f"{PROFILE}.yaml")]
    began = time.monotonic()
    subprocess.run([*command, "--run-dir", str(folder / "runs")], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def end(number: int, _: object) -> None:
    """On a signal: end as after an error, which removes what there is; a second signal does not disturb that."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive, default=NUM_ROWS)
    parser.add_argument("--kills", type=float, nargs="*", default=[0.5, 0.9], help="shares of the shards, in (0, 1)")
    parser.add_argument("--actors", type=positive, default=2)
    parser.add_argument("--shard-size", type=positive, default=2048)
    parser.add_argument("--folder", type=Path, help="a new folder for everything that is written")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--keep", action="store_true", help="leave the folder")
    arguments = parser.parse_args()
    if not all(0 < share < 1 for share in arguments.kills):
        parser.error(f"--kills are shares between 0 and 1, got {arguments.kills}")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="corpus-scale-"))
    if folder.exists() and not folder.is_dir():
        parser.error(f"--folder {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        parser.error(f"--folder {folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, end)
    try:
        result = bench(folder.resolve(), arguments.rows, arguments.kills, arguments.actors, arguments.shard_size)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    write_json(arguments.output, result)
    for name, value in result.items():
        if name != "provenance":
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
