"""What a replica reports, and how the reports of all replicas become Prometheus' text format.

Place in the flow: `recorder` and `replica.Snapshot` -> `Report`, one for each replica -> `peers` brings them together
-> `exposition`, the answer to GET /metrics. A series is labelled with its replica, so every series is one replica's own
and a counter never falls; sums over replicas are sums over series, as everywhere in Prometheus. Names that vLLM has
are vLLM's, with its meaning, so that tools and dashboards made for it find them; ours begin with `lilicorr:`.

Acceptance length, tau in the paper, is tokens per verified block, bonus token included:
`lilicorr:block_tokens_total / lilicorr:blocks_total`. The first token of an answer comes from its prefill and is in
neither. `1 + vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_drafts_total` is the same but for
blocks that were cut at the end of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lilicorr.engine.counters import STAGES
from serve_app.recorder import HISTOGRAMS, Histogram
from serve_app.replica import Snapshot

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
Record = TypeVar("Record")

FINISHED_REASONS = ("stop", "length", "abort", "error")
RELOAD_OUTCOMES = ("applied", "refused")

# name -> what it is; `{label}` after a name is a label besides `model_name` and `replica`
GAUGES = {
    "vllm:num_requests_running": "Requests that have a row of the running batch.",
    "vllm:num_requests_waiting": "Requests that wait for a row or for pages.",
    "vllm:kv_cache_usage_perc": "Share of the pages that requests hold, 0 to 1.",
    "lilicorr:waiting_tokens": "Prompt tokens of the requests that wait.",
    "lilicorr:rows": "Rows of the running batch.",
    "lilicorr:rows_decoding": "Rows whose prompt is prefilled.",
    "lilicorr:pages": "Pages of 64 positions in the pool.",
    "lilicorr:pages_free": "Pages a request could get; cached ones are among them.",
    "lilicorr:replica_up": "1 while the replica reports, 0 for one that has gone: only its counters still stand here.",
}
COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens of requests that have run, cached ones among them; after a preemption again.",
    "vllm:generation_tokens": "Tokens of answers.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found there.",
    "vllm:num_preemptions": "Requests that lost row and pages and were prefilled again.",
    "vllm:request_success{finished_reason}": "Requests by how they ended.",
    "vllm:spec_decode_num_drafts": "Blocks with drafts that were verified.",
    "vllm:spec_decode_num_draft_tokens": "Drafts that were put to the test.",
    "vllm:spec_decode_num_accepted_tokens": "Drafts that became part of an answer.",
    "vllm:spec_decode_num_accepted_tokens_per_pos{position}": "The same by slot; position 0 is the paper's slot 1.",
    "lilicorr:steps": "Steps of the engine.",
    "lilicorr:stage_seconds{stage}": "Time of the decoding thread at each stage of its steps.",
    "lilicorr:prefill_tokens": "Positions prefilled: prompt tokens without the cached ones.",
    "lilicorr:blocks": "Blocks verified.",
    "lilicorr:block_tokens": "Tokens these blocks added to answers, bonus tokens included.",
    "lilicorr:weight_reloads{outcome}": "Times the replica was told to take other weights: applied or refused.",
    "lilicorr:gather_failures": "Times this replica could not ask the others for their reports.",
}


@dataclass(frozen=True)
class Report:
    """What one replica says of itself at a moment. `at` is its own clock (unix time): the newest report counts."""

    replica: str
    at: float
    rows: int
    snapshot: Snapshot
    histograms: dict[str, Histogram]
    num_gather_failures: int = 0
    num_weight_reloads: Mapping[str, int] = field(default_factory=dict)  # attempts by outcome, see `reload`

    def plain(self) -> dict[str, Any]:
        """As it goes to other replicas, without any class: during an update some are of another version."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Any) -> Report:
        """The report of a replica of any version: what is not known here is left out, what is missing has its default.

        Raises ValueError for what is no report.
        """
        try:
            state, found = _known(Snapshot, plain["snapshot"]), plain["histograms"].items()
            histograms = {name: _known(Histogram, values) for name, values in found}
            return _known(cls, plain | {"snapshot": state, "histograms": histograms})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a replica's report ({type(error).__name__}: {error}): {plain!r:.200}") from error


def _known(kind: type[Record], values: dict[str, Any]) -> Record:
    """A record of those values that are its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def gauges(report: Report) -> dict[str, float]:
    """The values of GAUGES for a replica that is up."""
    state = report.snapshot
    return {
        "vllm:num_requests_running": state.running,
        "vllm:num_requests_waiting": state.waiting,
        "vllm:kv_cache_usage_perc": kv_usage(state),
        "lilicorr:waiting_tokens": state.waiting_tokens,
        "lilicorr:rows": report.rows,
        "lilicorr:rows_decoding": state.decoding,
        "lilicorr:pages": state.total_pages,
        "lilicorr:pages_free": state.free_pages,
        "lilicorr:replica_up": 1,
    }


def counters(report: Report) -> dict[str, float | dict[str, float]]:
    """The values of COUNTERS; by label value where there is a label."""
    state = report.snapshot
    return {
        "vllm:prompt_tokens": state.num_prompt_tokens + state.num_cached_tokens,
        "vllm:generation_tokens": state.num_tokens,
        "vllm:prefix_cache_queries": state.num_prompt_tokens + state.num_cached_tokens,
        "vllm:prefix_cache_hits": state.num_cached_tokens,
        "vllm:num_preemptions": state.num_preemptions,
        "vllm:request_success{finished_reason}": {why: state.num_finished.get(why, 0) for why in FINISHED_REASONS},
        "vllm:spec_decode_num_drafts": state.num_drafts,
        "vllm:spec_decode_num_draft_tokens": state.num_drafted,
        "vllm:spec_decode_num_accepted_tokens": state.num_accepted,
        "vllm:spec_decode_num_accepted_tokens_per_pos{position}": {
            str(slot): count for slot, count in enumerate(state.accepted_at)
        },
        "lilicorr:steps": state.num_steps,
        "lilicorr:stage_seconds{stage}": dict(zip(STAGES, state.stage_seconds)),
        "lilicorr:prefill_tokens": state.num_prompt_tokens,
        "lilicorr:blocks": state.num_blocks,
        "lilicorr:block_tokens": state.num_block_tokens,
        "lilicorr:weight_reloads{outcome}": {how: report.num_weight_reloads.get(how, 0) for how in RELOAD_OUTCOMES},
        "lilicorr:gather_failures": report.num_gather_failures,
    }


def kv_usage(state: Snapshot) -> float:
    """Share of the pages that requests hold."""
    return (state.total_pages - state.free_pages) / max(1, state.total_pages)


def exposition(model_name: str, reports: Iterable[tuple[Report, bool]]) -> bytes:
    """The text Prometheus reads: all series of the reports; the flag says whether that replica is up."""
    return generate_latest(_Families(_families(model_name, list(reports))))


@dataclass(frozen=True)
class _Families:
    """What `generate_latest` takes for a registry."""

    families: Iterator[Metric]

    def collect(self) -> Iterator[Metric]:
        return self.families


def _families(model_name: str, reports: list[tuple[Report, bool]]) -> Iterator[Metric]:
    common = ("model_name", "replica")
    for name, text in GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=common)
        for report, up in reports:
            if up:
                gauge.add_metric((model_name, report.replica), gauges(report)[name])
            elif name == "lilicorr:replica_up":
                gauge.add_metric((model_name, report.replica), 0)
        yield gauge
    for key, text in COUNTERS.items():
        name, _, label = key.rstrip("}").partition("{")
        counter = CounterMetricFamily(name, text, labels=(*common, label) if label else common)
        for report, _ in reports:
            values = counters(report)[key]
            for value, amount in values.items() if isinstance(values, dict) else [(None, values)]:
                labels = (model_name, report.replica) if value is None else (model_name, report.replica, value)
                counter.add_metric(labels, amount)
        yield counter
    for name, (text, _) in HISTOGRAMS.items():
        family = HistogramMetricFamily(name, text, labels=common)
        for report, _ in reports:
            histogram = report.histograms.get(name)
            if histogram is not None:  # else the replica's version does not have it
                family.add_metric((model_name, report.replica), histogram.cumulated(), histogram.sum)
        yield family
