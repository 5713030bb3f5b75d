"""Targets and draft models of real sizes with random weights, where no weights can be had.

Place in the flow: `head_latency`, `decode` and `train_step` measure them. What a pass moves and computes does not
depend on the weights' values; what a draft model gets right does, so tau here is that of guessing. The draft models
are those of the paper's Table 4: five layers of the target's own sizes, blocks of 16, 8 candidates, heads as configured
by default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lilicorr.config import DrafterConfig
from lilicorr.draft_model import DraftModel, build_draft_model
from lilicorr.drafter import block_spec, captured_layer_ids, drafter_shape
from lilicorr.heads import HEADS
from lilicorr.target import PUBLIC, Target


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a Qwen3 target and of what drafts for it."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    drafter: DrafterConfig = DrafterConfig()
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)  # overrides of the heads' configs


def _published(name: str) -> ModelSize:
    """The sizes of one of the paper's targets."""
    values = PUBLIC[name]
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = [values[key] for key in (*keys, "head_dim", "vocab_size")]
    return ModelSize(name.partition("/")[2].lower(), *sizes, tied=values["tie_word_embeddings"])


SIZES = {"8b": _published("Qwen/Qwen3-8B"), "4b": _published("Qwen/Qwen3-4B")}
TOY_HEADS = {
    "lilicorr": {"hidden_size": 32, "num_heads": 4, "factor_dim": 32},
    "domino": {"gru_hidden_dim": 16, "emb_dim": 16},
    "dspark": {"markov_rank": 16},
}
# heads of a width that the attention kernel takes: a toy goes through the same checks on a GPU
TOY = ModelSize("toy", 64, 128, 6, 4, 2, 32, 1100, False, DrafterConfig(2, 4, 4, num_captured_layers=2), TOY_HEADS)


def random_target(size: ModelSize, device: str, dtype: torch.dtype, max_length: int = 4096) -> Target:
    """A target without tokenizer, made on `device`; its last id is the mask token."""
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=max_length,
        tie_word_embeddings=size.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layer_ids = captured_layer_ids(size.drafter, size.num_layers)
    return Target(model, tokenizer=None, layer_ids=layer_ids, mask_token_id=size.vocab_size - 1)


def random_draft_model(size: ModelSize, target: Target, head: str, dtype: torch.dtype | None) -> DraftModel:
    """A fresh draft model for `target` on its device, in the head's usual layout.

    Without `dtype` it is to be trained: in fp32, over the target's tables as they are.
    """
    spec = block_spec(size.drafter, target.config, target.mask_token_id, HEADS[head].layouts[0])
    torch.manual_seed(1)
    with torch.device(target.device):
        shape = drafter_shape(size.drafter, target.config)
        model = build_draft_model(shape, spec, head, size.heads.get(head, {}), target)
    return model if dtype is None else model.to(dtype).eval()


def here() -> tuple[str, torch.dtype]:
    """The device of the benches and the type served there: bf16 on a GPU, fp32 on a CPU."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def num_weights(tensors: list[torch.Tensor]) -> int:
    """Elements of some tensors together."""
    return sum(tensor.numel() for tensor in tensors)
