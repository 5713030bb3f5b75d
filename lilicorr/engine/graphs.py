"""How the decode step is started: as one captured CUDA graph per batch size, or call by call.

Place in the flow: `engine` hands the rows that decode to one of the two classes, which have the same call;
`decode_runner` chooses by the device of the rows. A step of a batch of one is some hundred small kernels, and
starting them one by one takes the host longer than the device needs to run them: a graph starts them all at once.

The batch is filled up to the next captured size with the dummy row, which is never active: a filled place writes
no keys and commits nothing.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from lilicorr.engine.row import upload
from lilicorr.engine.step import USUAL_MIXES, Mix, Outcome, Step

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)


class EagerDecode:
    """The decode step call by call; `batch_size` (None: as many as there are) fixes its shape."""

    def __init__(self, step: Step, batch_size: int | None) -> None:
        self._step = step
        self._batch_size = batch_size

    def __call__(self, rows: list[int], num_pages: int, mix: Mix, width: int | None = None) -> Outcome:
        """`Step.decode` of `rows`, with the dummy row behind them."""
        filled = fill(rows, self._batch_size or len(rows), self._step.state.dummy)
        return self._step.decode(upload(filled, torch.int64, self._step.state.device), num_pages, mix, width)

    def warm_up(self) -> None:
        """Run the step once, so that what libraries set up on first use is there."""
        self([self._step.state.dummy], self._step.state.page_table.shape[1], Mix())


class GraphDecode:
    """The decode step as a CUDA graph for each batch size, mix and width, captured when first needed or by `warm_up`.

    All graphs share one memory pool: they never run at the same time. A result is good until the next call.
    """

    def __init__(self, step: Step, sizes: list[int], widths: dict[int, tuple[int, ...]]) -> None:
        self._step = step
        self._sizes = sizes  # ascending
        self._widths = widths  # by the least number of rows they are for
        self._num_pages = step.state.page_table.shape[1]  # loops end at the device's lengths, not at this
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, Mix, int | None], tuple[torch.cuda.CUDAGraph, Tensor, Outcome]] = {}

    def __call__(self, rows: list[int], num_pages: int, mix: Mix, width: int | None = None) -> Outcome:
        """`Step.decode` of `rows`, with the dummy row behind them; `num_pages` is the table's whole width."""
        size = next_size(len(rows), self._sizes)
        if (size, mix, width) not in self._graphs:
            self._capture(size, mix, width)
        graph, static_rows, output = self._graphs[size, mix, width]
        device = self._step.state.device
        static_rows.copy_(upload(fill(rows, size, self._step.state.dummy), torch.int64, device))
        graph.replay()
        return output

    def warm_up(self) -> None:
        """Capture every batch size for the usual mixes; largest first, for the pool's sake."""
        for size in reversed(self._sizes):
            widths = {width for rows, listed in self._widths.items() if rows <= size for width in listed}
            for mix in USUAL_MIXES:
                for width in (None, *sorted(widths)):
                    self._capture(size, mix, width)

    def _capture(self, size: int, mix: Mix, width: int | None) -> None:
        """Run the step over dummy rows until lazy set-up is over, then record it."""
        device = self._step.state.device
        rows = torch.full((size,), self._step.state.dummy, dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step.decode(rows, self._num_pages, mix, width)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # what other threads do with the GPU, as comparing a new checkpoint with the target, must not end a capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._step.decode(rows, self._num_pages, mix, width)
        self._graphs[size, mix, width] = (graph, rows, output)


def decode_runner(
    step: Step, max_running: int, one_shape: bool, widths: dict[int, tuple[int, ...]]
) -> EagerDecode | GraphDecode:
    """Graphs on a GPU, plain calls elsewhere; with `one_shape` every batch is filled up to `max_running`.

    `widths` are those that batches from so many rows on may be verified in (`trim.Planner.widths`).
    """
    if step.state.device.type == "cuda":
        smaller = [] if one_shape else [size for size in BATCH_SIZES if size < max_running]
        return GraphDecode(step, [*smaller, max_running], widths)
    return EagerDecode(step, max_running if one_shape else None)


def next_size(count: int, sizes: list[int]) -> int:
    """The smallest of the ascending `sizes` that holds `count` rows."""
    assert 0 < count <= sizes[-1], f"{count} rows, batches hold 1 to {sizes[-1]}"
    return sizes[bisect_left(sizes, count)]


def fill(values: list[int], size: int, padding: int) -> list[int]:
    """`values` up to `size` of them, with `padding` behind them: rows with the dummy row, lists of tokens with a 0."""
    return values + (size - len(values)) * [padding]
