"""The engine: many requests at once through one step, on one thread.

Place in the flow: a replica of the endpoint, `evaluate` and the benches drive it. One call of `step` is the loop of
docs/serving.md, Engine:

    admit     rows and pages for waiting requests
    prefill   a chunk of prompts
    decode    one block of every row: propose, target, verify, commit, append the drafter's context
    publish   what an earlier step committed, as `TokenChunk`s

On a GPU the host is one step behind: it starts the next step before it reads what the last one committed.

Every answer is the one that `decode.Decoder` gives, in any company.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lilicorr.config import EngineConfig
from lilicorr.decode import Decoded, SamplingParams, check_request
from lilicorr.draft_model import DraftModel
from lilicorr.engine.counters import Counters, timed
from lilicorr.engine.graphs import decode_runner, fill
from lilicorr.engine.model import PagedDrafter, PagedTarget, num_pages_in
from lilicorr.engine.pages import PAGE_SIZE, PagePool, num_pages_for
from lilicorr.engine.request import Progress, Request, TokenChunk
from lilicorr.engine.row import MAX_STOP_IDS, RowState, upload
from lilicorr.engine.scheduler import Piece, Scheduler
from lilicorr.engine.step import AT_LIMIT, BROKEN, STOPPED, USUAL_MIXES, Mix, Outcome, Prefill, Step, blank_prefill
from lilicorr.engine.trim import make_planner
from lilicorr.logprobs import TokenLogprobs, read_logprobs
from lilicorr.target import Target

FINISH_REASONS = {STOPPED: "stop", AT_LIMIT: "length"}


@dataclass(frozen=True)
class _Flight:
    """A pass whose results the host has not read."""

    step_id: int
    progresses: list[Progress]  # of the first rows of `outcome`
    outcome: Outcome  # on the host, complete once `copied` has happened
    reported: Sequence[Piece]  # of its log-probabilities of prompts
    copied: torch.cuda.Event | None
    verified: bool  # a block, not a prefill
    width: int | None = None  # positions a row in the mean that were verified; None: whole blocks

    def logprobs(self, index: int, token_ids: list[int]) -> list[TokenLogprobs] | None:
        """Of the first tokens of a row, where its request asks for them."""
        num_top = self.progresses[index].request.params.num_logprobs
        if num_top is None:
            return None
        return read_logprobs(self.outcome.logprobs[index, : len(token_ids)].tolist(), token_ids, num_top)

    def read_prompts(self) -> None:
        """Note the log-probabilities of prompts; a prompt that is prefilled again begins again."""
        for index, piece in enumerate(self.reported):
            table, request = self.outcome.prompt_logprobs[index, : len(piece.following)], piece.progress.request
            found = read_logprobs(table.tolist(), piece.following, request.num_prompt_logprobs)
            piece.progress.prompt_logprobs[piece.start + 1 :] = found


class Engine:
    """Batched decoding with a target and a draft model, or autoregressively where `draft_model` is None.

    `identity` stands for the weights of both; it goes into the keys of the prefix cache. The target's and the
    drafter's projections become views of fused ones: both modules stay usable, and nothing exists twice.

    Raises ValueError for models that do not fit together, a family the paged forward does not know, a configuration
    that leaves no page, and `verify_costs` for what cannot be verified in part.
    """

    def __init__(
        self, target: Target, draft_model: DraftModel | None, config: EngineConfig, identity: str = ""
    ) -> None:
        self.target, self.draft_model, self.config = target, draft_model, config
        num_tokens = draft_model.spec.num_slots + 1 if draft_model is not None else 1  # of a pass, for each row
        if config.deterministic and num_tokens > config.deterministic_width:
            raise ValueError(
                f"deterministic_width must be at least {num_tokens}, anchor and slots, got {config.deterministic_width}"
            )
        self.max_model_len = min(config.max_model_len or target.max_length, target.max_length)
        width = config.deterministic_width if config.deterministic else num_tokens
        max_pages = num_pages_for(self.max_model_len + width)
        # a piece of a prompt is filled up to a page, and a row may be decoded once more after it has ended
        num_positions = self.max_model_len + max(PAGE_SIZE, 2 * width)
        # more than twice what all rows can use at once would hardly serve the prefix cache
        most = 2 * config.max_running * max_pages
        num_pages = config.num_pages or min(most, num_pages_in(config.kv_gib, target, draft_model))
        paged = PagedTarget(target, num_pages, num_positions)
        drafter = PagedDrafter(draft_model, target, num_pages, num_positions) if draft_model is not None else None
        context = (drafter.context_width, drafter.dtype) if drafter is not None else (0, target.embed.dtype)
        vocab = target.embed.shape[0]
        self.state = RowState(config.max_running, max_pages, vocab, *context, target.device)
        self.pool = PagePool(num_pages, identity)
        self.scheduler = Scheduler(config, self.pool, self.state, num_tokens)
        self._planner = make_planner(config, draft_model, num_tokens)
        widths = self._planner.widths if self._planner is not None else {}
        self._step = Step(paged, drafter, self.state, width, config.deterministic, self._planner is not None)
        self._decode = decode_runner(self._step, config.max_running, config.deterministic, widths)
        on_gpu = target.device.type == "cuda"
        self._fixed_shapes = on_gpu or config.deterministic  # on a GPU another shape may need a kernel compiled
        self._steps_behind = int(on_gpu) if config.steps_behind is None else config.steps_behind
        self._in_flight: deque[_Flight] = deque()
        self._requests: dict[str, Progress] = {}
        self._num_submitted = 0
        self.counters = Counters(accepted_at=(num_tokens - 1) * [0])

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._requests or self._in_flight)

    def check(self, request: Request) -> None:
        """Raise ValueError where `submit` would: changes nothing, and may be called from any thread."""
        check_request(self.target, request.prompt_ids, request.params, self.max_model_len)
        if len(request.params.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop ids, got {len(request.params.stop_ids)}")
        length = len(request.prompt_ids) + max(1, request.params.max_new_tokens) + self.scheduler.num_tokens - 2
        if num_pages_for(length) > self.pool.num_pages:
            raise ValueError(
                f"prompt ({len(request.prompt_ids)} tokens) and max_new_tokens ({request.params.max_new_tokens}) need "
                f"{num_pages_for(length)} pages, the engine has {self.pool.num_pages}"
            )

    def submit(self, request: Request) -> None:
        """Take a request; it waits until there is room for it.

        Raises ValueError for an id in hand, and for what `decode.Decoder.stream` refuses.
        """
        self.check(request)
        if request.id in self._requests:
            raise ValueError(f"a request with id {request.id!r} is in hand")
        progress = Progress(request, self._num_submitted, list(request.prompt_ids))
        self._num_submitted += 1
        self._requests[request.id] = progress
        self.scheduler.add(progress)

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are finished ones. No chunk of it follows."""
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            self.scheduler.leave(progress)

    def warm_up(self) -> None:
        """Capture what is captured and run what is set up on first use; changes nothing of any request.

        The most pieces of prompts come first: what they take of the memory is there before the first request.
        """
        for count in self._piece_counts():
            for mix in USUAL_MIXES:
                batch = blank_prefill(count, self.scheduler.piece_size, self.state)
                self._step.prefill(batch, self.state.page_table.shape[1], mix)
        self._decode.warm_up()

    def _piece_counts(self) -> list[int]:
        """Numbers of pieces, largest first, whose passes need every kernel that any number does: attention splits the
        keys by the number of rows, into the next power of two."""
        if self.config.deterministic:
            return [self.config.max_running]
        if not self._fixed_shapes:
            return [1]
        budget = max(self.config.prefill_tokens, self.config.idle_prefill_tokens)
        most = budget // PAGE_SIZE + self.config.max_running  # every row may have a last piece of a few tokens
        return [most, *(2**power for power in reversed(range((most - 1).bit_length())))]

    @torch.no_grad()
    def step(self) -> list[TokenChunk]:
        """Decode one block of every row, prefill a chunk of prompts, return what was committed and is known.

        An exception means that the engine is broken. Call it while `busy`.
        """
        chunks: list[TokenChunk] = []
        if not self._in_flight:  # what aborted requests gave back since the last step
            self.pool.collect(self.scheduler.step_id)
        self.scheduler.step_id += 1
        self.counters.num_steps += 1
        pieces = self._admit()
        if pieces:
            self._launch_prefill(pieces)
        while not self.scheduler.grow():
            if self._in_flight:
                self._publish(chunks, self.scheduler.step_id)
            else:
                self.scheduler.preempt()
        decoding = self.scheduler.decoding
        if decoding:
            self._launch_decode(decoding)
        idle = not pieces and not decoding
        self._publish(chunks, self.scheduler.step_id - (0 if idle else self._steps_behind))
        return chunks

    @torch.no_grad()
    def reload(self, write: Callable[[], None], identity: str) -> list[TokenChunk]:
        """Have `write` change the draft model's weights in place; `identity` stands for them from then on.

        Every request goes on with them, prefilled again. Returns what was in flight, as `step`.
        """
        chunks: list[TokenChunk] = []
        self._publish(chunks, self.scheduler.step_id)
        self.scheduler.start_over(identity)
        write()
        return chunks

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Decoded]:
        """Decode all prompts, at most `max_running` at once; one `params` for all or one for each.

        `seconds` of an answer count from the call. Raises ValueError as `submit`, and while other requests are
        in hand; RuntimeError for a target whose logits are not finite.
        """
        if self.busy:
            raise ValueError(f"{len(self._requests)} requests are in hand; generate needs the engine for itself")
        settings = len(prompts) * [params] if isinstance(params, SamplingParams) else list(params)
        requests = [Request(str(i), list(p), s) for i, (p, s) in enumerate(zip(prompts, settings, strict=True))]
        for request in requests:
            self.check(request)
        began = time.perf_counter()
        for request in requests:
            self.submit(request)
        progresses, done = dict(self._requests), {}
        logprobs: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
        while self.busy:
            for chunk in self.step():
                if chunk.error is not None:
                    self._drop_all()
                    raise RuntimeError(f"prompt {chunk.request_id}: {chunk.error}")
                logprobs[chunk.request_id] += chunk.logprobs or []
                if chunk.last:
                    progress = progresses[chunk.request_id]
                    seconds = time.perf_counter() - began
                    blocks = (progress.num_blocks, progress.num_block_tokens)
                    reported = logprobs[chunk.request_id] if chunk.logprobs is not None else None
                    done[chunk.request_id] = Decoded(
                        progress.answer_ids, chunk.finish_reason, *blocks, seconds, reported
                    )
        return [done[request.id] for request in requests]

    def _drop_all(self) -> None:
        """Forget every request, and wait for the passes in flight."""
        for request_id in list(self._requests):
            self.abort(request_id)
        while self.busy:
            self.step()

    @timed("admit")
    def _admit(self) -> list[Piece]:
        """Rows and pages for waiting requests, and what of all prompts is prefilled in this step."""
        self.scheduler.admit()
        return self.scheduler.take_pieces()

    @timed("prefill")
    def _launch_prefill(self, pieces: list[Piece]) -> None:
        """Start writing pieces of prompts, and the first token of those that end."""
        device, state = self.target.device, self.state
        size = self.scheduler.piece_size if self._fixed_shapes else max(piece.count for piece in pieces)
        count = self.config.max_running if self.config.deterministic else len(pieces)
        num_filled = count - len(pieces)
        tokens = [fill(p.progress.token_ids[p.start : p.start + p.count], size, 0) for p in pieces]
        ends = [index for index, piece in enumerate(pieces) if piece.last]
        progresses = [pieces[index].progress for index in ends]
        reported = [index for index, piece in enumerate(pieces) if piece.progress.reports_prompt]
        following = [pieces[index].following for index in reported]
        batch = Prefill(
            token_ids=upload(tokens + num_filled * [size * [0]], torch.int64, device),
            rows=upload(fill([piece.progress.row for piece in pieces], count, state.dummy), torch.int64, device),
            starts=upload(fill([piece.start for piece in pieces], count, 0), torch.int64, device),
            counts=upload(fill([piece.count for piece in pieces], count, 0), torch.int64, device),
            ends=upload(ends, torch.int64, device),
            anchors=upload([p.token_ids[-1] if p.num_answered else -1 for p in progresses], torch.int64, device),
            reported=reported,
            following=upload([fill(ids, size, 0) for ids in following], torch.int64, device),
        )
        num_pages = self._pages_read(num_pages_for(max(piece.start for piece in pieces) + size))
        outcome = self._step.prefill(batch, num_pages, _mix(progresses))
        for piece in pieces:
            self.scheduler.register(piece.progress)
        self.counters.num_prompt_tokens += sum(piece.count for piece in pieces)
        self._fly(progresses, outcome, verified=False, reported=[pieces[index] for index in reported])

    @timed("decode")
    def _launch_decode(self, progresses: list[Progress]) -> None:
        """Start one block of every row that decodes."""
        num_pages = self._pages_read(max(len(progress.pages) for progress in progresses))
        width = self._planner.width(len(progresses)) if self._planner is not None else None
        outcome = self._decode([progress.row for progress in progresses], num_pages, _mix(progresses), width)
        self._fly(progresses, outcome, verified=True, width=width)

    def _pages_read(self, num_pages: int) -> int:
        """Columns of the page table a pass reads: on a CPU fewer are faster, but one shape needs all of them."""
        width = self.state.page_table.shape[1]
        return width if self._fixed_shapes else min(num_pages, width)

    def _fly(
        self,
        progresses: list[Progress],
        outcome: Outcome,
        verified: bool,
        reported: Sequence[Piece] = (),
        width: int | None = None,
    ) -> None:
        """Note a pass that was started, and copy its results to the host behind it."""
        copied = None
        if outcome.runs.device.type == "cuda":
            outcome = Outcome(**{name: _to_host(part) for name, part in vars(outcome).items()})
            copied = torch.cuda.Event()
            copied.record()
        for progress in progresses:
            progress.num_in_flight += 1
        self._in_flight.append(_Flight(self.scheduler.step_id, progresses, outcome, reported, copied, verified, width))

    @timed("publish")
    def _publish(self, chunks: list[TokenChunk], step_id: int) -> None:
        """Read the passes of all steps up to `step_id`, and let go of what waited for their end."""
        while self._in_flight and self._in_flight[0].step_id <= step_id:
            flight = self._in_flight.popleft()
            if flight.copied is not None:
                flight.copied.synchronize()
            flight.read_prompts()
            if flight.outcome.survival is not None:
                count = len(flight.progresses)
                said, runs = flight.outcome.survival[:count], flight.outcome.runs[:count]
                self._planner.observe(said.numpy(), flight.width, runs[:, -2].numpy())
            for index, (progress, (*tokens, count, num_drafted, num_accepted, status)) in enumerate(
                zip(flight.progresses, flight.outcome.runs.tolist())
            ):
                progress.num_in_flight -= 1
                if not progress.finished:  # else it ended in an earlier step, or was aborted
                    passed = (num_drafted, num_accepted) if flight.verified else None
                    logprobs = flight.logprobs(index, tokens[:count])
                    chunk = self._advance(progress, tokens[:count], passed, status, logprobs)
                    chunks += [chunk] if chunk.token_ids or chunk.last else []
        self.pool.collect(step_id)

    def _advance(
        self,
        progress: Progress,
        token_ids: list[int],
        verified: tuple[int, int] | None,
        status: int,
        logprobs: list[TokenLogprobs] | None,
    ) -> TokenChunk:
        """What one pass did for a request; `verified` drafts of its block, and accepted ones, None for a prefill."""
        request_id, counters = progress.request.id, self.counters
        num_drafted, num_accepted = verified or (0, 0)
        num_accepted = min(num_accepted, len(token_ids))
        if status == BROKEN:
            self._forget(progress)
            position = len(progress.token_ids)
            error = f"ValueError: the target's logits are not finite at position {position}"
            return TokenChunk(request_id, [], error=error)
        counters.num_tokens += len(token_ids)
        if verified is not None:
            counters.num_blocks += 1
            counters.num_block_tokens += len(token_ids)
            counters.num_drafted += num_drafted
            progress.num_blocks += 1
            progress.num_block_tokens += len(token_ids)
            for slot in range(num_accepted):
                counters.accepted_at[slot] += 1
        prompt_logprobs = progress.prompt_logprobs if progress.reports_prompt else None
        num_cached = 0 if progress.num_answered else progress.num_cached
        self.scheduler.commit(progress, token_ids)
        reason = FINISH_REASONS.get(status)
        if reason is not None:
            self._forget(progress)
        return TokenChunk(
            request_id, token_ids, num_drafted, num_accepted, reason, None, logprobs, prompt_logprobs, num_cached
        )

    def _forget(self, progress: Progress) -> None:
        del self._requests[progress.request.id]
        self.scheduler.leave(progress)


def _to_host(part: Tensor | None) -> Tensor | None:
    """A copy on the host, complete once the device has come so far."""
    if part is None:
        return None
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def _mix(progresses: list[Progress]) -> Mix:
    """What a batch of requests may leave out of verification."""
    params = [progress.request.params for progress in progresses]
    return Mix(
        sampled=any(p.temperature > 0 for p in params),
        filtered=any(p.temperature > 0 and p.filters_tokens for p in params),
        processed=any(p.processes_logits for p in params),
        logprobs=any(p.num_logprobs is not None for p in params),
    )
