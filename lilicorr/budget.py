"""What a training step holds and computes, found without a GPU or weights: on tensors that have shapes and no values.

Place in the flow: `pipelines/train.py --estimate` prints it before a cluster is asked for; tests hold the loss to
it. The code that is counted is the one that trains: the drafter and the head's loss, forward and backward, with all
that is recomputed. Paper: Table 4 (sizes of a step).
"""

from __future__ import annotations

import math
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lilicorr.blocks import TrainBatch
from lilicorr.config import RunConfig, TrainConfig
from lilicorr.draft_model import DraftModel, run_block_spec
from lilicorr.drafter import drafter_shape
from lilicorr.losses import total_loss
from lilicorr.target import target_head_dim

WIDE, MOMENTS = 4, 8  # bytes of a parameter or its gradient, and of AdamW's two moments


class PeakMemory(TorchDispatchMode):
    """Context manager: bytes of the storages made inside; `alive` now, `peak` at most, `largest` single one."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in self._known | given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _key(tensor: Tensor) -> int:
    """Identity of what a tensor lies in."""
    return tensor.untyped_storage()._cdata


def step_budget(
    config: TrainConfig,
    run: RunConfig,
    target_config: Any,
    target_dtype: torch.dtype,
    length: int,
    num_blocks: int,
    num_rows: int,
) -> dict[str, dict[str, float]]:
    """Bytes by part that a worker holds in a step, and operations by part of each of its rows.

    The step is `num_rows` rows of `length` tokens and `num_blocks` blocks, `config.micro_batch_size` at a time;
    `target_config` is the target's from transformers. Every micro-batch's captured states are held until the backward
    pass. On GPUs only the last one's activations are, and what was done for the others is done again, as
    `Trainer.recompute` has it; on CPUs all are. Returns `bytes` and `operations`. The target's pass follows from its
    sizes, the rest is counted.
    """
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config, dtype=target_dtype)
    matrices = sum(p.numel() for p in target.base_model.layers.parameters() if p.dim() == 2)
    width = target_config.num_attention_heads * target_head_dim(target_config)
    attention = 2 * length * length * target_config.num_hidden_layers * width
    size, layers = target_dtype.itemsize, drafter_shape(config.drafter, target_config).num_captured_layers
    together = min(config.micro_batch_size, num_rows)
    num_batches = math.ceil(num_rows / together)
    recompute = config.gpus_per_worker > 0
    counted = _micro_batch_budget(config, run, target_config, target_dtype, length, num_blocks, together)
    weights, forward, loss = counted["weights"], counted["forward"] / together, counted["loss"] / together
    gathered = {}
    if config.sharding == "fsdp2":
        weights -= counted["layers"] * (1 - 1 / config.num_workers)
        # without further micro-batches one layer is whole at a time, its gradient beside it
        whole = counted["layers"] / (1 if num_batches > 1 else config.drafter.num_layers)
        gathered = {"layers gathered, and their gradient until it is reduced": 2 * WIDE * whole}
    states = size * together * length * target_config.hidden_size
    intermediate = target_config.intermediate_size
    return {
        "bytes": {
            "target's weights": size * sum(p.numel() for p in target.parameters()),
            "target's pass over a micro-batch": 2 * (states + size * together * length * intermediate),
            "captured and final states": num_batches * (layers + 1) * states,
            "trained weights, fp32": WIDE * weights,
            "their gradient": WIDE * weights,
            "AdamW's moments": MOMENTS * weights,
            **gathered,
            "bf16 copies of the weights": counted["copies"],
            "activations of the drafter": counted["activations"] * (1 if recompute else num_batches),
            "loss and backward pass": counted["backward_bytes"],
        },
        "operations": {
            "target": 2 * length * matrices + attention,
            "drafter forward": forward,
            "loss and backward": loss + counted["backward"] / together,
            "micro-batches done again": (forward + loss) * (num_batches - 1) / num_batches if recompute else 0.0,
        },
    }


def _micro_batch_budget(
    config: TrainConfig,
    run: RunConfig,
    target_config: Any,
    target_dtype: torch.dtype,
    length: int,
    num_blocks: int,
    num_rows: int,
) -> dict[str, float]:
    """The draft model's weights, and bytes and operations of one micro-batch of `num_rows` rows, which are counted."""
    with FakeTensorMode():
        table = (target_config.vocab_size, target_config.hidden_size)
        embed, lm_head = torch.empty(table, dtype=target_dtype), torch.empty(table, dtype=target_dtype)
        spec = run_block_spec(config.drafter, run, target_config, 0)
        shape = drafter_shape(config.drafter, target_config)
        model = DraftModel(shape, spec, run.head, run.head_config, embed, lm_head)
        num_weights, layers = (sum(p.numel() for p in m.parameters()) for m in (model, model.drafter.layers))
        batch = TrainBatch(
            torch.zeros(num_rows, length, dtype=torch.int64),
            torch.ones(num_rows, length, dtype=torch.bool),
            torch.full((num_rows,), length),
            torch.zeros(num_rows, dtype=torch.int64),
        )
        width = shape.num_captured_layers * shape.hidden_size
        features = torch.empty(num_rows, length, width, dtype=target_dtype)
        final_hidden = torch.empty(num_rows, length, shape.hidden_size, dtype=target_dtype)
        anchors = torch.zeros(num_rows, num_blocks, dtype=torch.int64)
        rows = torch.arange(num_rows).repeat_interleave(num_blocks)
        half = config.precision == "bfloat16"
        with PeakMemory() as memory, FlopCounterMode(display=False) as flops, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Mismatch dtype")  # a CPU's fused norm, and there is no CPU here
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                context, hidden = model.block_states(features, batch, anchors)
                kept, forward = memory.alive, flops.get_total_flops()
                blocks = (hidden.flatten(0, 1), rows, anchors.flatten())
                terms = model.block_terms(*blocks, context, final_hidden, batch, 1.0, config.chunk_blocks)
                loss = total_loss(terms)
            with_loss = flops.get_total_flops()
            for parameter in model.parameters():  # the trainer adds them to one buffer as they come
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            loss.backward()
        copies = 2 * num_weights if half else 0
        return {
            "weights": num_weights,
            "layers": layers,
            "copies": copies,
            "activations": kept - copies,
            "backward_bytes": memory.peak - kept,
            "forward": forward,
            "loss": with_loss - forward,
            "backward": flops.get_total_flops() - with_loss,
        }
