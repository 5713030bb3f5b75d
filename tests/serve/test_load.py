"""2,000 requests through Serve, 32 at a time, a tenth of which leave: nothing is lost, doubled, wrong or kept.

Prints what Serve, the HTTP side and the client add to the engine's own times, which are known to a histogram's bounds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes import CHAT
from models import load, replica_pids, save_random_checkpoint, serving

from lilicorr.chat import render_prompt
from lilicorr.checkpoint import load_draft_model
from lilicorr.decode import Decoder, SamplingParams
from lilicorr.tiny import tiny_target_folder
from serve_app.detokenize import TextStream, token_table

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]
NUM_REQUESTS, STREAMS, LEAVES_EVERY = 2000, 32, 10
WARM = 400  # requests before memory is looked at: caches and pools have their size then
GROWTH_MB = 48.0
QUESTIONS = ["What is 1 + 1?", "def add(a, b):", "ď 漢字", "x = " * 30, "go on", "a", "lattice " * 9, "Name a colour."]
LENGTHS = (4, 16, 40, 72)


@dataclass
class Case:
    """A request and what decode.py answers."""

    body: dict[str, Any]
    text: str
    num_tokens: int


@dataclass
class Times:
    """Seconds that clients saw: to the first text, and between two pieces of text."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target_folder(folder / "target")
    save_random_checkpoint(folder / "checkpoint", target, seed=0)
    return target, folder / "checkpoint"


@pytest.fixture(scope="module")
def url(ray_cluster: None, models: tuple[Path, Path]) -> Iterator[str]:
    """An endpoint of one replica with 32 rows, and pages for a quarter of what they may need."""
    with serving(*models, engine={"max_running": STREAMS, "num_pages": 24}) as address:
        yield address


def make_cases(target: Path, checkpoint: Path) -> list[Case]:
    """Greedy and sampled requests of every length."""
    loaded = load(target)
    decoder, table = Decoder(loaded, load_draft_model(checkpoint, loaded)), token_table(loaded.tokenizer)
    cases = []
    for number, question in enumerate(QUESTIONS * len(LENGTHS)):
        length, temperature = LENGTHS[number // len(QUESTIONS)], number % 2
        messages = [{"role": "user", "content": question}]
        params = SamplingParams(length, float(temperature), seed=number, stop_ids=(258,))
        token_ids = decoder.generate(render_prompt(loaded.tokenizer, messages, {}), params).token_ids
        stream = TextStream(table)
        text = stream.push(token_ids).text + stream.finish()
        body = {"model": "tiny", "messages": messages, "max_tokens": length, "temperature": temperature, "seed": number}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        cases.append(Case(body, text, len(token_ids)))
    return cases


async def ask(client: httpx2.AsyncClient, case: Case, leaves: bool, times: Times) -> None:
    """One streamed request, to its end or to its first text."""
    start = last = time.monotonic()
    text, usage, ended = "", None, False
    async with client.stream("POST", CHAT, json=case.body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line:
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = True
                continue
            event = json.loads(data)
            assert "error" not in event and not ended, event
            usage = event.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if not piece:
                continue
            now = time.monotonic()
            (times.between if text else times.first).append(now - (last if text else start))
            text, last = text + piece, now
            if leaves:
                return
    assert ended and text == case.text and usage is not None and usage["completion_tokens"] == case.num_tokens


async def load_endpoint(url: str, cases: list[Case], numbers: range) -> Times:
    """All requests of `numbers`, so many at a time."""
    times, places = Times(), asyncio.Semaphore(STREAMS)
    limits = httpx2.Limits(max_connections=STREAMS)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(number: int) -> None:
            async with places:
                leaves = number % LEAVES_EVERY == LEAVES_EVERY - 1
                await ask(client, cases[number * 7 % len(cases)], leaves, times)

        await asyncio.gather(*(one(number) for number in numbers))
    return times


def read_metrics(url: str) -> dict[str, float]:
    """Series and values of /metrics, summed over their labels but `le`, `finished_reason` and `position`."""
    found: dict[str, float] = {}
    for line in httpx2.get(url + "/metrics", timeout=30).text.splitlines():
        if not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.partition("{")
            kept = [part for part in labels.rstrip("}").split(",") if part.startswith(("le=", "finished_reason="))]
            key = ",".join([name, *kept])
            found[key] = found.get(key, 0.0) + float(value)
    return found


def quantile(metrics: dict[str, float], name: str, share: float) -> float:
    """Of a histogram, by straight lines between its bounds, as Prometheus does it."""
    prefix = f'{name}_bucket,le="'
    counts = {key.removeprefix(prefix).rstrip('"'): value for key, value in metrics.items() if key.startswith(prefix)}
    bounds = sorted((float(bound.replace("+Inf", "inf")), count) for bound, count in counts.items())
    wanted, low, below = share * bounds[-1][1], 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def replica_mb() -> float:
    """Resident memory of the one replica's process."""
    (pid,) = replica_pids()
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def wait_for_rest(url: str) -> dict[str, float]:
    """The metrics once nothing runs or waits."""
    deadline = time.monotonic() + 60
    while True:
        metrics = read_metrics(url)
        if not metrics["vllm:num_requests_running"] and not metrics["vllm:num_requests_waiting"]:
            return metrics
        assert time.monotonic() < deadline, metrics
        time.sleep(0.5)


def test_load(url: str, models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    cases = make_cases(*models)
    before = wait_for_rest(url)
    asyncio.run(load_endpoint(url, cases, range(WARM)))
    warm = wait_for_rest(url)
    memory = replica_mb()
    times = asyncio.run(load_endpoint(url, cases, range(WARM, NUM_REQUESTS)))
    after = wait_for_rest(url)
    grown = replica_mb() - memory
    ended = [key for key in after if key.startswith("vllm:request_success_total")]
    assert sum(after[key] - before.get(key, 0.0) for key in ended) == NUM_REQUESTS
    assert after["lilicorr:pages_free"] == before["lilicorr:pages_free"] == after["lilicorr:pages"]
    assert after["vllm:num_preemptions_total"] > before["vllm:num_preemptions_total"]
    assert grown < GROWTH_MB, f"the replica has grown by {grown:.0f} MB"
    seen_by_engine = {key: value - warm.get(key, 0.0) for key, value in after.items()}
    with capsys.disabled():
        print(f"\nmemory of the replica {memory:.0f} MB, {grown:+.0f} MB after {NUM_REQUESTS - WARM} requests more")
        for what, seen, name in (
            ("first token", times.first, "vllm:time_to_first_token_seconds"),
            ("between tokens", times.between, "vllm:inter_token_latency_seconds"),
        ):
            for share in (0.5, 0.99):
                client = sorted(seen)[int(share * (len(seen) - 1))]
                engine = quantile(seen_by_engine, name, share)
                figures = f"client {1000 * client:.1f} ms, engine {1000 * engine:.1f} ms"
                print(f"{what}, p{100 * share:.0f}: {figures}, {1000 * (client - engine):+.1f} ms")
