"""One replica's decoding: an engine on one thread, asked and answered from asyncio.

Place in the flow: `api` submits a request and reads its token chunks; `Replica` carries the request to the
decoding thread through a thread-safe inbox and every chunk back into the request's own asyncio queue.
Nothing else crosses threads but two marks for the health check. The thread repeats: take what is in the
inbox, one step of the engine, publish.

`Engine` is the seam: whatever has `submit`, `abort` and `step` can decode. `ReferenceEngine` is the
reference decoder behind it, one block of one request per step, requests in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from lilicorr.blocks import DraftOutput, Proposal, Verdict
from lilicorr.decode import Decoder
from lilicorr.engine.request import Request, TokenChunk

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """A decoder of many requests, driven from one thread."""

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""

    def submit(self, request: Request) -> None:
        """Take a request; it waits until there is room for it."""

    def abort(self, request_id: str) -> None:
        """Forget a request before the next step; unknown ids are finished ones."""

    def step(self) -> list[TokenChunk]:
        """Decode a little and return what was committed. An exception means that the engine is broken."""


@dataclass
class _Running:
    request: Request
    runs: Iterator[list[int]]
    counts: list[tuple[int, int]]  # (drafted, accepted) of the block that is about to be yielded
    num_tokens: int = 0


class ReferenceEngine:
    """The reference decoder as an engine: at most `max_running` requests, one block per step, in turn."""

    def __init__(self, decoder: Decoder, max_running: int) -> None:
        self._decoder = decoder
        self._max_running = max_running
        self._waiting: deque[Request] = deque()
        self._running: deque[_Running] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._waiting = deque(request for request in self._waiting if request.id != request_id)
        self._running = deque(running for running in self._running if running.request.id != request_id)

    def step(self) -> list[TokenChunk]:
        if self._waiting and len(self._running) < self._max_running:
            running = self._start(self._waiting.popleft())
        else:
            running = self._running.popleft()
        try:
            chunk = self._advance(running)
        except torch.AcceleratorError:
            raise  # the device is unusable for every request
        except Exception as error:  # one bad request must not end the others
            logger.exception("request %s failed", running.request.id)
            return [TokenChunk(running.request.id, [], error=f"{type(error).__name__}: {error}")]
        if not chunk.last:
            self._running.append(running)
        return [chunk]

    def _start(self, request: Request) -> _Running:
        counts: list[tuple[int, int]] = []

        def observe(_draft: DraftOutput | None, proposal: Proposal, verdict: Verdict) -> None:
            counts.append((proposal.token_ids.shape[1], int(verdict.num_accepted)))

        def runs() -> Iterator[list[int]]:
            yield from self._decoder.stream(request.prompt_ids, request.params, observe)

        return _Running(request, runs(), counts)

    def _advance(self, running: _Running) -> TokenChunk:
        """Decode one block of a request."""
        params = running.request.params
        token_ids = next(running.runs)
        running.num_tokens += len(token_ids)
        num_drafted, num_accepted = running.counts.pop() if running.counts else (0, 0)
        chunk = TokenChunk(running.request.id, token_ids, num_drafted, min(num_accepted, len(token_ids)))
        if token_ids[-1] in params.stop_ids:
            return replace(chunk, finish_reason="stop")
        return replace(chunk, finish_reason="length") if running.num_tokens == params.max_new_tokens else chunk


class QueueFullError(Exception):
    """The replica has as many requests as it takes."""


class ReplicaDeadError(Exception):
    """The decoding thread has ended, or has not moved for too long."""


class _Mailbox:
    """The way back: one asyncio queue, filled from the decoding thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[TokenChunk] = asyncio.Queue()

    def put(self, chunk: TokenChunk) -> None:
        """Deliver from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)

    async def get(self) -> TokenChunk:
        """The next chunk."""
        return await self._chunks.get()


@dataclass(frozen=True)
class _Submit:
    request: Request
    mailbox: _Mailbox


@dataclass(frozen=True)
class _Abort:
    request_id: str


class Ticket:
    """A request in the replica's hands. Iterate over its chunks, and close it whatever happens."""

    def __init__(self, request_id: str, mailbox: _Mailbox, release: Callable[[Ticket], None]) -> None:
        self.request_id = request_id
        self.finished = False  # the last chunk has arrived
        self._mailbox = mailbox
        self._release = release
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while not self.finished:
            chunk = await self._mailbox.get()
            self.finished = chunk.last
            yield chunk

    def close(self) -> None:
        """Give the place back; a request that has not finished is aborted before its next block."""
        if not self._closed:
            self._closed = True
            self._release(self)


class Replica:
    """The decoding thread and its inbox. `submit` and `Ticket` belong to one event loop.

    `max_requests` counts running and waiting ones. `stall_s` is how long one step may take.
    """

    def __init__(self, engine: Engine, max_requests: int, stall_s: float) -> None:
        self._engine = engine
        self._max_requests = max_requests
        self._stall_s = stall_s
        self._inbox: queue.SimpleQueue[_Submit | _Abort | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}  # the thread's own
        self._num_requests = 0  # the event loop's own
        self._death: str | None = None  # set once by the thread
        self._step_began: float | None = None  # set by the thread while it is in a step
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Ticket:
        """Hand a request to the decoding thread.

        Raises QueueFullError with `max_requests` in hand, ReplicaDeadError if nobody would decode it.
        """
        self.check()
        if self._num_requests >= self._max_requests:
            raise QueueFullError(f"{self._num_requests} requests are running or waiting, the most this replica takes")
        mailbox = _Mailbox()
        self._inbox.put(_Submit(request, mailbox))
        # The thread notes its death before it empties the inbox for the last time: what it did not see is seen here.
        if self._death is not None:
            raise ReplicaDeadError(self._death)
        self._num_requests += 1
        return Ticket(request.id, mailbox, self._release)

    def check(self) -> None:
        """Raise ReplicaDeadError if the decoding thread has died or stalls."""
        if self._death is not None:
            raise ReplicaDeadError(self._death)
        if not self._thread.is_alive():
            raise ReplicaDeadError("the decoding thread has ended")
        began = self._step_began
        if began is not None and time.monotonic() - began > self._stall_s:
            raise ReplicaDeadError(f"the decoding thread has been in one step for {time.monotonic() - began:.0f} s")

    def close(self) -> None:
        """End the thread after the step it is in; what is still decoding gets an error."""
        self._inbox.put(None)

    def _release(self, ticket: Ticket) -> None:
        self._num_requests -= 1
        if not ticket.finished:
            self._inbox.put(_Abort(ticket.request_id))

    def _run(self) -> None:
        """The decoding thread."""
        reason = "the replica was closed"
        try:
            while self._take():
                if self._engine.busy:
                    self._step_began = time.monotonic()
                    chunks = self._engine.step()
                    self._step_began = None
                    for chunk in chunks:
                        self._publish(chunk)
        except BaseException as error:
            logger.exception("the decoding thread died")
            reason = f"the decoding thread died: {type(error).__name__}: {error}"
        finally:
            self._end(reason)

    def _take(self) -> bool:
        """Do what the inbox says, waiting only while there is nothing to decode; False when it says to end."""
        while not self._engine.busy or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, _Submit):
                self._mailboxes[message.request.id] = message.mailbox
                self._engine.submit(message.request)
            else:
                self._mailboxes.pop(message.request_id, None)
                self._engine.abort(message.request_id)
        return True

    def _publish(self, chunk: TokenChunk) -> None:
        mailbox = self._mailboxes.get(chunk.request_id)
        if mailbox is None:
            return  # aborted while the engine had the step in flight
        if chunk.last:
            del self._mailboxes[chunk.request_id]
        mailbox.put(chunk)

    def _end(self, reason: str) -> None:
        """Say why, and fail every request that is in hand or still in the inbox."""
        self._death = reason
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Submit):
                self._mailboxes[message.request.id] = message.mailbox
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(TokenChunk(request_id, [], error=reason))
