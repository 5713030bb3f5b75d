"""Configuration: small frozen dataclasses, a default stands once, an unknown key is an error.

Place in the flow: a profile (`pipelines/profiles/*.yaml`) overrides `PipelineConfig`; every stage and every
module takes its own dataclass out of it. `load_profile` reads the file, `with_overrides` applies dotted
`--set a.b=c` arguments, `to_dict` and `fingerprint` are what is saved and hashed.

Paper: Table 4 gives the defaults of the drafter, the head and the training run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lilicorr.values import above, at_least, at_most, finite, one_of, read_profile, set_value, unknown_key

Config = TypeVar("Config")
BUILT_IN = ("embedded", "random", "smollm2")  # targets that the package has or makes
EMBEDDED = Path(__file__).parent / "embedded"  # the folder of the one it has
TARGET_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TargetConfig:
    """The frozen target. `source` is `embedded`, `smollm2`, `random`, or a transformers model name or folder."""

    source: str = "embedded"
    revision: str | None = None
    dtype: str = "float32"  # of the frozen weights
    mask_token_id: int | None = None  # None: the first embedding row past the tokenizer, else its mask token
    template_kwargs: dict[str, Any] = field(default_factory=lambda: {"enable_thinking": False})

    @property
    def path(self) -> Path | None:
        """The folder that `source` names by its path; None for a built-in target and for a name that has no folder."""
        path = Path(os.path.expanduser(self.source))
        looks_like_path = self.source.startswith((".", "/", "~")) or self.source.count("/") > 1
        return path if self.source not in BUILT_IN and (looks_like_path or path.is_dir()) else None


def check_target(config: TargetConfig) -> None:
    """Raise ValueError for a type of weights that is none, and for a target folder that holds no model."""
    if config.dtype not in TARGET_DTYPES:
        raise ValueError(f"target.dtype must be one of {', '.join(TARGET_DTYPES)}, got {config.dtype!r}")
    if config.path is not None and not (config.path / "config.json").is_file():
        raise ValueError(f"target folder {config.path} has no config.json")


@dataclass(frozen=True)
class PromptConfig:
    """Where conversations come from. `source` is `stdlib`, `packages`, `nemotron_v2`, or a parquet/JSONL path."""

    source: str = "stdlib"
    data_dir: str | None = None  # nemotron_v2: its files, stem-*.parquet ...; packages: theirs, None is the cache
    max_conversations: int | None = None  # lowest content hash first, kept in the source's category ratio
    max_chars: int | None = None  # drop (and count) longer conversations
    held_out_fraction: float = 0.02  # split off by content hash before anything else
    max_held_out: int | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "max_conversations", "max_chars")
        at_least(self, 0, "max_held_out")


@dataclass(frozen=True)
class RegenerateConfig:
    """Regeneration of every assistant turn by the target (paper, section 4.1)."""

    engine: str = "vllm"  # vllm | transformers
    max_new_tokens: int = 4096
    max_model_len: int | None = None  # None: the target's context length
    batch_size: int = 256  # conversations in flight in one generator
    shard_size: int = 2048  # conversations per shard, the unit of commit and of retry
    num_actors: int = 1
    gpus_per_actor: float = 1.0
    cpus_per_actor: float = 1.0
    max_attempts: int = 3  # of a shard whose engine dies, until its conversations are made one by one
    max_dead_fraction: float = 0.001

    def __post_init__(self) -> None:
        at_least(self, 1, "max_new_tokens", "max_model_len", "batch_size", "shard_size", "num_actors", "max_attempts")
        at_least(self, 0, "gpus_per_actor", "cpus_per_actor", "max_dead_fraction")


@dataclass(frozen=True)
class YarnConfig:
    """YaRN of the drafter's positions at inference, past the length it was trained on (paper, section 4.3.1)."""

    factor: float  # served context over the training length
    original_max_position_embeddings: int  # the training length
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # on cosine and sine; None: 0.1 ln(factor) + 1

    def __post_init__(self) -> None:
        at_least(self, 1, "factor", "original_max_position_embeddings")
        above(self, 0, "beta_fast", "beta_slow", "attention_factor")
        finite(self, "factor", "beta_fast", "beta_slow", "attention_factor")


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of the DFlash drafter; None is the target's own value (method: paper section 3.1, DFlash)."""

    num_layers: int = 5
    block_size: int = 16
    num_candidates: int = 8
    num_captured_layers: int | None = None  # None: as many as drafter layers
    target_layer_ids: tuple[int, ...] | None = None  # the captured ones, from 0; None: spread by DFlash's rule
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    init: str = "random"  # random | target: the target's last layers (needs the target's own shape)
    restrict_vocab: bool = False  # predict only ids that occur in the training set


@dataclass(frozen=True)
class ArgmaxConfig:
    """Vanilla DFlash: each slot's most likely token, trained by Eq. (6)."""

    decay: float = 7.0  # beta of Eq. (6)
    dpace_alpha: float | None = None  # D-PACE's weights instead of the decay; its authors use 0.5


@dataclass(frozen=True)
class LiLiCorrConfig:
    """The LiLiCorr head (Table 4, Appendix A) and its objective, Eq. (7) and Appendix G."""

    hidden_size: int = 1024  # 0: the drafter's width, no token projection
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    factor_dim: int = 1024  # d_e
    vector_eps: float = 1e-4
    logit_scale: float = 8.0  # sigma
    decay: float = 7.0  # beta of Eq. (6)
    dpace_alpha: float | None = None  # D-PACE's weights instead of the decay in Eq. (6)
    head_weight: float = 0.25  # gamma
    distractor_weight: float = 1.0  # lambda
    margin_blend: float = 0.0  # mu, 0.5 in LiLiCorr + margin
    margin: float = 2.0  # rho
    full_blocks_only: bool = True  # supervise the head only on blocks whose every slot has a label
    ramp_fraction: float = 0.0  # share of the steps over which the head's weight rises from 0
    token_scale: float = 0.0  # rms of the projected target embeddings at the start; 0: as N(0, 0.02) weights give it
    walk: str = "greedy"  # greedy | exact | lookahead
    contract: str = "deterministic"  # deterministic | sampled: a drawn walk where the temperature is above 0


@dataclass(frozen=True)
class RunConfig:
    """One trained draft model: which head, from where, for how long."""

    head: str = "lilicorr"
    head_config: dict[str, Any] = field(default_factory=dict)  # overrides of the head's own config
    block_layout: str | None = None  # in_place | anchor_first; None: the head's usual one
    block_size: int | None = None  # None: the drafter's
    start_from: str | None = None  # a run before this one, or a checkpoint's folder (with a /): start from its drafter
    epochs: float | None = None  # exactly one of epochs and steps
    steps: int | None = None
    schedule: str = "cosine"  # cosine | constant, both after a linear warm-up
    warmup_fraction: float = 0.04


@dataclass(frozen=True)
class TrainConfig:
    """The joint training run (Table 4)."""

    runs: dict[str, RunConfig] = field(default_factory=dict)
    drafter: DrafterConfig = DrafterConfig()
    drafter_lr: float = 6e-4
    head_lr: float = 1.5e-4
    drafter_weight_decay: float = 0.0
    head_weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    batch_size: int = 64  # rows per optimizer step over all workers
    micro_batch_size: int = 1  # rows per forward of one worker
    max_length: int = 3072  # tokens per row, longer rows are cut on the right
    max_anchors: int = 512  # per row and epoch
    chunk_blocks: int | None = 128  # blocks whose vocabulary logits exist at once; None: 512 MiB of them in fp32
    layout: str = "turn"  # turn: one row per generated turn | conversation: one row per conversation
    precision: str = "bfloat16"  # of the matrix products; parameters and moments are fp32 always
    attention: str = "auto"  # of the drafter: auto (flex on CUDA, else parts) | flex | sdpa | parts (docs/training.md)
    sharding: str = "none"  # none | fsdp2: the drafter's layers, gradients and moments spread over the workers
    cache_features: bool = False  # keep the target's features of the whole training set on disk (one machine)
    seed: int = 0
    checkpoint_steps: int = 1000
    keep_checkpoints: int = 2
    log_steps: int = 10
    eval_steps: int | None = None  # measure tau on a few held-out prompts every so many steps
    trackers: tuple[str, ...] = ()  # beside metrics.jsonl: tensorboard, mlflow, wandb
    tracking_project: str = "lilicorr"  # MLflow's experiment, the project of Weights & Biases
    num_workers: int = 1
    min_workers: int | None = None  # go on with as few while nodes are missing; None: only with num_workers
    gpus_per_worker: float = 1.0
    max_failures: int = 3  # -1: any number

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "micro_batch_size", "max_anchors", "chunk_blocks", "num_workers", "min_workers")
        at_least(self, 1, "checkpoint_steps", "keep_checkpoints", "log_steps", "eval_steps")
        at_least(self, 2, "max_length")
        at_least(self, 0, "drafter_lr", "head_lr", "drafter_weight_decay", "head_weight_decay", "gpus_per_worker")
        at_least(self, 0, "seed")
        at_least(self, -1, "max_failures")
        above(self, 0, "max_grad_norm")
        at_most(self, "min_workers", "num_workers")


@dataclass(frozen=True)
class EvaluateConfig:
    """Which systems are decoded on which prompt sets."""

    sets: tuple[str, ...] = ("held_out", "humaneval", "mt_bench", "gsm8k_100", "aime25_25")
    systems: dict[str, SystemConfig] = field(default_factory=dict)
    max_prompts: int | None = None  # per benchmark; held-out prompts are limited by prompts.max_held_out
    max_new_tokens: int = 1024
    temperature: float = 0.0
    bootstrap_samples: int = 10_000
    seed: int = 42
    sampled_seeds: tuple[int, ...] = ()  # also decode at `sampled_temperature` with each of these; paper: 42, 43, 44
    sampled_temperature: float = 1.0
    yarn: YarnConfig | None = None  # of every drafter
    concurrencies: tuple[int, ...] = ()  # decode also so many requests at once, in the engine; paper: 1, 2, 4, ... 32
    concurrent_sets: tuple[str, ...] = ("speed_1k", "speed_2k", "speed_8k", "speed_16k", "speed_32k")  # of `sets`

    def __post_init__(self) -> None:
        at_least(self, 1, "max_prompts", "max_new_tokens", "bootstrap_samples", "concurrencies")
        at_least(self, 0, "temperature", "sampled_temperature", "seed", "sampled_seeds")


@dataclass(frozen=True)
class SystemConfig:
    """A row of the table: a trained run, and what is changed in it for decoding."""

    run: str | None = None  # None: autoregressive
    head: str | None = None  # decode the run's drafter with another head (argmax)
    head_config: dict[str, Any] = field(default_factory=dict)  # e.g. {walk: exact}
    only: str | None = None  # greedy | sampled: left out above temperature 0, or at 0, where it equals another system
    yarn: bool = True  # take part in evaluate.yarn

    def __post_init__(self) -> None:
        one_of(self, (None, "greedy", "sampled"), "only")


@dataclass(frozen=True)
class EngineConfig:
    """The engine: how many requests at once, and the memory they share."""

    max_running: int = 32  # rows: requests that are decoded at once
    max_model_len: int | None = None  # prompt and answer; None: the target's context length
    num_pages: int | None = None  # pages of 64 positions; None: as many as fit into `kv_gib` and are of use
    kv_gib: float | None = None  # memory of keys and values; None: 90 % of what a GPU has left, 1 GiB on a CPU
    prefill_tokens: int = 512  # prompt tokens of a step beside rows that decode
    idle_prefill_tokens: int = 4096  # prompt tokens of a step while no row decodes
    prefix_cache: bool = True
    steps_behind: int | None = None  # steps the host may be behind the device; None: 1 on a GPU, 0 on a CPU
    deterministic: bool = False  # every pass has one shape, so an answer has the same bits in any company
    deterministic_width: int = 16  # positions of a row in these passes; a block must fit
    # Measured (rows, positions a row, ms) of steps: as many positions are verified as give most tokens a time; (): all
    verify_costs: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 1, "max_running", "prefill_tokens", "idle_prefill_tokens", "deterministic_width")
        at_least(self, 1, "max_model_len", "num_pages")
        one_of(self, (None, 0, 1), "steps_behind")
        if self.num_pages is not None and self.kv_gib is not None:
            raise ValueError(f"set num_pages or kv_gib, not both, got {self.num_pages} and {self.kv_gib}")
        for entry in self.verify_costs:
            if len(entry) != 3 or entry[0] < 1 or entry[2] <= 0:
                raise ValueError(f"verify_costs must be rows of (rows, positions, milliseconds), got {entry}")
        if self.verify_costs and self.deterministic:
            raise ValueError("verify_costs cuts passes to different shapes, deterministic asks for one: set one")


@dataclass(frozen=True)
class DeployConfig:
    """The served endpoint."""

    run: str = "lilicorr"
    model_name: str = "lilicorr"
    host: str = "127.0.0.1"
    port: int = 8000
    num_replicas: int = 1
    gpus_per_replica: float = 1.0
    max_model_len: int | None = None
    yarn: YarnConfig | None = None
    engine: EngineConfig = EngineConfig()  # without its max_model_len, which stands above
    max_queue: int = 64  # requests of a replica that wait for a row; more are answered 429
    max_ongoing_requests: int = 128  # what Serve sends to one replica; more than engine.max_running + max_queue
    api_key_file: str | None = None  # keys, one a line, of which a request must have one
    admin_key_file: str | None = None  # the key that setting replicas on the page /ui asks for

    def __post_init__(self) -> None:
        at_least(self, 1, "port", "num_replicas", "max_model_len")
        at_least(self, 0, "gpus_per_replica")
        if self.port > 65_535:
            raise ValueError(f"port must be at most 65535, got {self.port}")


@dataclass(frozen=True)
class PipelineConfig:
    """Everything `pipelines/full.py` needs; a profile overrides parts of it."""

    profile: str = "demo"
    run_dir: str = "runs"  # outputs go to run_dir/profile
    target: TargetConfig = TargetConfig()
    prompts: PromptConfig = PromptConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    deploy: DeployConfig = DeployConfig()

    @property
    def directory(self) -> Path:
        """Where this profile's outputs live."""
        return Path(self.run_dir) / self.profile


def from_dict(kind: type[Config], values: dict[str, Any], where: str = "") -> Config:
    """Build the dataclass `kind` from nested `values`.

    Raises ValueError that names the full key, and the nearest known one for an unknown key, the expected type or
    the limit for a value that does not fit.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'config'} must be a mapping, got {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise ValueError(unknown_key(key, hints, where))
    fields = {key: _convert(hints[key], value, f"{where}{key}") for key, value in values.items()}
    try:
        return kind(**fields)
    except ValueError as error:  # of the dataclass itself, which does not know where it stands
        raise ValueError(f"{where}{error}") from error


def _convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `kind`; the only coercions are to float (1, "1e-4") and list to tuple."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, f"{where}.")
    if origin is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-4, which has no point, as a text
        with contextlib.suppress(ValueError):  # another text fails below
            return float(value)
    expected = origin or kind
    if kind is not Any and (not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool)):
        raise ValueError(f"{where} must be {getattr(expected, '__name__', expected)}, got {value!r}")
    return value


def to_dict(config: Any) -> dict[str, Any]:
    """The dataclass as plain nested values, ready for JSON or YAML."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def fingerprint(*parts: Any) -> str:
    """16 hex digits of the content of configs and plain values; the key by which finished work is found."""
    plain = [dataclasses.asdict(part) if dataclasses.is_dataclass(part) else part for part in parts]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_overrides(config: Config, overrides: list[str]) -> Config:
    """Apply `a.b=value` strings (value in YAML) to a config dataclass."""
    values = dataclasses.asdict(config)
    for override in overrides:
        set_value(values, override)
    return from_dict(type(config), values)


def load_profile(name: str, folder: Path, overrides: list[str] | None = None) -> PipelineConfig:
    """Read a profile over the defaults and apply dotted overrides.

    `name` is a profile of `folder`, or the path of a YAML file anywhere. Raises ValueError, with the nearest names, if
    there is no such profile, and for a file that is no mapping of known keys.
    """
    return with_overrides(from_dict(PipelineConfig, read_profile(name, folder)), overrides or [])
