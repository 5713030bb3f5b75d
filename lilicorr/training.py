"""Joint training of drafter and head: one optimizer step, the schedule, and exact resume.

Place in the flow: `pipelines/train.py` runs a `Trainer` in every worker; without torch.distributed it is a
plain single-process trainer. One step is

    sampler(step) -> rows, dealt to the ranks by cost -> micro-batches
    target (no gradient) -> features -> draft model -> loss terms as sums and counts
    counts added over micro-batches and ranks -> backward of the global mean -> gradients added over ranks, once
    clip over everything -> AdamW in two groups

Nothing is drawn from a process's random state: rows follow from (seed, step), anchors from (seed, epoch,
sample id). A state is weights, moments and a step number, and going on from it is bit-equal on a CPU.

Paper: section 3.4 (objective), Table 4 (optimizer, schedule, fp32 masters).
"""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from lilicorr.anchors import choose_anchors
from lilicorr.block_mask import choose_attention
from lilicorr.blocks import LossTerm, TrainBatch
from lilicorr.checkpoint import check_same_drafter, read_checkpoint
from lilicorr.config import DrafterConfig, RunConfig, TrainConfig, fingerprint
from lilicorr.corpus import Sampler, TrainingSet
from lilicorr.deal import deal_rows, row_costs
from lilicorr.draft_model import DraftModel
from lilicorr.features import FeatureSource
from lilicorr.losses import total_loss
from lilicorr.sharding import check_sharding, cut, gather, give_gradient, own_part, reduce_next, shard_layers, skeleton
from lilicorr.state import check_fits, read_state, write_state
from lilicorr.target import Target

SCHEDULES = ("cosine", "constant")
PRECISIONS = ("bfloat16", "float32")
MOMENTS = ("exp_avg", "exp_avg_sq")
# How a run is carried out: changing these changes no number beyond the order of additions.
PACE = (
    *("runs", "micro_batch_size", "chunk_blocks", "cache_features", "checkpoint_steps", "keep_checkpoints"),
    *("attention", "sharding"),
    *("log_steps", "eval_steps", "num_workers", "min_workers", "gpus_per_worker", "max_failures"),
    *("trackers", "tracking_project"),
)

# Of a run and of its drafter, since runs were first trained: unset they leave its identity alone.
ADDED = ("block_layout", "block_size", "target_layer_ids")


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

    def known(part: RunConfig | DrafterConfig) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(part).items() if value is not None or key not in ADDED}

    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in PACE}
    values["drafter"] = known(config.drafter)
    return fingerprint(values, known(run), training_set.meta["content"], *more)


def start_drafter(draft_model: DraftModel, folder: Path, target: Target) -> int:
    """Copy the drafter of the checkpoint `folder` into `draft_model`; the head stays as it is.

    The checkpoint may be of any format and head; YaRN is for serving and stays behind. Returns the blocks that the
    drafter has seen, 0 where its checkpoint does not say it. Raises ValueError that names the field if the two
    drafters differ in shape or in how they cut blocks.
    """
    checkpoint = read_checkpoint(folder, target)
    check_same_drafter(folder, checkpoint.description, draft_model)
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

    With `config.sharding` the drafter's layers are spread over the ranks (`sharding`), and `step`, `save` and
    `whole_model` are for all ranks to call. `parameters` are the draft model's; `own` is what this rank has of each,
    itself where nothing is sharded, and `gradient` is in the order of `own`.

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
        check_sharding(config.sharding, self.world)
        if not {parameter.dtype for parameter in draft_model.parameters()} <= {torch.float32, torch.float64}:
            raise ValueError("parameters must be float32: in bfloat16 a small step does not move a weight near 1")
        draft_model.train()
        if self.world > 1:
            for parameter in draft_model.parameters():
                dist.broadcast(parameter.data, 0)
        self.layers: list[FSDPModule] = []
        if config.sharding == "fsdp2":
            self._blank = skeleton(draft_model)
            self.layers = shard_layers(draft_model, self.device)
        self.parameters = dict(draft_model.named_parameters())
        self.own = self._own_parts()
        self.gradient, self.num_whole = self._flat_gradient()
        self.optimizer = self._make_optimizer()

    def _own_parts(self) -> dict[str, nn.Parameter]:
        """What this rank keeps of every parameter; behind those that it has whole come the shards."""
        sharded = {id(parameter) for layer in self.layers for parameter in layer.parameters()}
        order = sorted(self.parameters, key=lambda name: id(self.parameters[name]) in sharded)
        return {name: own_part(self.parameters[name]) for name in order}

    def _flat_gradient(self) -> tuple[Tensor, int]:
        """One buffer for all gradients; every parameter's `grad` is a view of it, so it is reduced as it lies.

        The first so many numbers are those of parameters that this rank has whole. FSDP2 adds up the others itself.
        """
        sizes = [own.numel() for own in self.own.values()]
        some = next(iter(self.own.values()))
        buffer = torch.zeros(sum(sizes), dtype=some.dtype, device=some.device)
        for (name, own), part in zip(self.own.items(), buffer.split(sizes)):
            give_gradient(self.parameters[name], own, part)
        shards = sum(self.own[name].numel() for name in self.own if self.own[name] is not self.parameters[name])
        return buffer, len(buffer) - shards

    def _make_optimizer(self) -> torch.optim.AdamW:
        config, model = self.config, self.draft_model
        own = {id(parameter): self.own[name] for name, parameter in self.parameters.items()}
        groups = []
        for parameters, lr, weight_decay in (
            (model.drafter_parameters(), config.drafter_lr, config.drafter_weight_decay),
            (model.head_parameters(), config.head_lr, config.head_weight_decay),
        ):
            params = [own[id(parameter)] for parameter in parameters]
            groups.append({"params": params, "lr": lr, "base": lr, "weight_decay": weight_decay})
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True)
        for parameter in self.own.values():
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
        parts, sizes = self._forward(epoch, rows)
        weights = {name: term.weight for name, term in parts[0].items()}
        counts, means, sizes = self._globalise(parts, sizes)
        self._backward(parts, counts)
        norm = self._norm()
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
            "loss": sum(weight * means[name] for name, weight in weights.items() if weight),
            **means,
            "grad_norm": norm,
            "drafter_lr": factor * self.config.drafter_lr,
            "head_lr": factor * self.config.head_lr,
            **sizes,
            "num_blocks": self.num_blocks,
            "blocks_per_s": sizes["blocks"] / seconds,
            "seconds": seconds,
        }

    def _forward(self, epoch: int, rows: list[int]) -> tuple[list[dict[str, LossTerm]], dict[str, int]]:
        """The loss terms of this rank's micro-batches, and how many blocks and tokens they stand for."""
        parts: list[dict[str, LossTerm]] = []
        sizes = {"blocks": 0, "tokens": 0}
        costs = row_costs(self.training_set, rows, self.config.max_anchors)
        deal = (costs, self.config.micro_batch_size, self.rank, self.world)
        # all ranks gather the weights of sharded layers together
        micro_batches = list(deal_rows(rows, *deal, even=bool(self.layers)))
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
                    parts.append(checkpoint(self.draft_model, *arguments, use_reentrant=False))
                else:
                    parts.append(self.draft_model(*arguments))
        return parts, sizes

    def _globalise(
        self, parts: list[dict[str, LossTerm]], sizes: dict[str, int]
    ) -> tuple[dict[str, Tensor], dict[str, float], dict[str, int]]:
        """The counts over all micro-batches and ranks, the global mean of every term, and the global sizes."""
        flat = [torch.stack([value for term in terms.values() for value in (term.sum, term.count)]) for terms in parts]
        local = torch.stack(flat).detach().double().sum(0)
        extra = torch.tensor(list(sizes.values()), dtype=local.dtype, device=local.device)
        everything = self._sum(torch.cat([local, extra])).tolist()
        counts, means = {}, {}
        for index, (name, term) in enumerate(parts[0].items()):
            total, count = everything[2 * index : 2 * index + 2]
            counts[name] = torch.full_like(term.count, count)
            means[name] = total / max(count, 1e-6)
        return counts, means, dict(zip(sizes, map(int, everything[len(local) :])))

    def _backward(self, parts: list[dict[str, LossTerm]], counts: dict[str, Tensor]) -> None:
        """The gradient of the local sums over the global counts, added over the ranks once.

        One micro-batch after the other, the last one first: it alone may have kept its activations.
        """
        self.gradient.zero_()
        while parts:
            terms = parts.pop()
            reduce_next(self.layers, last=not parts)
            total_loss({n: LossTerm(term.sum, counts[n], term.weight) for n, term in terms.items()}).backward()
        self._sum(self.gradient[: self.num_whole])

    def _norm(self) -> float:
        """The global norm of the gradient of all parameters."""
        if not self.layers:
            return float(self.gradient.norm())
        whole, shards = self.gradient.tensor_split([self.num_whole])
        return float((whole.norm().square() + self._sum(shards.norm().square())).sqrt())

    def _sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def whole_model(self) -> DraftModel | None:
        """The draft model with all of its weights on rank 0, None elsewhere; sharded, good until the next step."""
        if not self.layers:
            return self.draft_model if self.rank == 0 else None
        weights = {}
        for name, parameter in self.parameters.items():
            whole = gather(parameter, self.own[name])
            if self.rank == 0:
                weights[name] = whole
        if self.rank:
            return None
        model = skeleton(self._blank)
        model.load_state_dict(weights, assign=True)
        return model

    def save(self, folder: Path) -> None:
        """Write weights, moments, step and identity to `folder`, whole or not at all; rank 0 writes.

        What is sharded is whole in the file, so that any number of workers may go on from it, sharded or not.
        """
        if self.rank and not self.layers:
            return
        tensors: dict[str, Tensor] = {}
        for name, (parameter, place) in self._places().items():
            whole = gather(parameter, place)
            if self.rank == 0:
                tensors[name] = whole.cpu().contiguous()
        meta = {"step": self.done, "num_steps": self.num_steps, "num_blocks": self.num_blocks}
        if self.rank == 0:
            write_state(folder, tensors, meta | {"identity": self.identity})

    def _places(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Every tensor of a state by its name: the parameter it belongs to, and where this rank has its part of it."""
        places: dict[str, tuple[nn.Parameter, Tensor]] = {}
        for name, own in self.own.items():
            parts = {"weight": own} | {moment: self.optimizer.state[own][moment] for moment in MOMENTS}
            places |= {f"{kind}.{name}": (self.parameters[name], part) for kind, part in parts.items()}
        return places

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Go on from a state that `save` wrote.

        Raises ValueError, naming the file or tensor, if it is damaged, does not fit, or is another run's.
        """
        tensors, meta = read_state(folder, self.identity)
        places = self._places()
        check_fits(folder, tensors, {name: parameter.shape for name, (parameter, _) in places.items()})
        for name, (parameter, place) in places.items():
            place.copy_(cut(parameter, tensors[name]))
        for state in self.optimizer.state.values():
            state["step"].fill_(meta["step"])
        self.done, self.num_blocks = meta["step"], meta["num_blocks"]
