"""The device's side of the running batch: one row per request, a structure of arrays.

Place in the flow: the scheduler writes a row when a request joins and marks it inactive when it leaves; every
step gathers its rows, decodes, and scatters the new state. A request stays in its row from start to finish and
nothing is ever compacted or merged, so no request can see its neighbour's state. The last row is a dummy: it is
never active, and fills a batch up to the size of a captured graph.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lilicorr.decode import SamplingParams
from lilicorr.processing import Processing, processing_of
from lilicorr.verify import Sampling

MAX_STOP_IDS = 8


def upload(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host values on the device; the host does not wait for the copy."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; the host does not wait for the copy."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class RowState:
    """State of `num_rows` rows and the dummy; R = num_rows + 1, P = max_pages, V = vocab."""

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        vocab: int,
        context_width: int,
        context_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows + 1, *shape, dtype=dtype, device=device)

        self.device = device
        self.dummy = num_rows
        self.active = zeros(dtype=torch.bool)  # [R] decoding, not finished
        self.lengths = zeros()  # [R] positions whose keys and values count; the anchor's position
        self.anchor_ids = zeros()  # [R] the last committed token
        self.anchor_context = zeros(context_width, dtype=context_dtype)  # [R, H] fused features before the anchor
        self.page_table = zeros(max_pages, dtype=torch.int32)  # [R, P]
        self.remaining = zeros()  # [R] tokens the answer may still get
        self.stop_ids = zeros(MAX_STOP_IDS).fill_(-1)  # [R, MAX_STOP_IDS], filled up with -1
        self.temperature = zeros(dtype=torch.float64)
        self.top_k = zeros()
        self.top_p = zeros(dtype=torch.float64).fill_(1.0)
        self.min_p = zeros(dtype=torch.float64)
        self.seeds = zeros()
        self.processing = Processing.neutral(num_rows + 1, MAX_STOP_IDS, vocab, device)
        self._processed: set[int] = set()  # rows whose processing is not neutral

    def join(self, row: int, params: SamplingParams, prompt_ids: list[int], answer_ids: list[int]) -> None:
        """Write a request's settings to its row, and what its tokens so far ask of later ones; its prefill makes the
        row active."""
        stop_ids = [*params.stop_ids, *(MAX_STOP_IDS - len(params.stop_ids)) * [-1]]
        self.active[row] = False
        self.remaining[row] = params.max_new_tokens - len(answer_ids)
        self.stop_ids[row] = upload(stop_ids, torch.int64, self.device)
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = params.seed
        if params.processes_logits or row in self._processed:
            self._process(row, params, prompt_ids, answer_ids)

    def _process(self, row: int, params: SamplingParams, prompt_ids: list[int], answer_ids: list[int]) -> None:
        """Write what the request, or the one before it in this row, asks of its logits."""
        vocab, host = self.processing.counts.shape[1], torch.device("cpu")
        processing = processing_of(params, prompt_ids, answer_ids, vocab, host, MAX_STOP_IDS)
        for field in fields(processing):
            getattr(self.processing, field.name)[row] = moved(getattr(processing, field.name)[0], self.device)
        (self._processed.add if params.processes_logits else self._processed.discard)(row)

    def leave(self, row: int) -> None:
        """No later step writes anything for the row."""
        self.active[row] = False

    def write_pages(self, entries: list[tuple[int, int, int]]) -> None:
        """Set entries (row, index, page) of the page table."""
        if entries:
            table = upload(entries, torch.int64, self.device)
            self.page_table[table[:, 0], table[:, 1]] = table[:, 2].int()

    def sampling(self, rows: Tensor, positions: Tensor, any_sampled: bool, any_filtered: bool) -> Sampling:
        """How the tokens of `rows` [N] are drawn, slot 1's being at `positions` [N]."""
        return Sampling(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seeds=self.seeds[rows],
            positions=positions,
            any_sampled=any_sampled,
            any_filtered=any_filtered,
            min_p=self.min_p[rows] if any_filtered else None,
        )
