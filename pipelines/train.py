"""Train the draft models of the profile on the regenerated corpus, one run after the other, on Ray Train.

Place in the flow: reads `regenerate/shards` and `prepare/target.json`, lays out `train/training_set` once, and
trains every run of `train.runs` in order. A run leaves `train/<run>/final` (the checkpoint that evaluation and
serving read), `result.json` and `metrics.jsonl`. A finished run is skipped; a killed one goes on from its
newest state in `train/<run>/checkpoints`, bit-equal on CPUs, with any number of workers.

    python pipelines/train.py --profile demo
    python pipelines/train.py --profile paper_8b --set train.num_workers=32 --set train.min_workers=24
    python pipelines/train.py --profile paper_8b --estimate          # memory and hours, nothing is started

Paper: section 4.1 and Table 4.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from lilicorr.checkpoint import save_draft_model
from lilicorr.config import PipelineConfig, RunConfig, TrainConfig, fingerprint, from_dict, to_dict
from lilicorr.corpus import Sampler, TrainingSet, build_training_set, content_hash
from lilicorr.draft_model import DraftModel, build_draft_model, run_block_spec
from lilicorr.drafter import captured_layer_ids, copy_target_layers, drafter_shape
from lilicorr.folder import remove_unfinished
from lilicorr.provenance import provenance, sha256_tree, write_json
from lilicorr.state import checkpoint_folder, newest_checkpoint, prune_checkpoints
from lilicorr.target import Target, load_target
from lilicorr.tracking import MetricLog, TrackedRun, open_trackers
from lilicorr.training import Trainer, num_steps, run_fingerprint, start_drafter
from pipelines import local
from pipelines.errors import sent_home
from pipelines.probe import measure_tau, probe_prompts
from pipelines.resources import check_resources, patience
from pipelines.runs import TRAINING_SET, check_runs
from pipelines.shards import verified_shards
from pipelines.stage import VERSIONS
from pipelines.start import start_folder, with_folders

logger = logging.getLogger(__name__)

FEATURES = ".features"  # hidden, so no part of the stage's outputs
REPLACED = ".replaced"  # runs whose config has changed; hidden, so no part of the stage's outputs

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """One run as a worker gets it."""

    config: PipelineConfig
    name: str
    identity: str

    @property
    def run(self) -> RunConfig:
        """The run's own config."""
        return self.config.train.runs[self.name]

    @property
    def folder(self) -> Path:
        """Where the run's outputs go."""
        return self.config.directory / "train" / self.name

    def described(self) -> dict[str, Any]:
        """What `prepare` found out about the target."""
        return read_description(self.config)


def run(config: PipelineConfig) -> dict[str, Any]:
    """Build the training set and train every run that is not finished; returns the result of each.

    Raises ValueError, before anything starts, for a run that cannot be trained or a cluster that is too small.
    """
    config = replace(config, run_dir=str(Path(config.run_dir).resolve()), train=with_folders(config.train))
    described = read_description(config)
    check_runs(config, described)
    for folder in (config.directory / "train", *(config.directory / "train" / name for name in config.train.runs)):
        remove_unfinished(folder)
    training_set = ensure_training_set(config)
    results: dict[str, Any] = {}
    for name, run_config in config.train.runs.items():
        start, own = None, run_config
        if run_config.start_from in results:
            start = [results[run_config.start_from]["identity"], first_step(config.train, name, training_set)]
        elif run_config.start_from is not None:  # the folder's content counts, not where it lies
            start, own = [sha256_tree(run_config.start_from), 0], replace(run_config, start_from=None)
        more = (described, config.target.dtype, start, VERSIONS["train"])
        identity = run_fingerprint(config.train, own, training_set, *more)
        job = Job(config, name, identity)
        set_aside(job)
        results[name] = finished(job)
        if results[name] is not None:
            logger.info("run %s: finished before, %d steps", name, results[name]["steps"])
            continue
        fit(job)
        results[name] = finished(job)
        logger.info("run %s: %s", name, results[name])
    return {"runs": results, "training_set": training_set.meta["report"]}


def read_description(config: PipelineConfig) -> dict[str, Any]:
    """`prepare/target.json`."""
    return json.loads((config.directory / "prepare" / "target.json").read_text(encoding="utf-8"))


def ensure_training_set(config: PipelineConfig) -> TrainingSet:
    """The training set of the regenerated shards, built unless it is there and made from the same ones."""
    folder = config.directory / "train" / TRAINING_SET
    shards, hashes = verified_shards(config.directory / "regenerate")
    source = training_set_source(hashes, config.train)
    if folder.is_dir():
        try:
            training_set = TrainingSet.open(folder)
            same = training_set.meta["source"] == source
            if same and content_hash(folder) == training_set.meta["content"]:
                return training_set
            reason = "is damaged" if same else "was made from other shards or settings"
        except ValueError as error:
            reason = f"cannot be read ({error})"
        logger.warning("the training set %s and is built again", reason)
    report = build_training_set(shards, folder, config.train.max_length, config.train.layout, source)
    logger.info("training set: %s", report)
    return TrainingSet.open(folder)


def training_set_source(hashes: list[str], config: TrainConfig) -> str:
    """What a training set is known again by: the hashes of its shards, and how they were laid out."""
    return fingerprint(hashes, config.max_length, config.layout, VERSIONS["train"])


def finished(job: Job, folder: Path | None = None) -> dict[str, Any] | None:
    """The result of a run that has finished as it is configured now and whose checkpoint is whole, else None.

    `folder` is where to look.
    """
    folder = folder or job.folder
    path = folder / "result.json"
    if not path.is_file() or not (folder / "final").is_dir():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["identity"] != job.identity:
        return None
    if result["checkpoint"] != sha256_tree(folder / "final"):
        logger.warning("run %s: its checkpoint is damaged; it goes on from its newest state", job.name)
        return None
    return result


def set_aside(job: Job) -> None:
    """Claim the run's folder: what another config left there is moved out of the way, and nothing is deleted.

    What this config had left there before it was moved itself comes back.
    """
    path, replaced = job.folder / "run.json", job.folder.parent / REPLACED
    before = json.loads(path.read_text(encoding="utf-8"))["identity"] if path.is_file() else None
    kept = replaced / f"{job.name}-{job.identity}"
    returns = kept.is_dir() and (before != job.identity or (finished(job, kept) and not finished(job)))
    if returns or before not in (None, job.identity):
        aside = replaced / f"{job.name}-{before or 'unclaimed'}"
        if aside.exists():
            aside = aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}")
        replaced.mkdir(exist_ok=True)
        if job.folder.exists():
            job.folder.rename(aside)
            logger.info("run %s: its config has changed, the former outputs are in %s", job.name, aside)
    if returns:
        kept.rename(job.folder)
        logger.info("run %s: this config's own earlier outputs are back", job.name)
    if not path.is_file():
        write_json(path, {"identity": job.identity, "run": asdict(job.run)})


def fit(job: Job) -> None:
    """Train one run on the cluster; returns when `final/` and `result.json` are written."""
    local.connect(job.config.directory)
    import ray.train
    from ray.train.torch import TorchTrainer

    config = job.config.train
    resources = {"CPU": 1.0} | ({"GPU": config.gpus_per_worker} if config.gpus_per_worker else {})
    fewest = config.min_workers or config.num_workers
    counts = "train.num_workers" if config.min_workers is None else "train.min_workers"
    check_resources(fewest, "workers", resources, f"{counts} or train.gpus_per_worker")
    trainer = TorchTrainer(
        worker_loop,
        train_loop_config={"config": to_dict(job.config), "name": job.name, "identity": job.identity},
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.num_workers if config.min_workers is None else (fewest, config.num_workers),
            use_gpu=config.gpus_per_worker > 0,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            name=f"{job.name}-{job.identity}",
            storage_path=str(job.folder.parent / ".ray"),
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
        ),
    )
    least = "" if config.min_workers is None else f"{fewest} to "
    logger.info("run %s: %s%d workers with %s each", job.name, least, config.num_workers, resources)
    with patience(config.min_workers is None):
        trainer.fit()


def worker_loop(settings: dict[str, Any]) -> None:
    """What Ray Train runs in every worker."""
    import ray.train
    from ray.train.torch import get_device

    job = Job(from_dict(PipelineConfig, settings["config"]), settings["name"], settings["identity"])
    device = get_device()
    if device.type == "cpu":  # Ray allows a worker one thread for each of its logical CPUs
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // ray.train.get_context().get_local_world_size()))
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    with sent_home():
        train_run(job, device, ray.train.report)


def train_run(job: Job, device: torch.device, report: Report) -> None:
    """One worker's part of a run, from its newest state to the end; rank 0 writes.

    `report` is called after every committed state and at the end, equally often on all ranks.
    """
    config = job.config.train
    trainer, target = make_trainer(job, device)
    leads = trainer.rank == 0
    state = newest_checkpoint(job.folder / "checkpoints", device)
    if state is not None:
        trainer.restore(state)
    if trainer.world > 1:
        dist.barrier()  # nobody is still reading the states that rank 0 is about to prune
    log = open_log(job, trainer.done) if leads else None
    if log and state is not None:
        log.write({"step": trainer.done, "resumed": True, "workers": trainer.world})
    prompts = probe_prompts(job.config, target) if leads and config.eval_steps else []
    started, first = time.monotonic(), trainer.done
    while trainer.done < trainer.num_steps:
        metrics = trainer.step(trainer.done)
        done, last = trainer.done, trainer.done == trainer.num_steps
        if log and (done % config.log_steps == 0 or last):
            log.write(metrics)
            pace = (time.monotonic() - started) / (done - first)
            logger.info("%s", progress_line(job.name, metrics, trainer.num_steps, pace))
        if config.eval_steps and (done % config.eval_steps == 0 or last):
            tau = measure_tau(trainer, target, prompts)
            if log:
                log.write({"step": done, "tau": tau})
        if done % config.checkpoint_steps == 0 and not last:
            trainer.save(checkpoint_folder(job.folder / "checkpoints", done))
            if leads:
                prune_checkpoints(job.folder / "checkpoints", config.keep_checkpoints)
            report({"step": done, "loss": metrics["loss"]})
    draft_model = trainer.whole_model()
    if log:
        finish(job, trainer, draft_model, target)
        log.close()
    report({"step": trainer.done})


def open_log(job: Job, step: int) -> MetricLog:
    """The metrics of a run that has done `step` steps, in its folder and at the trackers."""
    config = job.config.train
    settings = {"profile": job.config.profile, "target": job.config.target.source, **to_dict(job.run)}
    run = TrackedRun(job.folder, job.name, job.identity, config.tracking_project, step, settings)
    return MetricLog(job.folder / "metrics.jsonl", step, open_trackers(config.trackers, run))


def make_trainer(job: Job, device: torch.device) -> tuple[Trainer, Target]:
    """Target, draft model and trainer of a run, before its first step."""
    config, run_config = job.config.train, job.run
    layer_ids = captured_layer_ids(config.drafter, job.described()["num_layers"])
    target = load_target(job.config.target, device, layer_ids)
    training_set = TrainingSet.open(job.folder.parent / TRAINING_SET)
    draft_model = new_draft_model(config, run_config, target, training_set)
    num_blocks = 0
    if run_config.start_from is not None:
        start = start_folder(job.folder.parent, run_config.start_from)
        num_blocks = start_drafter(draft_model, start, target)
    before = first_step(config, job.name, training_set)
    features = feature_file(job, training_set, layer_ids) if config.cache_features else None
    trainer = Trainer(target, training_set, config, run_config, draft_model, job.identity, num_blocks, before, features)
    return trainer, target


def feature_file(job: Job, training_set: TrainingSet, layer_ids: tuple[int, ...]) -> Path:
    """Where all workers and runs with this target, these layers and this training set keep the features."""
    key = fingerprint(job.described(), job.config.target.dtype, layer_ids, training_set.meta["content"])
    return job.folder.parent / FEATURES / key


def first_step(config: TrainConfig, name: str, training_set: TrainingSet) -> int:
    """Where the run begins in the order of the rows: behind the steps of all runs it continues from."""
    sampler, steps = Sampler(len(training_set), config.batch_size, config.seed), 0
    while (start := config.runs[name].start_from) in config.runs:
        name = start
        steps += num_steps(config.runs[name], sampler)
    return steps


def new_draft_model(
    config: TrainConfig, run_config: RunConfig, target: Target, training_set: TrainingSet
) -> DraftModel:
    """A draft model initialised from the seed and, with `drafter.init: target`, the target; on the target's device."""
    vocab_ids = training_set.vocab_ids() if config.drafter.restrict_vocab else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        draft_model = build_draft_model(
            drafter_shape(config.drafter, target.config),
            run_block_spec(config.drafter, run_config, target.config, target.mask_token_id),
            run_config.head,
            run_config.head_config,
            target,
            vocab_ids if vocab_ids is None else vocab_ids.to(target.device),
        )
    if config.drafter.init == "target":
        copy_target_layers(draft_model.drafter, target)
    return draft_model


def progress_line(name: str, metrics: dict[str, float], total: int, seconds_per_step: float) -> str:
    """One line of the driver's log."""
    left = datetime.timedelta(seconds=round((total - metrics["step"]) * seconds_per_step))
    return (
        f"{name}: step {metrics['step']}/{total}, loss {metrics['loss']:.3f}, grad norm {metrics['grad_norm']:.2f}, "
        f"{metrics['blocks_per_s']:.0f} blocks/s, ETA {left}"
    )


def finish(job: Job, trainer: Trainer, draft_model: DraftModel, target: Target) -> None:
    """Write `final/`, then `result.json`: its presence says that the run has finished."""
    entries = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    taus = [entry["tau"] for entry in entries if entry.get("tau") is not None]
    last = {"loss": losses[-1]} | ({"tau": taus[-1]} if taus else {})
    dtype = "bfloat16" if target.embed.dtype == torch.bfloat16 else "float32"
    save_draft_model(job.folder / "final", draft_model, origin(job, trainer, target) | last, dtype)
    result = {"identity": job.identity, "steps": trainer.done, "num_blocks": trainer.num_blocks}
    write_json(job.folder / "result.json", result | last | {"checkpoint": sha256_tree(job.folder / "final")})


def origin(job: Job, trainer: Trainer, target: Target) -> dict[str, Any]:
    """What a checkpoint says of where it comes from."""
    described, meta = job.described(), trainer.training_set.meta
    known = {key: described[key] for key in ("revision", "model_type", "tokenizer_hash", "template_hash")}
    known |= {"architectures": getattr(target.config, "architectures", None) or []}
    return {
        "target": {"source": job.config.target.source, **known},  # a folder by where it lay
        "template_kwargs": job.config.target.template_kwargs,
        "corpus": {"fingerprint": meta["content"], "rows": meta["rows"], "tokens": meta["tokens"]},
        "run": job.name,
        "start_from": None if job.run.start_from is None else Path(job.run.start_from).name,
        "identity": job.identity,
        "commit": provenance()["commit"],
        "steps": trainer.done,
        "num_blocks": trainer.num_blocks,
        "max_anchors": job.config.train.max_anchors,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": described["eos_token_id"],
    }


if __name__ == "__main__":
    if "--estimate" in sys.argv:
        from pipelines.estimate import main as estimate

        estimate()
    else:
        from pipelines.stage import main

        main(run, "train")
