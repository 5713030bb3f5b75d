"""What the benches share: times of a call on a device, the floors of a card, and the files of rows.

Place in the flow: every bench measures with these and appends with `RowFile`; `plots` reads what it wrote.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lilicorr.provenance import provenance

# Bytes and bf16 operations per second, from the makers' data sheets; the key is part of the device's name.
CARDS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12)}
WARM_UP = 5
COLD_BYTES = 256 << 20  # more than any card's last cache


class RowFile:
    """Appends rows with provenance to a .jsonl file as they come, so that what ended early keeps what it had.

    With `path` None nothing is written; `config` and `extra` go into the provenance.
    """

    def __init__(self, path: Path | None, config: Any = None, **extra: Any) -> None:
        self.path, self.rows = path, []
        self.provenance = provenance(config, **extra)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep and write one row; returns it."""
        self.rows.append(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "provenance": self.provenance}) + "\n")
        return row


def nothing() -> None:
    """What a call needs before it where nothing has to be set back."""


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`run` as a CUDA graph, and what it returned: tensors that every replay writes again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles and allocates outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def device_times(run: Callable[[], Any], repeats: int, reset: Callable[[], None] = nothing) -> list[float]:
    """Microseconds of each call between two device events, over caches that hold something else.

    `run` starts work on the GPU: the replay of a graph, or calls one by one, which then wait for the host as they do
    in use. `reset` runs before each call and does not count.
    """
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(WARM_UP + repeats):
        reset()
        cold.zero_()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return times[WARM_UP:]


def host_times(run: Callable[[], Any], repeats: int, reset: Callable[[], None] = nothing) -> list[float]:
    """Microseconds of each call on the CPU, after one that does not count; `reset` as in `device_times`."""
    times = []
    for _ in range(repeats + 1):
        reset()
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    return times[1:]


def summary(times: list[float]) -> dict[str, float]:
    """Median and the 10th and 90th percentile."""
    ordered = sorted(times)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return {"median_us": statistics.median(times), "p10_us": low, "p90_us": high, "repeats": len(times)}


def card() -> tuple[str, float, float]:
    """Name, bytes per second and bf16 operations per second of the GPU; ValueError for one not in `CARDS`."""
    name = torch.cuda.get_device_name()
    for key, (bandwidth, arithmetic) in CARDS.items():
        if key in name:
            return name, bandwidth, arithmetic
    raise ValueError(f"the floor of {name!r} is not known; add it to CARDS beside {', '.join(CARDS)}")


def device_name() -> str:
    """What a row says it was measured on."""
    return card()[0] if torch.cuda.is_available() else "cpu"


def floor_us(num_bytes: float, num_operations: float) -> float | None:
    """Microseconds that the GPU needs at best: moving the bytes or computing, whichever takes longer; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    _, bandwidth, arithmetic = card()
    return 1e6 * max(num_bytes / bandwidth, num_operations / arithmetic)
