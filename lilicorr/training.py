"""Joint training of drafter and head: one optimizer step, the schedule, and exact resume.

Place in the flow: `pipelines/train.py` runs a `Trainer` in every worker; without torch.distributed it is a
plain single-process trainer. One step is

    sampler(step) -> rows, dealt to the ranks by length -> micro-batches
    target (no gradient) -> features -> draft model -> loss terms as sums and counts
    counts added over micro-batches and ranks -> one backward of the global mean -> gradients added over ranks
    clip over everything -> AdamW in two groups

Nothing is drawn from a process's random state: rows follow from (seed, step), anchors from (seed, epoch,
sample id). A state is weights, moments and a step number, and going on from it is bit-equal on a CPU.

Paper: section 3.4 (objective), Table 4 (optimizer, schedule, fp32 masters).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lilicorr.anchors import choose_anchors
from lilicorr.block_mask import choose_attention
from lilicorr.blocks import LossTerm, TrainBatch, add_terms
from lilicorr.checkpoint import read_checkpoint
from lilicorr.config import RunConfig, TrainConfig, fingerprint
from lilicorr.corpus import Sampler, TrainingSet, split_rows
from lilicorr.draft_model import DraftModel
from lilicorr.features import FeatureSource
from lilicorr.folder import new_folder, remove_unfinished
from lilicorr.losses import total_loss
from lilicorr.target import Target

SCHEDULES = ("cosine", "constant")
PRECISIONS = ("bfloat16", "float32")
STATE, META = "state.safetensors", "meta.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
# How a run is carried out: changing these changes no number beyond the order of additions.
PACE = (
    *("runs", "micro_batch_size", "chunk_blocks", "cache_features", "checkpoint_steps", "keep_checkpoints"),
    *("attention", "sharding"),
    *("log_steps", "eval_steps", "num_workers", "gpus_per_worker", "max_failures", "trackers", "tracking_project"),
)

ADDED = ("block_layout", "block_size")  # of a run, since runs were first trained: unset they leave its identity alone


def check_precision(config: TrainConfig) -> None:
    """Raise ValueError for a precision that is none."""
    if config.precision not in PRECISIONS:
        raise ValueError(f"train.precision must be one of {', '.join(PRECISIONS)}, got {config.precision!r}")


def num_steps(run: RunConfig, sampler: Sampler) -> int:
    """Optimizer steps of a run.

    Raises ValueError unless exactly one of epochs and steps is set and positive, and the schedule is known.
    """
    if (run.epochs is None) == (run.steps is None):
        raise ValueError(f"set exactly one of epochs and steps, got epochs={run.epochs} and steps={run.steps}")
    if (run.epochs if run.steps is None else run.steps) <= 0:
        raise ValueError(f"epochs and steps must be positive, got epochs={run.epochs} and steps={run.steps}")
    if run.schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {run.schedule!r}")
    if not 0 <= run.warmup_fraction < 1:
        raise ValueError(f"warmup_fraction must be at least 0 and below 1, got {run.warmup_fraction}")
    return sampler.num_steps(run.epochs) if run.steps is None else run.steps


def lr_factor(step: int, total: int, schedule: str, warmup_fraction: float) -> float:
    """Share of the base learning rate in `step` (from 0): linear warm-up, then cosine to 0 or constant."""
    warmup = round(warmup_fraction * total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def run_fingerprint(config: TrainConfig, run: RunConfig, training_set: TrainingSet, *more: Any) -> str:
    """The identity of a run's result: what it trains, on what, how; `more` adds the target and the start."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in PACE}
    own = {key: value for key, value in dataclasses.asdict(run).items() if value is not None or key not in ADDED}
    return fingerprint(values, own, training_set.meta["content"], *more)


def start_drafter(draft_model: DraftModel, folder: Path, target: Target) -> int:
    """Copy the drafter of the checkpoint `folder` into `draft_model`; the head stays as it is.

    The checkpoint may be of any format and head; YaRN is for serving and stays behind. Returns the blocks that the
    drafter has seen, 0 where its checkpoint does not say it. Raises ValueError that names the field if the two
    drafters differ in shape or in how they cut blocks.
    """
    checkpoint = read_checkpoint(folder, target)
    spec, shape = checkpoint.description.spec, dataclasses.replace(checkpoint.description.shape, yarn=None)
    blocks = ("block_size", "layout", "mask_token_id", "target_layer_ids")
    for theirs, ours, names in (
        (spec, draft_model.spec, blocks),
        (shape, draft_model.shape, [field.name for field in dataclasses.fields(shape)]),
    ):
        for name in names:
            if getattr(theirs, name) != getattr(ours, name):
                found, wanted = getattr(theirs, name), getattr(ours, name)
                raise ValueError(f"cannot start from {folder}: its {name} is {found}, this run's is {wanted}")
    state = draft_model.drafter.state_dict()
    draft_model.drafter.load_state_dict({name: checkpoint.tensors[name] for name in state})
    return checkpoint.info.get("num_blocks") or 0


class Trainer:
    """Trains one draft model; `done` steps are finished, `num_blocks` blocks have been seen.

    `num_blocks` starts with those of the run this one continues from, and `first_step` is the number of steps
    that run took: rows and anchors go on behind its own. `identity` (`run_fingerprint`) is kept in every saved
    state and asked for when one is restored. With `feature_file` the target's features are kept there
    (`FeatureSource`). With `recompute`, the default on a GPU, only the last micro-batch of a step keeps its
    activations for the backward pass.

    Raises ValueError for settings that cannot be trained with.
    """

    def __init__(
        self,
        target: Target,
        training_set: TrainingSet,
        config: TrainConfig,
        run: RunConfig,
        draft_model: DraftModel,
        identity: str = "",
        num_blocks: int = 0,
        first_step: int = 0,
        feature_file: Path | None = None,
    ) -> None:
        check_precision(config)
        if target.layer_ids != draft_model.spec.target_layer_ids:
            raise ValueError(
                f"target captures {target.layer_ids}, draft model reads {draft_model.spec.target_layer_ids}"
            )
        self.training_set, self.config, self.run, self.draft_model = training_set, config, run, draft_model
        self.sampler = Sampler(len(training_set), config.batch_size, config.seed)
        self.num_steps = num_steps(run, self.sampler)
        self.features = FeatureSource(target, training_set, feature_file)
        self.identity, self.num_blocks, self.first_step, self.done = identity, num_blocks, first_step, 0
        self.device = target.device
        self.attention = choose_attention(config.attention, self.device)
        self.recompute = self.device.type == "cuda"
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.parameters = dict(draft_model.named_parameters())
        if not {parameter.dtype for parameter in self.parameters.values()} <= {torch.float32, torch.float64}:
            raise ValueError("parameters must be float32: in bfloat16 a small step does not move a weight near 1")
        draft_model.train()
        self.gradient = self._flat_gradient()
        self.optimizer = self._make_optimizer()
        if self.world > 1:
            for parameter in self.parameters.values():
                dist.broadcast(parameter.data, 0)

    def _flat_gradient(self) -> Tensor:
        """One buffer for all gradients; every parameter's `grad` is a view of it, so it is reduced as it lies."""
        some = next(iter(self.parameters.values()))
        buffer = torch.zeros(sum(p.numel() for p in self.parameters.values()), dtype=some.dtype, device=some.device)
        for parameter, part in zip(
            self.parameters.values(), buffer.split([p.numel() for p in self.parameters.values()])
        ):
            parameter.grad = part.view_as(parameter)
        return buffer

    def _make_optimizer(self) -> torch.optim.AdamW:
        config, model = self.config, self.draft_model
        groups = []
        for parameters, lr, weight_decay in (
            (model.drafter_parameters(), config.drafter_lr, config.drafter_weight_decay),
            (model.head_parameters(), config.head_lr, config.head_weight_decay),
        ):
            groups.append({"params": list(parameters), "lr": lr, "base": lr, "weight_decay": weight_decay})
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True)
        for parameter in self.parameters.values():
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step} | moments
        return optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        """Matrix products in bfloat16 where the config says so; parameters and moments stay as they are."""
        if self.config.precision == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def step(self, step: int) -> dict[str, float]:
        """Do step number `step`, which must be the next one, and return its metrics.

        Raises FloatingPointError, before any weight has changed, if the gradient is not finite.
        """
        if step != self.done:
            raise ValueError(f"the next step is {self.done}, got {step}")
        start = time.perf_counter()
        epoch, rows = self.sampler.rows(self.first_step + step)
        terms, sizes = self._forward(epoch, rows)
        local, means, sizes = self._globalise(terms, sizes)
        self.gradient.zero_()
        total_loss(local).backward()
        self._sum(self.gradient)
        norm = float(self.gradient.norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {step}: the gradient's norm is {norm}, rows {rows[:8]}...")
        self.gradient.mul_(min(1.0, self.config.max_grad_norm / (norm + 1e-6)))
        factor = lr_factor(step, self.num_steps, self.run.schedule, self.run.warmup_fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * group["base"]
        self.optimizer.step()
        self.done += 1
        self.num_blocks += int(sizes["blocks"])
        seconds = time.perf_counter() - start
        return {
            "step": self.done,
            "epoch": epoch,
            "loss": sum(term.weight * means[name] for name, term in terms.items() if term.weight),
            **means,
            "grad_norm": norm,
            "drafter_lr": factor * self.config.drafter_lr,
            "head_lr": factor * self.config.head_lr,
            **sizes,
            "num_blocks": self.num_blocks,
            "blocks_per_s": sizes["blocks"] / seconds,
            "seconds": seconds,
        }

    def _micro_batches(self, rows: list[int]) -> Iterator[tuple[list[int], bool]]:
        """This rank's rows in micro-batches, and whether they count.

        A rank without rows does one of them for nothing, so that all ranks hold the same terms.
        """
        share = split_rows(self.training_set.lengths[rows].tolist(), self.world)[self.rank]
        if not share:
            yield rows[:1], False
        for start in range(0, len(share), self.config.micro_batch_size):
            yield [rows[index] for index in share[start : start + self.config.micro_batch_size]], True

    def _forward(self, epoch: int, rows: list[int]) -> tuple[dict[str, LossTerm], dict[str, int]]:
        """This rank's loss terms of the step, and how many blocks and tokens they stand for."""
        terms: dict[str, LossTerm] = {}
        sizes = {"blocks": 0, "tokens": 0}
        micro_batches = list(self._micro_batches(rows))
        for index, (sample_ids, counts) in enumerate(micro_batches):
            batch = self.training_set.batch(sample_ids)
            anchors, keep = choose_anchors(batch, self.config.seed, epoch, self.config.max_anchors)
            keep &= counts
            sizes["blocks"] += int(keep.sum())
            sizes["tokens"] += int(batch.lengths.sum()) * counts
            batch = TrainBatch(*(getattr(batch, f.name).to(self.device) for f in dataclasses.fields(batch)))
            arguments = (*self.features(batch), batch, anchors.to(self.device), keep.to(self.device))
            arguments = (*arguments, self.done / self.num_steps, self.config.chunk_blocks, self.attention)
            with self.autocast():
                if self.recompute and index < len(micro_batches) - 1:
                    new = checkpoint(self.draft_model, *arguments, use_reentrant=False)
                else:
                    new = self.draft_model(*arguments)
            terms = add_terms(terms, new)
        return terms, sizes

    def _globalise(
        self, terms: dict[str, LossTerm], sizes: dict[str, int]
    ) -> tuple[dict[str, LossTerm], dict[str, float], dict[str, int]]:
        """The local sums over the counts of all ranks, the global mean of every term, and the global sizes."""
        flat = torch.stack([value.detach().double() for term in terms.values() for value in (term.sum, term.count)])
        extra = torch.tensor(list(sizes.values()), dtype=flat.dtype, device=flat.device)
        everything = self._sum(torch.cat([flat, extra])).tolist()
        local, means = {}, {}
        for index, (name, term) in enumerate(terms.items()):
            total, count = everything[2 * index : 2 * index + 2]
            local[name] = LossTerm(term.sum, torch.full_like(term.count, count), term.weight)
            means[name] = total / max(count, 1e-6)
        return local, means, dict(zip(sizes, map(int, everything[len(flat) :])))

    def _sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def save(self, folder: Path) -> None:
        """Write weights, moments, step and identity to `folder`, whole or not at all."""
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors |= {f"{moment}.{name}": self.optimizer.state[parameter][moment] for moment in MOMENTS}
        meta = {
            "step": self.done,
            "num_steps": self.num_steps,
            "num_blocks": self.num_blocks,
            "identity": self.identity,
        }
        with new_folder(folder) as aside:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, aside / STATE)
            (aside / META).write_text(json.dumps(meta) + "\n", encoding="utf-8")

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Go on from a state that `save` wrote.

        Raises ValueError, naming the file or tensor, if it is damaged, does not fit, or is another run's.
        """
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["identity"] != self.identity:
            raise ValueError(f"{folder} was saved by run {meta['identity']}, this is {self.identity}")
        try:
            tensors = load_file(folder / STATE)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / STATE} is missing or damaged: {error}") from error
        places = {f"weight.{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            places |= {f"{moment}.{name}": self.optimizer.state[parameter][moment] for moment in MOMENTS}
        for name in sorted(places.keys() ^ tensors.keys()):
            raise ValueError(f"{folder / STATE}: tensor {name} is {'missing' if name in places else 'surplus'}")
        for name, place in places.items():
            if place.shape != tensors[name].shape:
                raise ValueError(f"{folder / STATE}: {name} has shape {list(tensors[name].shape)}")
            place.copy_(tensors[name])
        for state in self.optimizer.state.values():
            state["step"].fill_(meta["step"])
        self.done, self.num_blocks = meta["step"], meta["num_blocks"]


def checkpoint_folder(parent: Path, step: int) -> Path:
    """Where the state after `step` steps is kept."""
    return parent / f"step_{step}"


def checkpoints(parent: Path) -> list[Path]:
    """The complete states under `parent`, oldest first."""
    found = {int(match[1]): path for path in parent.glob("step_*") if (match := re.fullmatch(r"step_(\d+)", path.name))}
    return [found[step] for step in sorted(found)]


def newest_checkpoint(parent: Path, device: torch.device) -> Path | None:
    """The newest complete state under `parent` that rank 0 finds, on every rank; None if it finds none.

    A rank's own listing of a shared file system may be some seconds old, and ranks must not go on from different steps.
    """
    states = checkpoints(parent)
    if not dist.is_initialized():
        return states[-1] if states else None
    step = int(states[-1].name.removeprefix("step_")) if states else -1
    chosen = torch.tensor(step, device=device)
    dist.broadcast(chosen, 0)
    return None if int(chosen) < 0 else checkpoint_folder(parent, int(chosen))


def prune_checkpoints(parent: Path, keep: int) -> None:
    """Delete all but the newest `keep` states, and what killed processes left unfinished."""
    for folder in checkpoints(parent)[: -max(1, keep)]:
        shutil.rmtree(folder)
    remove_unfinished(parent)
