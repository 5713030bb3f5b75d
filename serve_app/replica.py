"""One replica's decoding: the engine on one thread, asked and answered from asyncio.

Place in the flow: the routes submit the requests of one HTTP request together and read their token chunks from
one `Ticket`; `Replica` carries the requests to the decoding thread through a thread-safe inbox and every chunk back
into the ticket's own asyncio queue. Nothing else crosses threads but two marks for the health check, the latest
`Snapshot`, and the future by which a reload says that it is done. The thread repeats: take what is in the inbox, one
step of the engine, publish. While there is nothing to decode it sleeps in the inbox.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lilicorr.engine.engine import Engine
from lilicorr.engine.request import Request, TokenChunk
from serve_app.recorder import Recorder

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 1.0
ABORTED = "abort"  # how a request ended whose client left


@dataclass(frozen=True)
class Snapshot:
    """A replica between two steps: what it holds, and what it has done since it was made (`num_*` never fall).

    Every field has the default of a replica that does not report it, see `metrics.Report`.
    """

    running: int = 0  # requests that have a row
    decoding: int = 0  # of these, past their prefill
    waiting: int = 0  # requests that have none
    waiting_tokens: int = 0  # of their prompts, one of several answers once
    total_pages: int = 0
    free_pages: int = 0  # no request holds them; those whose content is cached are among them
    num_steps: int = 0
    num_tokens: int = 0  # committed
    num_prompt_tokens: int = 0  # positions prefilled, after a preemption again
    num_cached_tokens: int = 0  # positions found in the prefix cache instead
    num_preemptions: int = 0
    num_blocks: int = 0  # verified, prefills not counted
    num_block_tokens: int = 0  # what they added to answers
    num_drafts: int = 0  # blocks with at least one draft
    num_drafted: int = 0  # drafts put to the test
    accepted_at: tuple[int, ...] = ()  # [S] blocks whose slot was accepted
    stage_seconds: tuple[float, ...] = ()  # of `counters.STAGES`: the decoding thread's time
    num_finished: Mapping[str, int] = field(default_factory=dict)  # requests by their end: stop, length, error, abort

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per verified block."""
        return self.num_block_tokens / max(1, self.num_blocks)

    @property
    def num_accepted(self) -> int:
        """Drafts that became part of answers."""
        return sum(self.accepted_at)


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
    arrived: float  # monotonic


@dataclass(frozen=True)
class _Abort:
    request_id: str
    reason: str


@dataclass(frozen=True)
class _Reload:
    write: Callable[[], None]
    identity: str
    done: concurrent.futures.Future[None]


class Ticket:
    """Requests in the replica's hands. Iterate over their chunks, and close it whatever happens."""

    def __init__(
        self, requests: Sequence[Request], mailbox: _Mailbox, abort: Callable[[str, str], None], release: Callable
    ) -> None:
        self._open = {request.id: index for index, request in enumerate(requests)}
        self._mailbox = mailbox
        self._abort = abort
        self._release: Callable[[], None] | None = release

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenChunk]]:
        """Chunks as they come, each with the place of its request among those submitted."""
        while self._open:
            chunk = await self._mailbox.get()
            index = self._open.get(chunk.request_id)
            if index is not None:  # else it was stopped with the chunk on its way
                if chunk.last:
                    del self._open[chunk.request_id]
                yield index, chunk

    def stop(self, request_id: str) -> None:
        """A stop string is complete: nothing more of this request is wanted."""
        if self._open.pop(request_id, None) is not None:
            self._abort(request_id, "stop")

    def close(self) -> None:
        """Give the places back; what has not finished is aborted before its next block."""
        if self._release is not None:
            self._release()
            self._release = None
            for request_id in self._open:
                self._abort(request_id, ABORTED)
            self._open.clear()


class Replica:
    """The decoding thread and its inbox. `submit` and `Ticket` belong to one event loop.

    `max_requests` counts running and waiting ones. `stall_s` is how long one step may take.
    """

    def __init__(self, engine: Engine, max_requests: int, stall_s: float) -> None:
        self.max_requests = max_requests
        self.recorder = Recorder()
        self._engine = engine
        self._stall_s = stall_s
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Reload | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}  # the thread's own, as the next three
        self._reloading: concurrent.futures.Future[None] | None = None
        self._num_drafts = 0
        self._finished: Counter[str] = Counter()
        self._num_requests = 0  # the event loop's own
        self._death: str | None = None  # set once by the thread
        self._step_began: float | None = None  # set by the thread while it is in a step
        self._snapshot = self._look()  # replaced by the thread
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests in hand, those included that the decoding thread has not seen yet."""
        return self._num_requests

    def snapshot(self) -> Snapshot:
        """The latest state between two steps, as the decoding thread saw it."""
        return self._snapshot

    def check_request(self, request: Request) -> None:
        """Raise ValueError for a request that the engine would never take."""
        self._engine.check(request)

    def check_room(self, count: int = 1) -> None:
        """Raise QueueFullError where so many more would be above `max_requests`, ReplicaDeadError if nobody decodes."""
        self.check()
        if self._num_requests + count > self.max_requests:
            raise QueueFullError(
                f"{self._num_requests} requests are running or waiting and {count} would join them; "
                f"this replica takes {self.max_requests}"
            )

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Hand requests to the decoding thread, all of them or none. Raises as `check_room`."""
        self.check_room(len(requests))
        mailbox = _Mailbox()
        for request in requests:
            self._inbox.put(_Submit(request, mailbox, time.monotonic()))
        # The thread notes its death before it empties the inbox for the last time: what it did not see is seen here.
        if self._death is not None:
            raise ReplicaDeadError(self._death)
        count = len(requests)
        self._num_requests += count
        return Ticket(requests, mailbox, self._abort, lambda: self._release(count))

    async def reload(self, write: Callable[[], None], identity: str) -> None:
        """Have the decoding thread call `Engine.reload` between two steps; raises ReplicaDeadError."""
        self.check()
        message = _Reload(write, identity, concurrent.futures.Future())
        self._inbox.put(message)
        if self._death is not None:  # see `submit`
            raise ReplicaDeadError(self._death)
        done = asyncio.wrap_future(message.done)
        while not done.done():
            self.check()  # Serve does not ask after a replica's health while it waits for this
            await asyncio.wait({done}, timeout=CHECK_PERIOD_S)
        await done

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

    def _abort(self, request_id: str, reason: str) -> None:
        self._inbox.put(_Abort(request_id, reason))

    def _release(self, count: int) -> None:
        self._num_requests -= count

    def _run(self) -> None:
        """The decoding thread."""
        reason = "the replica was closed"
        try:
            while self._take():
                if self._engine.busy:
                    self._step_began = began = time.monotonic()
                    chunks = self._engine.step()
                    self._step_began = None
                    running = (progress.request.id for progress in self._engine.scheduler.running)
                    self.recorder.stepped(began, running, chunks)
                    self._deliver(chunks)
        except BaseException as error:
            logger.exception("the decoding thread died")
            reason = f"the decoding thread died: {type(error).__name__}: {error}"
        finally:
            self._end(reason)

    def _take(self) -> bool:
        """Do what the inbox says, waiting only while there is nothing to decode; False when it says to end."""
        while not self._engine.busy or not self._inbox.empty():
            if self._inbox.empty():
                self._snapshot = self._look()
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, _Submit):
                self.recorder.arrived(message.request, message.arrived)
                self._start(message.request, message.mailbox)
            elif isinstance(message, _Reload):
                self._reload(message)
            elif self._mailboxes.pop(message.request_id, None) is not None:
                self._engine.abort(message.request_id)
                self.recorder.ended(message.request_id)
                self._finished[message.reason] += 1
        return True

    def _start(self, request: Request, mailbox: _Mailbox) -> None:
        """Submit to the engine; what it refuses concerns this request alone."""
        self._mailboxes[request.id] = mailbox
        try:
            self._engine.submit(request)
        except Exception as error:
            logger.exception("request %s was refused by the engine", request.id)
            self._deliver([TokenChunk(request.id, [], error=f"{type(error).__name__}: {error}")])

    def _reload(self, message: _Reload) -> None:
        """Change the weights; whatever goes wrong there leaves the engine in no known state and ends the thread."""
        if message.done.set_running_or_notify_cancel():
            self._reloading, self._step_began = message.done, time.monotonic()
            chunks = self._engine.reload(message.write, message.identity)
            self._step_began = None
            self.recorder.committed(chunks)
            self._deliver(chunks)
            self._reloading = None
            message.done.set_result(None)

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        """Count what was committed, then hand it out: who has an answer finds it in the figures."""
        mailboxes = [self._count(chunk) for chunk in chunks]
        try:
            self._snapshot = self._look()
        finally:  # whatever becomes of the thread, these answers are made
            for mailbox, chunk in zip(mailboxes, chunks, strict=True):
                if mailbox is not None:
                    mailbox.put(chunk)

    def _count(self, chunk: TokenChunk) -> _Mailbox | None:
        """Where the chunk goes; None for a request that was aborted while the engine had the step in flight."""
        self._num_drafts += chunk.num_drafted > 0
        mailbox = self._mailboxes.get(chunk.request_id)
        if mailbox is not None and chunk.last:
            del self._mailboxes[chunk.request_id]
            self.recorder.ended(chunk.request_id)
            self._finished[chunk.finish_reason or "error"] += 1
        return mailbox

    def _look(self) -> Snapshot:
        """The state as it is; only the thread may look while it runs."""
        counters, pool, scheduler = self._engine.counters, self._engine.pool, self._engine.scheduler
        # the answers of a request share their prompt's list, and its pages once the first of them is prefilled
        prompts = {id(progress.request.prompt_ids): progress.num_to_prefill for progress in scheduler.waiting}
        return Snapshot(
            running=len(scheduler.running),
            decoding=len(scheduler.decoding),
            waiting=len(scheduler.waiting),
            waiting_tokens=sum(prompts.values()),
            total_pages=pool.num_pages,
            free_pages=pool.num_pages - pool.num_used,
            num_steps=counters.num_steps,
            num_tokens=counters.num_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_blocks=counters.num_blocks,
            num_block_tokens=counters.num_block_tokens,
            num_drafts=self._num_drafts,
            num_drafted=counters.num_drafted,
            accepted_at=tuple(counters.accepted_at),
            stage_seconds=tuple(counters.stage_seconds),
            num_finished=dict(self._finished),
        )

    def _end(self, reason: str) -> None:
        """Say why, and fail every request that is in hand or still in the inbox."""
        self._death = reason
        if self._reloading is not None:
            self._reloading.set_exception(ReplicaDeadError(reason))
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Submit):
                self._mailboxes[message.request.id] = message.mailbox
            elif isinstance(message, _Reload) and message.done.set_running_or_notify_cancel():
                message.done.set_exception(ReplicaDeadError(reason))
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(TokenChunk(request_id, [], error=reason))
