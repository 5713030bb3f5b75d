"""Which requests run, what they may write to, and who gives way when pages run short.

Place in the flow: in every step the engine asks in this order: `admit` (rows and pages for the oldest waiting
requests), `take_pieces` (prompt tokens to write), `grow` (pages for the next block of every row). It reports what
a step committed to `commit`, and `leave` when a request is done or aborted.

First come, first served, without overtaking. When `grow` finds no page the engine waits for the steps in flight,
and if that frees none, `preempt` takes row and pages of the youngest request: its tokens stay, and it is
prefilled again later, from the cached pages where they still exist. The oldest request therefore always goes on,
and alone it always fits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lilicorr.config import EngineConfig
from lilicorr.engine.pages import PAGE_SIZE, PagePool, num_pages_for
from lilicorr.engine.request import Progress
from lilicorr.engine.row import RowState

ROWS_PER_SPARE_PAGE = 4


@dataclass(frozen=True)
class Piece:
    """Prompt tokens of one request that are written in one step, at most a page of them."""

    progress: Progress
    start: int
    count: int

    @property
    def following(self) -> list[int]:
        """The known tokens behind each of the piece's; at the end of the sequence there is one less."""
        return self.progress.token_ids[self.start + 1 : self.start + self.count + 1]

    @property
    def last(self) -> bool:
        """Whether the request decodes from here on."""
        return self.start + self.count == self.progress.num_to_prefill


class Scheduler:
    """Requests, rows and pages. `num_tokens` positions are written for a row in every step."""

    def __init__(self, config: EngineConfig, pool: PagePool, state: RowState, num_tokens: int) -> None:
        self.config, self.pool, self.state, self.num_tokens = config, pool, state, num_tokens
        # one shape for prefill and decoding where that is asked for
        self.piece_size = config.deterministic_width if config.deterministic else PAGE_SIZE
        self.max_pieces = config.max_running if config.deterministic else config.idle_prefill_tokens
        self.step_id = 0  # of the step that is being put together or was begun last
        self.waiting: deque[Progress] = deque()  # in order of arrival
        self.rows: list[Progress | None] = [None] * config.max_running
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # positions found in the prefix cache instead of being prefilled

    @property
    def running(self) -> list[Progress]:
        """Requests that have a row, in order of rows."""
        return [progress for progress in self.rows if progress is not None]

    @property
    def decoding(self) -> list[Progress]:
        """Running requests whose prefill is done or begun to its end, in order of rows."""
        return [progress for progress in self.running if progress.num_written == progress.num_to_prefill]

    def positions_needed(self, progress: Progress, num_tokens: int, num_blocks: int) -> int:
        """Positions written by `num_blocks` steps after `num_tokens` tokens; the last block starts at the latest
        with the last but one token of the longest answer."""
        return min(num_tokens + num_blocks * self.num_tokens, progress.max_length + self.num_tokens - 2)

    def add(self, progress: Progress) -> None:
        """A new request waits behind all others."""
        self.waiting.append(progress)

    def admit(self) -> None:
        """Give rows and pages to waiting requests, oldest first, while there are enough for prompt and a block."""
        entries: list[tuple[int, int, int]] = []
        while self.waiting and None in self.rows:
            progress = self.waiting[0]
            found = self._cached_pages(progress)
            needed = num_pages_for(self.positions_needed(progress, progress.num_to_prefill, 1)) - len(found)
            # Pages to spare for rows that grow: a request let in too early is the first to be preempted.
            if needed + len(self.running) // ROWS_PER_SPARE_PAGE > self.pool.num_free_without(found):
                break
            self.waiting.popleft()
            self.pool.share(found)
            progress.pages = found + self.pool.allocate(needed)
            progress.num_written = len(found) * PAGE_SIZE
            progress.num_registered = len(found)
            progress.num_cached = progress.num_written
            self.num_cached_tokens += progress.num_written
            progress.row = self.rows.index(None)
            self.rows[progress.row] = progress
            self.state.join(progress.row, progress.request.params, progress.request.prompt_ids, progress.answer_ids)
            entries += [(progress.row, index, page) for index, page in enumerate(progress.pages)]
        self.state.write_pages(entries)

    def take_pieces(self) -> list[Piece]:
        """Prompt tokens for this step, oldest request first, within the step's budget."""
        budget = self.config.prefill_tokens if self.decoding else self.config.idle_prefill_tokens
        pieces = []
        for progress in sorted(self.running, key=lambda progress: progress.arrival):
            while progress.num_written < progress.num_to_prefill and budget and len(pieces) < self.max_pieces:
                left = progress.num_to_prefill - progress.num_written
                pieces.append(Piece(progress, progress.num_written, min(self.piece_size, left, budget)))
                progress.num_written += pieces[-1].count
                budget -= pieces[-1].count
        return pieces

    def register(self, progress: Progress) -> None:
        """Target and drafter have written `num_written` positions, or will have before a later step reads them."""
        if self.config.prefix_cache:
            self.pool.extend_keys(progress.keys, progress.token_ids, progress.request.cache_salt)
            for index in range(progress.num_registered, progress.num_written // PAGE_SIZE):
                self.pool.register(progress.pages[index], progress.keys[index])
                progress.num_registered = index + 1

    def grow(self) -> bool:
        """Pages for the next block of every decoding row, oldest first; False where they run out."""
        entries: list[tuple[int, int, int]] = []
        enough = True
        for progress in sorted(self.decoding, key=lambda progress: progress.arrival):
            # the anchor is not among the positions; every step in flight may have moved it by a block
            num_blocks = 1 + progress.num_in_flight
            length = self.positions_needed(progress, len(progress.token_ids) - 1, num_blocks)
            count = num_pages_for(length) - len(progress.pages)
            if count > self.pool.num_free:
                enough = False
                break
            if count > 0:
                first = len(progress.pages)
                progress.pages += self.pool.allocate(count)
                entries += [(progress.row, index, progress.pages[index]) for index in range(first, first + count)]
        self.state.write_pages(entries)
        return enough

    def preempt(self) -> None:
        """Take row and pages of the youngest running request; no step may be in flight."""
        self._send_back()
        self.num_preemptions += 1

    def start_over(self, identity: str) -> None:
        """The models become those of `identity`: all requests wait, no page is known; no step may be in flight."""
        while self.running:
            self._send_back()
        self.pool.collect(self.step_id)
        for progress in self.waiting:
            progress.keys.clear()
        self.pool.forget(identity)

    def commit(self, progress: Progress, token_ids: list[int]) -> None:
        """A step has made these tokens part of the answer."""
        progress.token_ids += token_ids
        progress.num_written = progress.num_to_prefill
        self.register(progress)

    def leave(self, progress: Progress) -> None:
        """The request is done or aborted: its row and pages go to others, pages once the steps in flight are over."""
        progress.finished = True
        if progress.row is None:
            self.waiting.remove(progress)
        else:
            self.state.leave(progress.row)
            self._give_back(progress)

    def _send_back(self) -> None:
        """The youngest running request waits again, before those that wait."""
        progress = max(self.running, key=lambda progress: progress.arrival)
        assert progress.num_in_flight == 0, f"request {progress.request.id} loses its row with a step in flight"
        self.state.leave(progress.row)
        self._give_back(progress)
        self.pool.collect(self.step_id)
        self.waiting.appendleft(progress)

    def _cached_pages(self, progress: Progress) -> list[int]:
        """Known pages of the request's beginning. The last token is always run: it gives the token after it and the
        anchor's context. A prompt that is reported on is run as a whole."""
        if not self.config.prefix_cache or progress.reports_prompt:
            return []
        self.pool.extend_keys(progress.keys, progress.token_ids, progress.request.cache_salt)
        return self.pool.find(progress.keys[: (progress.num_to_prefill - 1) // PAGE_SIZE])

    def _give_back(self, progress: Progress) -> None:
        self.pool.release(progress.pages, self.step_id)
        self.rows[progress.row] = None
        progress.row, progress.pages, progress.num_written, progress.num_registered = None, [], 0, 0
