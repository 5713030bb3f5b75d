"""When things happened to the requests of one replica: waiting times, latencies, tokens of a step.

Place in the flow: the decoding thread of `replica` says what happens; `app` reads the histograms on the event loop for
its `metrics.Report`. Times are the engine's: a request arrives when the replica takes it, and a token is there when its
step has ended, before it is sent. Counts of tokens and blocks are the engine's own, in `replica.Snapshot`.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from lilicorr.engine.request import Request, TokenChunk

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 24, 32)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)

# name in the exposition -> what it is, upper bounds of its buckets
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("Arrival at the replica to the first token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two runs of tokens of an answer; a run is a block.", SHORT_SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Of an answer: decoding time by tokens - 1.", SHORT_SECONDS),
    "vllm:e2e_request_latency_seconds": ("Arrival to the last token.", SECONDS),
    "vllm:request_queue_time_seconds": ("Arrival to the step that gives a row.", SECONDS),
    "vllm:request_prefill_time_seconds": ("Row to first token.", SECONDS),
    "vllm:request_decode_time_seconds": ("First to last token.", SECONDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of an answer.", TOKENS),
    "vllm:iteration_tokens_total": ("Tokens a step added to answers.", TOKENS),
    "lilicorr:step_seconds": ("One step of the engine.", SHORT_SECONDS),
    "lilicorr:verify_len": ("Positions of a block that the target ran: the anchor and the drafts tested.", LENGTHS),
}


@dataclass
class Histogram:
    """Counts of observations by bucket; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or (len(self.bounds) + 1) * [0]

    def observe(self, value: float) -> None:
        """Count a value; one on a bound belongs below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram(self.bounds, list(self.counts), self.sum)

    def cumulated(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts):
            total += count
            buckets.append((bound, total))
        return buckets


@dataclass
class _Life:
    """Times of a request (monotonic), and its tokens."""

    arrived: float
    num_prompt_tokens: int
    admitted: float | None = None
    first: float | None = None  # token
    last: float | None = None
    num_tokens: int = 0


class Recorder:
    """The histograms of one replica. One thread records, any may read."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._lives: dict[str, _Life] = {}
        self._lock = threading.Lock()

    def histograms(self) -> dict[str, Histogram]:
        """As they are now, by name."""
        with self._lock:
            return {name: histogram.copy() for name, histogram in self._histograms.items()}

    def arrived(self, request: Request, at: float) -> None:
        """The replica took a request at this time (monotonic)."""
        self._lives[request.id] = _Life(at, len(request.prompt_ids))

    def stepped(self, began: float, running: Iterable[str], chunks: list[TokenChunk]) -> None:
        """A step that began then has ended: the requests that have a row after it, and what it committed."""
        now = time.monotonic()
        with self._lock:
            for request_id in (*running, *(chunk.request_id for chunk in chunks)):
                life = self._lives.get(request_id)
                if life is not None and life.admitted is None:
                    life.admitted = began
                    self._observe("vllm:request_queue_time_seconds", began - life.arrived)
            for chunk in chunks:
                self._tokens(chunk, now)
            self._observe("vllm:iteration_tokens_total", sum(len(chunk.token_ids) for chunk in chunks))
            self._observe("lilicorr:step_seconds", now - began)

    def committed(self, chunks: list[TokenChunk]) -> None:
        """What earlier steps committed became known outside of a step."""
        now = time.monotonic()
        with self._lock:
            for chunk in chunks:
                self._tokens(chunk, now)

    def ended(self, request_id: str) -> None:
        """A request is over, however; of its answer, what there is counts."""
        life = self._lives.pop(request_id, None)
        if life is not None:
            with self._lock:
                self._end(life)

    def _tokens(self, chunk: TokenChunk, now: float) -> None:
        life = self._lives.get(chunk.request_id)
        if life is None or not chunk.token_ids:
            return  # aborted while the step was in flight, or failed
        if life.first is None or life.last is None:
            life.first = now
            self._observe("vllm:time_to_first_token_seconds", now - life.arrived)
            if life.admitted is not None:
                self._observe("vllm:request_prefill_time_seconds", now - life.admitted)
        else:
            self._observe("vllm:inter_token_latency_seconds", now - life.last)
            self._observe("lilicorr:verify_len", chunk.num_drafted + 1)
        life.last = now
        life.num_tokens += len(chunk.token_ids)

    def _end(self, life: _Life) -> None:
        self._observe("vllm:request_prompt_tokens", life.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", life.num_tokens)
        if life.first is None or life.last is None:
            return
        decoding = life.last - life.first
        self._observe("vllm:e2e_request_latency_seconds", life.last - life.arrived)
        self._observe("vllm:request_decode_time_seconds", decoding)
        if life.num_tokens > 1:
            self._observe("vllm:request_time_per_output_token_seconds", decoding / (life.num_tokens - 1))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
