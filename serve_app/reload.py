"""Other weights for a replica that goes on answering: the deployment's `user_config`.

Place in the flow: Serve calls `app.Endpoint.reconfigure` when a config with another `user_config` is deployed, and in
each new replica; `Reloader` reads the checkpoint aside, holds it against the draft model in use, and has the decoding
thread write it over that one between two steps. No stream ends: the target stays, so answers stay what they are, and
rows are prefilled again because what was written for the old drafter is of no use to the new one.

A checkpoint that is refused changes nothing. It must not stop the replica, as an exception would have Serve do: the
reason is logged, and counted in `lilicorr:weight_reloads_total`; `/version` says which weights are in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from lilicorr.checkpoint import replacement_weights, write_weights
from lilicorr.engine.engine import Engine
from serve_app.args import AppArgs
from serve_app.metrics import RELOAD_OUTCOMES
from serve_app.replica import Replica
from serve_app.served_model import ServedModel, check_weights, drafter_yarn, fingerprint

logger = logging.getLogger(__name__)

APPLIED, REFUSED = RELOAD_OUTCOMES


class Weights(BaseModel):
    """What stands under `user_config` of a Serve config: the same kind of draft model as `args.checkpoint`."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: str  # a folder, the same on every node
    version: str = ""  # of the weights; empty: the hash of the checkpoint. A changed one has them read again


class Reloader:
    """Exchanges the weights of one replica. `counts` are its attempts by their outcome."""

    def __init__(self, args: AppArgs, engine: Engine, model: ServedModel, replica: Replica) -> None:
        self.counts: Counter[str] = Counter()
        self._args, self._engine, self._model, self._replica = args, engine, model, replica
        self._applied: Any = None
        self._turn = asyncio.Lock()  # the weights that were asked for last must be those that are written last

    async def apply(self, user_config: Any) -> None:
        """Take the weights that `user_config` names, None for those of the arguments, unless they were taken last.

        Raises ReplicaDeadError.
        """
        async with self._turn:
            if user_config != self._applied:  # Serve asks whenever a replica's rank changes, too
                await self._apply(user_config)

    async def _apply(self, user_config: Any) -> None:
        try:
            version, tensors = await asyncio.to_thread(self._read, user_config)
        except Exception as error:  # whatever it is: nothing has been changed
            self.counts[REFUSED] += 1
            logger.exception("user_config %s is refused, the weights stay as they are: %s", user_config, error)
            return
        if tensors is not None:
            await self._replica.reload(lambda: write_weights(self._engine.draft_model, tensors), version)
            self._model.fingerprint = version
        self._applied = user_config
        self.counts[APPLIED] += 1
        logger.info("the weights of user_config %s are in use, fingerprint %s", user_config, version)

    def _read(self, user_config: Any) -> tuple[str, dict[str, Tensor] | None]:
        """The fingerprint of the weights that are asked for, and the weights; None for those in use.

        Raises ValueError for what is no `Weights`, and for a checkpoint that does not fit or changes meanwhile.
        """
        if user_config is None:
            wanted = Weights(checkpoint=self._args.checkpoint, version=self._args.version)
        else:
            wanted = Weights.model_validate(user_config)
        args = self._args.model_copy(update={"checkpoint": wanted.checkpoint})
        check_weights(args)
        folder = Path(wanted.checkpoint)
        found = fingerprint(folder)
        if not wanted.version and found == self._model.fingerprint:
            return found, None
        tensors = replacement_weights(folder, self._engine.target, self._engine.draft_model, drafter_yarn(args))
        if fingerprint(folder) != found:
            raise ValueError(f"{folder} changed while it was read")
        return wanted.version or found, tensors
