"""`serve_app.metrics` and `recorder`: names, labels and values of the exposition; dashboard and scrape example."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import yaml
from fakes import CHAT, EchoEngine, body
from fastapi.testclient import TestClient
from operated import operated_app, report
from prometheus_client.parser import text_string_to_metric_families

from lilicorr.engine.counters import STAGES
from lilicorr.engine.request import TokenChunk
from serve_app.metrics import COUNTERS, GAUGES, counters, exposition, gauges
from serve_app.recorder import HISTOGRAMS, Histogram, Recorder

MONITORING = Path(__file__).parents[2] / "serve_app" / "monitoring"
LABELS = {"success": "finished_reason", "per_pos": "position", "stage_seconds": "stage", "weight_reloads": "outcome"}
# Of vLLM 0.33: what its own benchmark, and dashboards made for it, read.
VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "vllm:request_success_total", "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum", "vllm:request_time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
}  # fmt: skip


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and value of every sample, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(text: str, name: str, **labels: str) -> float:
    """The sum over series, as PromQL's `sum`."""
    return sum(value for found, value in samples(text)[name] if labels.items() <= found.items())


def assert_none_fell(before: str, after: str) -> None:
    """No counter and no part of a histogram is less in the later exposition, and each is a number."""
    later = samples(after)
    for name, series in samples(before).items():
        if name.endswith(("_total", "_count", "_bucket", "_sum")):
            pairs = zip(series, later[name], strict=True)
            assert all(old[0] == new[0] and old[1] <= new[1] for old, new in pairs), name


@pytest.fixture
def two() -> str:
    """Two replicas, one of which has gone."""
    reports = [(report("a"), True), (report("b", num_tokens=7, num_drafts=1), False)]
    return exposition('m"1', reports).decode()


def test_the_names_are_vllms_and_every_series_has_model_and_replica(two: str) -> None:
    found = samples(two)
    assert VLLM_NAMES <= found.keys()
    for name, series in found.items():
        assert name.startswith(("vllm:", "lilicorr:"))
        own = {label for part, label in LABELS.items() if part in name}
        own |= {"le"} if name.endswith("_bucket") else set()
        for labels, _ in series:
            assert labels.keys() == {"model_name", "replica"} | own and labels["model_name"] == 'm"1'


def test_the_values_are_the_snapshots(two: str) -> None:
    assert total(two, "vllm:generation_tokens_total", replica="a") == 100
    assert total(two, "vllm:generation_tokens_total") == 107
    assert total(two, "vllm:spec_decode_num_accepted_tokens_total", replica="a") == 60
    assert total(two, "vllm:spec_decode_num_accepted_tokens_per_pos_total", replica="a", position="2") == 15
    assert total(two, "vllm:request_success_total", replica="a", finished_reason="stop") == 4
    assert total(two, "vllm:request_success_total", replica="a", finished_reason="error") == 0
    assert total(two, "vllm:prefix_cache_hits_total", replica="a") == 128
    assert total(two, "vllm:prefix_cache_queries_total", replica="a") == 428
    assert total(two, "vllm:kv_cache_usage_perc") == pytest.approx(0.6)
    assert total(two, "lilicorr:rows_decoding") == 2
    reloads = [total(two, "lilicorr:weight_reloads_total", replica="a", outcome=how) for how in ("applied", "refused")]
    assert reloads == [0, 2]
    seconds = [total(two, "lilicorr:stage_seconds_total", replica="a", stage=stage) for stage in STAGES]
    assert seconds == [0.5, 1, 4, 0.25]
    assert (
        total(two, "lilicorr:block_tokens_total", replica="a") / total(two, "lilicorr:blocks_total", replica="a") == 3
    )


def test_a_replica_that_has_gone_keeps_its_counters_and_holds_nothing(two: str) -> None:
    found = samples(two)
    assert dict((labels["replica"], value) for labels, value in found["lilicorr:replica_up"]) == {"a": 1, "b": 0}
    for name in GAUGES.keys() - {"lilicorr:replica_up"}:
        assert [labels["replica"] for labels, _ in found[name]] == ["a"]
    assert total(two, "vllm:spec_decode_num_drafts_total", replica="b") == 1


def test_tables_and_values_have_the_same_names() -> None:
    assert gauges(report("a")).keys() == GAUGES.keys()
    assert counters(report("a")).keys() == COUNTERS.keys()


def test_the_lines_that_vllms_benchmark_adds_up(two: str) -> None:
    """It takes lines by prefix, ending and substring, and the slot from the text of the label."""
    drafts, per_position = 0.0, {}
    for line in two.splitlines():
        if line.startswith("vllm:spec_decode") and "_created" not in line:
            value = float(line.split()[-1])
            if "num_drafts" in line:
                drafts += value
            elif "num_accepted_tokens_per_pos" in line:
                position = int(re.search(r'position="(\d+)"', line)[1])
                per_position[position] = per_position.get(position, 0) + value
    assert drafts == 30 and per_position == {0: 50, 1: 40, 2: 30, 3: 0, 4: 0}


def test_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 7):
        histogram.observe(value)
    assert histogram.cumulated() == [("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == 15
    copied = histogram.copy()
    histogram.observe(0)
    assert copied.cumulated()[-1] == ("+Inf", 5)


class Clock:
    """Sets `time.monotonic` of the recorder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("serve_app.recorder.time.monotonic", lambda: self.now)


def test_times_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrives at 100, waits a step, gets its row in the step from 102 to 103, whose end is its first token; then blocks
    at 104 and 106. Another one is aborted before it has a token."""
    clock, recorder = Clock(monkeypatch), Recorder()
    engine = EchoEngine()
    app, replica = operated_app(engine)
    with TestClient(app) as client:
        client.post(CHAT, json=body("hi"))
    replica.close()
    request = engine.requests[0]
    recorder.arrived(request, 100.0)
    clock.now = 102.0
    recorder.stepped(100.5, [], [])
    clock.now = 103.0
    recorder.stepped(102.0, [request.id], [TokenChunk(request.id, [1])])
    clock.now = 104.0
    recorder.stepped(103.0, [request.id], [TokenChunk(request.id, [1, 2, 3], 5, 2)])
    clock.now = 106.0
    recorder.stepped(104.0, [], [TokenChunk(request.id, [1, 2, 3], 5, 2, "length")])
    recorder.ended(request.id)
    recorder.ended(request.id)
    sums = {name: (histogram.cumulated()[-1][1], histogram.sum) for name, histogram in recorder.histograms().items()}
    assert sums["vllm:request_queue_time_seconds"] == (1, 2.0)
    assert sums["vllm:time_to_first_token_seconds"] == (1, 3.0)
    assert sums["vllm:request_prefill_time_seconds"] == (1, 1.0)
    assert sums["vllm:inter_token_latency_seconds"] == (2, 3.0)
    assert sums["vllm:request_decode_time_seconds"] == (1, 3.0)
    assert sums["vllm:request_time_per_output_token_seconds"] == (1, 0.5)
    assert sums["vllm:e2e_request_latency_seconds"] == (1, 6.0)
    assert sums["vllm:request_generation_tokens"] == (1, 7.0)
    assert sums["vllm:request_prompt_tokens"] == (1, float(len(request.prompt_ids)))
    assert sums["vllm:iteration_tokens_total"] == (4, 7.0)
    assert sums["lilicorr:step_seconds"] == (4, 5.5)
    assert sums["lilicorr:verify_len"] == (2, 12.0)  # two blocks of five drafts, the anchor with each


def test_an_aborted_request_has_no_latency() -> None:
    recorder, engine = Recorder(), EchoEngine()
    app, replica = operated_app(engine)
    with TestClient(app) as client:
        client.post(CHAT, json=body("hi"))
    replica.close()
    recorder.arrived(engine.requests[0], time.monotonic())
    recorder.ended(engine.requests[0].id)
    counts = {name: histogram.cumulated()[-1][1] for name, histogram in recorder.histograms().items()}
    assert {name for name, count in counts.items() if count} == {
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    }


def test_over_http_after_requests_and_never_falling() -> None:
    engine = EchoEngine()
    app, replica = operated_app(engine)
    texts = []
    with TestClient(app) as client:
        for question in ("hello there", "and again", "a third one"):
            client.post(CHAT, json=body(question)).raise_for_status()
            response = client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            texts.append(response.text)
    replica.close()
    assert total(texts[-1], "vllm:request_success_total", finished_reason="stop") == 3
    assert total(texts[-1], "vllm:time_to_first_token_seconds_count") == 3
    assert total(texts[-1], "vllm:generation_tokens_total") == engine.counters.num_tokens > 30
    for name in HISTOGRAMS:
        assert total(texts[-1], f"{name}_count") > 0, name
    for before, after in zip(texts, texts[1:]):
        assert_none_fell(before, after)


def expressions(node: object) -> list[str]:
    """Every PromQL expression of a dashboard, its variables' queries included."""
    if isinstance(node, dict):
        own = [node[key] for key in ("expr", "query") if isinstance(node.get(key), str)]
        return own + [found for value in node.values() for found in expressions(value)]
    return [found for value in node for found in expressions(value)] if isinstance(node, list) else []


def test_the_dashboard_asks_for_series_that_exist(two: str) -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    found, asked = samples(two), set()
    for expression in expressions(dashboard):
        names = re.findall(r"[a-z_]+:[a-z_0-9]+", expression)
        assert names or expression == "prometheus", expression
        asked.update(names)
        for name, labels in re.findall(r"([a-z_]+:[a-z_0-9]+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)=", labels))
            assert used <= found[name][0][0].keys(), expression
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    assert asked <= found.keys(), asked - found.keys()
    for label in re.findall(r"by \((\w+)\)", " ".join(expressions(dashboard))):
        assert any(label in series[0][0] for series in found.values()), label
    assert {"vllm:spec_decode_num_accepted_tokens_per_pos_total", "lilicorr:block_tokens_total"} <= asked
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_the_scrape_example_asks_where_the_endpoint_answers() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    app, replica = operated_app(EchoEngine())
    with TestClient(app) as client:
        assert client.get(jobs["lilicorr"]["metrics_path"]).status_code == 200
    replica.close()
    serve_config = yaml.safe_load((MONITORING.parent / "config.yaml").read_text(encoding="utf-8"))
    assert jobs["lilicorr"]["static_configs"] == [{"targets": [f"127.0.0.1:{serve_config['http_options']['port']}"]}]
    assert jobs["ray"]["file_sd_configs"]
