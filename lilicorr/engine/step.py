"""One step of the running batch: propose, target on [anchor, drafts], verify, commit, append the drafter's context.

Place in the flow: `engine` calls `prefill` with pieces of prompts and `decode` with the rows that are decoding;
both read and write `row.RowState` and the pages, and return what was committed. Everything is tensor code of
fixed shapes without a look at a value: limits and stop tokens act on the device, so that the host may be a step
behind, and `graphs` can capture the whole of `decode`.

The anchor stands at position `lengths` of its row: keys and values, and the drafter's context, of all positions
before it count, and nothing behind them does. Rejected drafts leave their keys behind; the next step writes over
them. Rollback is that length.

Prefill is the same thing with zero slots: the last token of the prompt is the anchor of a block that has none.

Paper: section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lilicorr.blocks import Proposal, Verdict, prefix_length, wide
from lilicorr.engine.model import PagedDrafter, PagedTarget, Places, page_slots
from lilicorr.engine.row import RowState
from lilicorr.engine.trim import choose, survival_of
from lilicorr.kernels.accept import accept
from lilicorr.logprobs import logprob_table
from lilicorr.processing import process
from lilicorr.target import are_broken

RUNNING, STOPPED, AT_LIMIT, BROKEN = range(4)  # what a step says of a row; BROKEN: the target's logits are not finite


@dataclass(frozen=True)
class Prefill:
    """Pieces of sequences to be written to the pages, of at most Q tokens each; a sequence may have several.

    The pieces in `ends` are the last ones of their sequences, whose rows begin to decode.
    """

    token_ids: Tensor  # [P, Q] int64, right-padded
    rows: Tensor  # [P] int64
    starts: Tensor  # [P] int64, position of the first token
    counts: Tensor  # [P] int64, tokens without padding
    ends: Tensor  # [M] int64, indices of pieces
    anchors: Tensor  # [M] int64, the token behind the piece where it was drawn before, else -1
    reported: list[int]  # indices of K pieces that are to be reported on
    following: Tensor  # [K, Q] int64, the tokens behind each of theirs, right-padded


def blank_prefill(count: int, size: int, state: RowState) -> Prefill:
    """`count` pieces of no tokens, of `size` with their padding; each ends the dummy row, which joins nothing."""

    def of(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=state.device)

    ends = torch.arange(min(count, state.dummy), device=state.device)  # there are no more rows than that
    pieces = (of(state.dummy, count), of(0, count), of(0, count))
    return Prefill(of(0, count, size), *pieces, ends, of(-1, len(ends)), [], of(0, 0, size))


@dataclass(frozen=True)
class Mix:
    """What the host knows of a batch: False saves work, True is always right (see `verify.Sampling`)."""

    sampled: bool = True
    filtered: bool = True
    processed: bool = True  # some request changes its logits (`SamplingParams.processes_logits`)
    logprobs: bool = True  # some request asks for log-probabilities


USUAL_MIXES = (Mix(False, False, False, False), Mix(True, False, False, False), Mix(True, True, False, False))


@dataclass(frozen=True)
class Outcome:
    """What a pass did, for the host to read."""

    # [N, S + 1 + 4] int64: S + 1 tokens of which the first `count` were committed, count, drafts put to the test,
    # accepted ones, and what became of the row
    runs: Tensor
    logprobs: Tensor | None = None  # [N, S + 1, ...] `logprob_table` of the tokens, where the mix has log-probabilities
    prompt_logprobs: Tensor | None = None  # [K, Q, ...] of what follows in the pieces reported on, where there are any
    survival: Tensor | None = None  # [N, S] of `trim.survival_of`, where blocks may be verified in part


class Step:
    """The step of a target and a draft model (None: autoregression) over the rows of `state`.

    `width` is the number of positions of a row in the target's pass: the block size, or more where all passes are
    to have one shape; then (`one_shape`) prefill makes logits of all its positions too. With `trims` blocks may be
    verified in part, and `decode` says how sure the head was.
    """

    def __init__(
        self,
        target: PagedTarget,
        drafter: PagedDrafter | None,
        state: RowState,
        width: int,
        one_shape: bool,
        trims: bool = False,
    ) -> None:
        self.target, self.drafter, self.state = target, drafter, state
        self.width, self.one_shape, self.trims = width, one_shape, trims
        self.num_slots = drafter.num_slots if drafter is not None else 0
        assert width > self.num_slots, f"{width} positions cannot hold an anchor and {self.num_slots} drafts"
        assert one_shape or width == self.num_slots + 1, f"{width} positions for {self.num_slots + 1} tokens"

    @torch.no_grad()
    def decode(self, rows: Tensor, num_pages: int, mix: Mix, width: int | None = None) -> Outcome:
        """Decode one block of each of `rows` [N], none of which needs more than `num_pages` pages.

        With `width` the target runs over N * `width` positions (see `trim`), else over whole blocks. Rows that are not
        active commit nothing.
        """
        state, num_tokens = self.state, self.num_slots + 1
        active, starts, anchor_ids = state.active[rows], state.lengths[rows], state.anchor_ids[rows]
        sampling = state.sampling(rows, starts + 1, mix.sampled, mix.filtered)
        table, inside = state.page_table[rows, :num_pages], torch.arange(self.width, device=rows.device) < num_tokens
        # positions that only fill the pass up write nothing, so nothing may be read there either; of one shape are the
        # passes of a whole block too, as a kernel without lengths would be another one
        real = torch.full_like(starts, num_tokens) if self.one_shape else None
        places = _places(table, starts, active[:, None] & inside, active * (starts + num_tokens), real)

        proposal = Proposal(anchor_ids.new_empty(len(rows), 0))
        if self.drafter is not None:
            block = _first(places, self.drafter.block_size, active * (starts + self.drafter.block_size))
            draft = self.drafter.draft(anchor_ids, state.anchor_context[rows], block)
            proposal = self.drafter.head.propose(draft, sampling)
            if self.trims:
                confidence = self.drafter.head.step_confidence(draft, proposal)
                survival = survival_of(confidence, proposal.lengths, active)
            if width is not None:
                proposal, places = _cut(proposal, places, survival, width)

        padding = anchor_ids[:, None].expand(-1, self.width - num_tokens)
        output = self.target.forward(torch.cat([anchor_ids[:, None], proposal.token_ids, padding], dim=1), places)
        logits = places.spread(self.target.logits(output.hidden))[:, :num_tokens].contiguous()
        verdict = accept(proposal, self._processed(rows, logits, proposal, mix), sampling)

        context = None
        if self.drafter is not None:
            kept = torch.arange(num_tokens, device=rows.device) <= verdict.num_accepted[:, None]
            features = output.features
            if places.packing is None:
                features, places = features[:, :num_tokens], _first(places, num_tokens, places.kv_lengths)
            committed = replace(places, slots=places.slots.where(places.pack(kept), -1))
            context = places.spread(self.drafter.append(features, committed))
        outcome = self._commit(rows, starts, active, proposal, verdict, logits, mix, context)
        return replace(outcome, survival=survival) if self.trims else outcome

    @torch.no_grad()
    def prefill(self, pieces: Prefill, num_pages: int, mix: Mix) -> Outcome:
        """Write pieces to the pages and draw the token behind each that ends its sequence.

        Returns the outcome of these M, blocks of no slots; where the token is known already nothing is committed.
        """
        state, size = self.state, pieces.token_ids.shape[1]
        inside = torch.arange(size, device=state.device) < pieces.counts[:, None]
        table = state.page_table[pieces.rows, :num_pages]
        places = _places(table, pieces.starts, inside, pieces.starts + pieces.counts, pieces.counts)
        output = self.target.forward(pieces.token_ids, places)
        context = self.drafter.append(output.features, places) if self.drafter is not None else None

        rows, last = pieces.rows[pieces.ends], pieces.counts[pieces.ends] - 1
        starts, known = pieces.starts[pieces.ends] + last, pieces.anchors >= 0
        whole = self.target.logits(output.hidden) if self.one_shape else None
        if whole is not None:
            logits = whole[pieces.ends, last][:, None]
        else:
            logits = self.target.logits(output.hidden[pieces.ends, last])[:, None]
        none = Proposal(rows.new_empty(len(rows), 0))
        processed = self._processed(rows, logits, none, mix)
        verdict = accept(none, processed, state.sampling(rows, starts + 1, mix.sampled, mix.filtered))
        verdict = replace(verdict, next_ids=torch.where(known, pieces.anchors, verdict.next_ids))
        context = context[pieces.ends, last][:, None] if context is not None else None
        joining = rows != state.dummy
        outcome = self._commit(rows, starts, joining, none, verdict, logits, mix, context, known)
        # piece by piece: logits of all positions of all pieces at once would outgrow everything else
        tables = [
            logprob_table(self.target.logits(output.hidden[index]) if whole is None else whole[index], following)
            for index, following in zip(pieces.reported, pieces.following)
        ]
        return replace(outcome, prompt_logprobs=torch.stack(tables)) if tables else outcome

    def _processed(self, rows: Tensor, logits: Tensor, proposal: Proposal, mix: Mix) -> Tensor:
        """The logits [N, S + 1, V] that the tokens of `rows` [N] are drawn from."""
        if not mix.processed:
            return logits
        return process(wide(logits), proposal.token_ids, self.state.processing.of_rows(rows))

    def _commit(
        self,
        rows: Tensor,
        starts: Tensor,
        active: Tensor,
        proposal: Proposal,
        verdict: Verdict,
        logits: Tensor,
        mix: Mix,
        context: Tensor | None,
        silent: Tensor | None = None,
    ) -> Outcome:
        """Make the accepted run and the token after it part of the sequences; the new anchor is that token.

        What stands behind a stop token or the limit is cut from the answer; such a row is done. `silent` rows
        [N] only take up their anchor.
        """
        state, num_accepted, next_ids = self.state, verdict.num_accepted, verdict.next_ids
        remaining = state.remaining[rows]
        drafts, tested = proposal.token_ids, proposal.lengths
        tested = torch.full_like(num_accepted, drafts.shape[1]) if tested is None else tested.to(num_accepted.dtype)
        run = torch.cat([drafts, next_ids[:, None]], dim=1).scatter(1, num_accepted[:, None], next_ids[:, None])
        within = torch.arange(run.shape[1], device=rows.device) < (num_accepted + 1).minimum(remaining)[:, None]
        stops = (run[..., None] == state.stop_ids[rows][:, None]).any(dim=-1) & within
        stopped = stops.any(dim=-1)
        count = torch.where(stopped, prefix_length(~stops) + 1, within.sum(dim=-1))
        status = torch.where(stopped, STOPPED, torch.where(count == remaining, AT_LIMIT, RUNNING))
        if silent is not None:
            count, status = count.where(~silent, 0), status.where(~silent, RUNNING)
        count, status = count.where(active, 0), status.where(~are_broken(logits).any(dim=-1), BROKEN)

        state.active[rows] = active & (status == RUNNING)
        state.lengths[rows] = torch.where(active, starts + num_accepted + 1, state.lengths[rows])
        state.anchor_ids[rows] = torch.where(active, next_ids, state.anchor_ids[rows])
        state.remaining[rows] = remaining - count
        if context is not None:
            newest = context[torch.arange(len(rows), device=rows.device), num_accepted]
            state.anchor_context[rows] = torch.where(active[:, None], newest, state.anchor_context[rows])
        if mix.processed:
            state.processing.count(rows, run, count)
        logprobs = logprob_table(logits, run) if mix.logprobs else None
        return Outcome(torch.cat([run, torch.stack([count, tested, num_accepted, status], dim=1)], dim=1), logprobs)


def _places(
    page_table: Tensor, starts: Tensor, write: Tensor, kv_lengths: Tensor, query_lengths: Tensor | None = None
) -> Places:
    """Positions starts, starts + 1, ... of each row [N], written where `write` [N, Q]."""
    positions = starts[:, None] + torch.arange(write.shape[1], device=starts.device)
    return Places(positions, page_slots(page_table, positions, write), page_table, kv_lengths, query_lengths)


def _cut(proposal: Proposal, places: Places, survival: Tensor, width: int) -> tuple[Proposal, Places]:
    """Proposal and places of a pass that runs `width` positions a row in the mean."""
    packing = choose(survival, width)
    lengths = packing.lengths if proposal.lengths is None else packing.lengths.minimum(proposal.lengths)
    num_queries = packing.lengths + 1
    places = replace(
        places,
        positions=packing.pack(places.positions),
        slots=packing.pack(places.slots),
        kv_lengths=torch.where(places.kv_lengths > 0, places.positions[:, 0] + num_queries, 0),
        query_lengths=num_queries,
        packing=packing,
    )
    return replace(proposal, lengths=lengths), places


def _first(places: Places, count: int, kv_lengths: Tensor) -> Places:
    """The first `count` positions of every row, none of which is padding."""
    positions, slots = places.positions[:, :count], places.slots[:, :count]
    return replace(places, positions=positions, slots=slots, kv_lengths=kv_lengths, query_lengths=None)
