"""FSDP2 under the trainer: the weights, gradients and moments of the drafter's layers spread over the workers.

Place in the flow: with `train.sharding: fsdp2` a `Trainer` shards the layers before its first step and keeps its own
rules: every rank's gradient is of the same global mean, so shards are added and not averaged, in the parameters' own
fp32; they are reduced once a step, behind the last micro-batch; a state on disk is whole tensors. fc, norms and head
are a tenth of the weights, are used outside of the layers too and stay on every worker, as the frozen target does.

A layer's weights are gathered for its forward and its backward pass and dropped behind them. A parameter of a layer is
a DTensor; what this rank has of it is a plain tensor that shares its memory, and that is what AdamW sees.

Paper: Table 4 gives the optimizer; how it is spread over workers is not part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lilicorr.draft_model import DraftModel

SHARDINGS = ("none", "fsdp2")


def check_sharding(name: str, num_workers: int) -> None:
    """Raise ValueError for a `train.sharding` that is none, and for one worker with nobody to share with."""
    if name not in SHARDINGS:
        raise ValueError(f"train.sharding must be one of {', '.join(SHARDINGS)}, got {name!r}")
    if name == "fsdp2" and num_workers < 2:
        raise ValueError(f"train.sharding fsdp2 spreads layers over at least 2 workers, there is {num_workers}")


def shard_layers(draft_model: DraftModel, device: torch.device) -> list[FSDPModule]:
    """Spread the drafter's layers over all ranks, in place; their weights must be equal on all of them before."""
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # FSDP2 takes the current one
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers: list[FSDPModule] = []
    for layer in draft_model.drafter.layers:
        policy = MixedPrecisionPolicy(reduce_dtype=next(layer.parameters()).dtype)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)  # a factor would else be a kind of reduction that gloo lacks
        layers.append(layer)
    return layers


def reduce_next(layers: Iterable[FSDPModule], last: bool) -> None:
    """Whether the next backward pass reduces the gradients that it and those before it have made; the last one does."""
    for layer in layers:
        layer.set_requires_gradient_sync(last)
        layer.set_is_last_backward(last)


def own_part(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank keeps of a parameter, in the same memory: its shard, or all of one that is not sharded."""
    return nn.Parameter(parameter.detach().to_local()) if isinstance(parameter, DTensor) else parameter


def give_gradient(parameter: nn.Parameter, own: nn.Parameter, buffer: Tensor) -> None:
    """Let the gradient of a parameter and of this rank's part of it be the flat `buffer`; it is added to."""
    own.grad = buffer.view_as(own)
    if isinstance(parameter, DTensor):
        parameter.grad = _as_shard(parameter, own.grad)


def gather(parameter: nn.Parameter, own: Tensor) -> Tensor:
    """The whole tensor of which every rank has `own`, shaped like its part of `parameter`; all ranks must call it."""
    return _as_shard(parameter, own.detach()).full_tensor() if isinstance(parameter, DTensor) else own.detach()


def cut(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor shaped like `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def skeleton(draft_model: DraftModel) -> DraftModel:
    """A copy whose parameters hold no memory and whose tables are those of `draft_model` itself."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in draft_model.parameters()}
    return copy.deepcopy(draft_model, empty | {id(buffer): buffer for buffer in draft_model.buffers()})


def _as_shard(parameter: DTensor, own: Tensor) -> DTensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(own, mesh, placements, run_check=False, **sizes)
