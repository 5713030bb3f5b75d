"""What one replica serves: the models behind an engine, and what the HTTP side knows of them.

Place in the flow: `app.Endpoint` calls `open_model` once in each replica, before it takes requests; without Ray the
same call serves a test.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from lilicorr.chat import render_prompt
from lilicorr.checkpoint import captured_layers, check_fits, load_draft_model, mask_token
from lilicorr.config import TargetConfig, YarnConfig, from_dict
from lilicorr.decode import SamplingParams
from lilicorr.engine.counters import Counters
from lilicorr.engine.engine import Engine
from lilicorr.engine.pages import PAGE_SIZE
from lilicorr.provenance import sha256_tree
from lilicorr.target import load_target
from serve_app.args import AppArgs
from serve_app.detokenize import token_table

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
FINGERPRINT_DIGITS = 16

Made = TypeVar("Made")


@dataclass(eq=False)
class ServedModel:
    """What the HTTP side knows of the model it answers for. Nothing of it changes but the fingerprint (`reload`)."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    token_table: list[bytes]  # what tokens add to a text, see `detokenize.token_table`
    spelled_table: list[bytes]  # the same with special tokens spelled out
    template_kwargs: dict[str, Any]
    stop_ids: tuple[int, ...]
    num_rows: int  # token ids there are, with and without a token
    num_slots: int  # drafts of a block
    max_model_len: int  # prompt and answer together
    fingerprint: str  # changes with the weights
    created: int  # unix time
    # Rendering a long prompt must not hold up the streams, and a tokenizer serves one thread at a time.
    tokenizing: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenizing"))

    async def aside(self, work: Callable[..., Made], *arguments: Any) -> Made:
        """What `work` makes of its arguments, on the tokenizer's thread: on the event loop it would hold up streams.

        RuntimeError stands for a StopIteration, which asyncio does not carry: whoever waits for it would wait for ever.
        """

        def finish() -> Made:
            try:
                return work(*arguments)
            except StopIteration as error:
                raise RuntimeError(f"StopIteration from {work}") from error

        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, finish)


def check_weights(args: AppArgs) -> tuple[TargetConfig, tuple[int, ...]]:
    """The target to load, with the draft model's mask token, and its layers that are read; loads no weights.

    Raises ValueError that names the field for a checkpoint that is none or was not made for the target.
    """
    folder = Path(args.checkpoint)
    layer_ids = captured_layers(folder)
    config = TargetConfig(args.target, args.target_revision, args.target_dtype, args.mask_token_id)
    check_fits(folder, config)
    return replace(config, mask_token_id=mask_token(folder)), layer_ids


def open_model(args: AppArgs) -> tuple[ServedModel, Engine]:
    """Load target and draft model, put them behind an engine, and decode a few tokens with it.

    Without a `version` in the arguments the fingerprint is that of the checkpoint's files.

    Raises ValueError for a checkpoint that is none or does not fit its target, and settings that do not fit either.
    """
    config, layer_ids = check_weights(args)
    target = load_target(config, "cuda" if args.gpus > 0 else "cpu", layer_ids)
    if args.max_model_len is not None and args.max_model_len > target.max_length:
        raise ValueError(f"max_model_len {args.max_model_len} is more than the target's context of {target.max_length}")
    draft_model = load_draft_model(Path(args.checkpoint), target, yarn=drafter_yarn(args))
    if not args.version:
        args = args.model_copy(update={"version": fingerprint(Path(args.checkpoint))})
    engine = Engine(target, draft_model, args.engine_config, args.version)
    model = served_model(args, engine)
    _warm_up(engine, model)
    return model, engine


def drafter_yarn(args: AppArgs) -> YarnConfig | None:
    """How the arguments stretch the drafter's positions; None: as the checkpoint says."""
    return from_dict(YarnConfig, args.yarn, "yarn.") if args.yarn else None


def fingerprint(checkpoint: Path) -> str:
    """Of the files of a checkpoint's folder."""
    return sha256_tree(checkpoint)[:FINGERPRINT_DIGITS]


def served_model(args: AppArgs, engine: Engine) -> ServedModel:
    """The HTTP side's view of an engine's target. A pool with less room than one full context bounds the answers."""
    room = engine.pool.num_pages * PAGE_SIZE - engine.scheduler.num_tokens + 2
    if room < engine.max_model_len:
        logger.warning("the page pool holds %d positions; the context of %d is cut to it", room, engine.max_model_len)
    return ServedModel(
        name=args.model_name,
        tokenizer=engine.target.tokenizer,
        token_table=token_table(engine.target.tokenizer),
        spelled_table=token_table(engine.target.tokenizer, special=True),
        template_kwargs=args.template_kwargs,
        stop_ids=engine.target.eos_ids,
        num_rows=engine.target.embed.shape[0],
        num_slots=engine.scheduler.num_tokens - 1,
        max_model_len=min(room, engine.max_model_len),
        fingerprint=args.version,
        created=int(time.time()),
    )


def _warm_up(engine: Engine, model: ServedModel) -> None:
    """Capture the graphs and decode a few tokens, so that what cannot work fails here and not in the first request."""
    engine.warm_up()
    prompt_ids = render_prompt(model.tokenizer, [{"role": "user", "content": "Hello"}], model.template_kwargs)
    room = model.max_model_len - len(prompt_ids)
    if room < 1:
        raise ValueError(f"a context of {model.max_model_len} tokens has no room for a prompt of {len(prompt_ids)}")
    engine.generate([prompt_ids], SamplingParams(min(WARM_UP_TOKENS, room), temperature=1.0, top_p=0.9))
    engine.counters = Counters(accepted_at=len(engine.counters.accepted_at) * [0])  # these tokens are nobody's
