"""`backend: vllm`: vLLM's own server with our draft model in a replica, for targets that need several GPUs.

Place in the flow: `app.build_app` takes `VLLMEndpoint` instead of its own deployment where the arguments say so. What
is served is vLLM as it is: its scheduler, its API, its metrics. A replica has all GPUs of its target on one node.

The calls are those of vLLM 0.33.0, the first release with LiLiCorr heads. `ray[llm]` 2.60 pins vLLM 0.29, so Ray Serve
LLM cannot draft with them, and the extra `gpu` pins 0.32 for regeneration: this backend needs an environment of its own
(docs/serving.md). **It has not run on a GPU yet.**
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve

from lilicorr.checkpoint import read_checkpoint, readers_of
from lilicorr.checkpoint.format import VLLM, problem, speculative_config
from lilicorr.target import resolve_target
from serve_app.args import AppArgs
from serve_app.guard import read_keys
from serve_app.served_model import check_weights

if TYPE_CHECKING:
    from argparse import Namespace

logger = logging.getLogger(__name__)

RELEASE = "0.33.0"


def serve_arguments(args: AppArgs) -> list[str]:
    """What `vllm serve` would be given on its command line.

    Raises ValueError for a checkpoint that was not made for the target, and one that vLLM does not read.
    """
    target, _ = check_weights(args)
    folder = Path(args.checkpoint)
    checkpoint = read_checkpoint(folder)
    if VLLM not in readers_of(folder, checkpoint):
        wrong = problem(VLLM, checkpoint.description)
        if wrong is not None:
            raise ValueError(f"{folder} cannot be served by vLLM: {wrong}")
        raise ValueError(
            f"{folder} is not spelled as vLLM reads it: python -m lilicorr.checkpoint convert {folder} CONVERTED "
            f"--to {VLLM}, with --target {args.target} for a DSpark head"
        )
    options: dict[str, Any] = {
        "model": resolve_target(target),
        "revision": args.target_revision,
        "tokenizer_revision": args.target_revision,
        "served_model_name": args.model_name,
        "dtype": args.target_dtype,
        "max_model_len": args.max_model_len,
        "tensor_parallel_size": int(args.gpus),
        "distributed_executor_backend": "mp",  # Ray has given the GPUs to this process: no placement group of its own
        "default_chat_template_kwargs": args.template_kwargs,
        "speculative_config": speculative_config(checkpoint.description, str(folder)),
    }
    return [word for name, value in (options | args.engine).items() for word in _option(name, value)]


def _option(name: str, value: Any) -> list[str]:
    """A setting as words of a command line; None is the default of every setting."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


def parsed(words: list[str]) -> Namespace:
    """These words as vLLM's own parser reads them. Raises ValueError for what it does not know."""
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    except SystemExit as error:  # what is wrong stands in the replica's log
        raise ValueError(f"vLLM {RELEASE} does not take {' '.join(words)}") from error
    validate_parsed_serve_args(arguments)
    return arguments


@serve.ingress()
class VLLMEndpoint:
    """A replica: vLLM's engine in processes of its own, and its HTTP side in this one."""

    async def __init__(self, args: AppArgs) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app

        arguments = parsed(serve_arguments(args))
        arguments.api_key = list(read_keys(args.api_key_file)) or None  # on no command line, in no message
        self._running = build_async_engine_client(arguments)
        self._engine = await self._running.__aenter__()
        tasks = await self._engine.get_supported_tasks()
        self._app: FastAPI = build_app(arguments, tasks, self._engine.model_config)
        await init_app_state(self._engine, self._app.state, arguments, tasks)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the HTTP side once the replica is constructed."""
        return self._app

    def reconfigure(self, user_config: Any) -> None:
        """Serve calls it with the deployment's `user_config`, and would stop a replica that has no such method."""
        logger.error("user_config %s has no effect: backend vllm takes its checkpoint from args alone", user_config)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        """Serve calls it when the requests of a replica that shuts down are answered, or their time is over."""
        if hasattr(self, "_engine"):  # else the engine did not start
            await self._running.__aexit__(None, None, None)
