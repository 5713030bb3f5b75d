"""Random targets of every family, small enough for every test."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lilicorr.target import Target, default_layer_ids


def make_target(
    family: str = "qwen3",
    dtype: torch.dtype = torch.float64,
    num_layers: int = 6,
    hidden: int = 32,
    vocab: int = 67,
    num_captured: int = 2,
    seed: int = 0,
    head_dim: int = 8,
    tied: bool = False,
) -> Target:
    """A random target with sharp enough logits that greedy decoding has no ties."""
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=vocab - 2,
        pad_token_id=None,
        tie_word_embeddings=tied,
    )
    kinds = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = kinds[family]
    model = model_class(config_class(**shape)).to(dtype).eval()
    return Target(model, tokenizer=None, layer_ids=default_layer_ids(num_layers, num_captured), mask_token_id=vocab - 1)
