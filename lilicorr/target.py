"""The frozen target: loading, the forward pass with captured layers, and a cache whose rollback is a length.

Place in the flow: training reads `features` and `hidden` of whole rows from it, decoding runs it over
[anchor, drafts] with a `TargetCache`; the drafter and the heads use its `embed` and `lm_head` tables.

Captured features are the raw residual stream after decoder layer i, for i in `layer_ids`, taken by forward
hooks: the same tensor as `hidden_states[i + 1]` of transformers for every layer but the last, where
transformers returns the normalised state instead (method of DFlash; paper section 3.1).
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache, DynamicLayer

from lilicorr.blocks import wide
from lilicorr.config import EMBEDDED, TARGET_DTYPES, TargetConfig, check_target
from lilicorr.wheels import cache_dir

# Fields that change logits behind lm_head, and their values that do not
LOGIT_FIELDS = {"final_logit_softcapping": (0,), "logit_scale": (1,), "logits_scaling": (1,)}
DTYPES = {name: getattr(torch, name) for name in TARGET_DTYPES}
_SIZES = dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151_936)
PUBLIC = {  # config.json of the paper's targets, for a machine that cannot reach them
    "Qwen/Qwen3-8B": dict(hidden_size=4096, intermediate_size=12_288, tie_word_embeddings=False, **_SIZES),
    "Qwen/Qwen3-4B": dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True, **_SIZES),
}


@dataclass(frozen=True)
class TargetOutput:
    """One forward pass of the target."""

    hidden: Tensor  # [R, T, H] after the final norm, the input of lm_head
    features: Tensor  # [R, T, C * H] captured layers, ascending, concatenated


class _PrefixLayer(DynamicLayer):
    """Keys and values of one layer in a buffer of fixed size, of which the first `length` positions count."""

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            rows, heads, _tokens, width = key_states.shape
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states.new_empty(rows, heads, self.max_length, width)
            self.values = value_states.new_empty(rows, heads, self.max_length, value_states.shape[-1])
        end = self.length + key_states.shape[2]
        assert end <= self.max_length, f"cache of {self.max_length} positions asked to hold {end}"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self, *_: Any) -> int:
        return self.length


class TargetCache(Cache):
    """Key-value cache of the target; setting `length` forgets everything behind it."""

    def __init__(self, num_layers: int, max_length: int) -> None:
        super().__init__(layers=[_PrefixLayer(max_length) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Positions that count."""
        return self.layers[0].length

    @length.setter
    def length(self, value: int) -> None:
        assert 0 <= value <= self.length, f"a cache of length {self.length} cannot be set to {value}"
        for layer in self.layers:
            layer.length = value


class Target:
    """A frozen causal language model of transformers, and the few things lilicorr needs of it.

    `layer_ids` are the captured decoder layers (0-based, ascending); empty means none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        layer_ids: tuple[int, ...],
        mask_token_id: int,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.tokenizer = tokenizer
        self.layer_ids = tuple(layer_ids)
        self.mask_token_id = mask_token_id
        self.embed: Tensor = model.get_input_embeddings().weight
        self.lm_head: Tensor = model.get_output_embeddings().weight
        _check_kind(model)
        if self.layer_ids and self.layer_ids[-1] >= self.config.num_hidden_layers:
            num_layers = self.config.num_hidden_layers
            raise ValueError(f"captured layer {self.layer_ids[-1]} of a target with {num_layers} layers")
        if not 0 <= mask_token_id < self.embed.shape[0]:
            num_rows = self.embed.shape[0]
            raise ValueError(f"mask token id {mask_token_id} is outside the target's {num_rows} embedding rows")
        # transformers renamed past_key_values to cache in 5.2x; the old name warns, the new one is unknown before.
        names = inspect.signature(model.base_model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._captured: dict[int, Tensor] = {}
        for layer_id in self.layer_ids:
            self.layers[layer_id].register_forward_hook(self._capture(layer_id))

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        return self.model.base_model.layers

    @property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and lm_head."""
        return self.model.base_model.norm

    def _capture(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    @property
    def num_ids(self) -> int | None:
        """How many rows of the tables are tokens, padding being behind them; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return min(num_token_ids(self.tokenizer), self.embed.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        return self.embed.device

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer, ascending."""
        return eos_ids_of(self.model.generation_config, self.config)

    @property
    def max_length(self) -> int:
        """Positions the target was made for."""
        return self.config.max_position_embeddings

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        cache: TargetCache | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> TargetOutput:
        """Run [R, T] ids, appended to `cache` where one is given.

        Right padding needs no mask: a causal model's states before the padding do not see it. Left-padded rows
        do: `attention_mask` [R, cached + T] is 0 at padding, `positions` [R, T] count without it.
        """
        arguments = {self._cache_argument: cache} if cache is not None else {}
        output = self.model.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=cache is not None,
            **arguments,
        )
        captured = [self._captured.pop(layer_id) for layer_id in self.layer_ids]
        hidden = output.last_hidden_state
        return TargetOutput(hidden, torch.cat(captured, dim=-1) if captured else hidden[..., :0])

    def logits(self, hidden: Tensor) -> Tensor:
        """lm_head of final states [..., H] -> [..., V], at least fp32."""
        return wide(nn.functional.linear(hidden, self.lm_head))

    def new_cache(self, max_length: int) -> TargetCache:
        """An empty cache for `max_length` positions."""
        return TargetCache(self.config.num_hidden_layers, max_length)


def are_broken(logits: Tensor) -> Tensor:
    """Where logits [..., V] are no law of a token, bool [...]: one is NaN or +inf, or all are -inf."""
    return ~logits.amax(dim=-1).isfinite()  # the largest of NaN and others is NaN


def eos_ids_of(*configs: Any) -> tuple[int, ...]:
    """Token ids that end an answer by any of a model's configs (generation and model), ascending."""
    ids: set[int] = set()
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        ids |= set(value if isinstance(value, list | tuple) else [value] if value is not None else [])
    return tuple(sorted(ids))


def _check_kind(model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose logits are not lm_head(norm(last layer)), or that is built in another way."""
    for name, harmless in LOGIT_FIELDS.items():
        value = getattr(model.config, name, None)
        if value not in (None, *harmless):
            raise ValueError(f"{name} = {value} is not supported: such logits are not lm_head(hidden)")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("an lm_head with a bias is not supported: such logits are not lm_head(hidden)")
    missing = [name for name in ("layers", "norm") if not hasattr(model.base_model, name)]
    if missing:
        raise ValueError(f"a target of the kind {model.config.model_type} is not supported: it has no {missing[0]}")


def default_layer_ids(num_target_layers: int, num_captured: int) -> tuple[int, ...]:
    """The captured layers by DFlash's rule: spread evenly from layer 1 to the third layer from the end.

    Raises ValueError where the target is too shallow to give `num_captured` distinct layers.
    """
    if num_captured < 1:
        raise ValueError(f"the drafter must read at least 1 layer of the target, got {num_captured}")
    if num_captured == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = tuple(round(1 + i * span / (num_captured - 1)) for i in range(num_captured))
    if list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ValueError(f"{num_captured} distinct layers cannot be captured from {num_target_layers}: {ids}")
    return ids


def rope_theta(config: Any) -> float:
    """The RoPE base of a transformers config, under its new or its old name."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", 10_000.0))


def target_head_dim(config: Any) -> int:
    """Width of an attention head of a transformers config, which not every family states."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def resolve_target(config: TargetConfig) -> str:
    """Folder or hub name of the target; makes the `random` and `smollm2` ones on first use.

    Raises ValueError as `check_target` does.
    """
    if config.source == "embedded":
        return str(EMBEDDED)
    if config.source == "random":
        from lilicorr.tiny import RANDOM, tiny_target_folder

        return str(tiny_target_folder(cache_dir() / "random", **RANDOM))
    if config.source == "smollm2":
        from lilicorr.smollm2 import smollm2_folder

        return str(smollm2_folder(cache_dir()))
    check_target(config)
    return str(config.path or config.source)


def model_config(config: TargetConfig) -> PretrainedConfig:
    """The target's own config of transformers, without its weights.

    Raises ValueError as `resolve_target` does, and where there is no such model or no way to it.
    """
    name = resolve_target(config)
    try:
        return AutoConfig.from_pretrained(name, revision=config.revision).get_text_config()
    except OSError as error:  # of transformers, whose text names the hub and its own ways out
        reason = str(error).splitlines()[0]
        raise ValueError(f"target.source {config.source!r} is neither a folder nor a model: {reason}") from error


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the tokenizer's largest id; its length is less where its ids have holes."""
    return max(tokenizer.get_vocab().values()) + 1


def resolve_mask_token(config: TargetConfig, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> int:
    """The mask token's id: the configured one, else the first embedding row behind the tokenizer's ids, else
    the tokenizer's own mask token.

    Raises ValueError where the id has no embedding row, or where there is none to choose: the embedding is
    never resized, since a new row would neither be trained nor exist in the server.
    """
    if config.mask_token_id is not None:
        if not 0 <= config.mask_token_id < num_rows:
            raise ValueError(f"mask_token_id {config.mask_token_id} is outside the target's {num_rows} embedding rows")
        return config.mask_token_id
    if (unused := num_token_ids(tokenizer)) < num_rows:
        return unused
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    raise ValueError(
        f"the target's {num_rows} embedding rows are all taken and its tokenizer has no mask token; "
        "set target.mask_token_id to an id that never occurs in text"
    )


def names_of(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None, revision: str | None
) -> dict[str, str | None]:
    """What tells a target from others of its sizes: revision, kind, hashes of tokenizer and chat template.

    `revision` is what was asked for; where the hub has said which commit that is, the commit counts. None is unknown.
    """
    template = None if tokenizer is None or tokenizer.chat_template is None else tokenizer.get_chat_template()
    return {
        "revision": getattr(config, "_commit_hash", None) or revision,
        "model_type": config.model_type,
        "tokenizer_hash": None if tokenizer is None else _sha256(tokenizer.backend_tokenizer.to_str()),
        "template_hash": None if template is None else _sha256(template),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def load_target(config: TargetConfig, device: str | torch.device = "cpu", layer_ids: tuple[int, ...] = ()) -> Target:
    """Load model and tokenizer, frozen, on `device`, capturing `layer_ids`."""
    check_target(config)
    name = resolve_target(config)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=config.revision)
    model = AutoModelForCausalLM.from_pretrained(name, revision=config.revision, dtype=DTYPES[config.dtype])
    mask_token_id = resolve_mask_token(config, tokenizer, model.get_input_embeddings().weight.shape[0])
    if torch.device(device).type == "cpu":
        # Weights of the file's own type are the mapped file, whose pages are small and are dropped and read again.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return Target(model.to(device), tokenizer, layer_ids, mask_token_id)
