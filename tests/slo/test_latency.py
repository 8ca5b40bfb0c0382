from __future__ import annotations

import math
from typing import Any

import pytest

from slo.indicator import SpecError, indicators
from tests.memory_reader import MemoryReader
from tests.slo.fleet_of_samples import START, TTFT, WINDOW, Engine
from tracing.types import Grid, Span

latency = indicators()["latency"]


def grid(windows: int) -> Grid:
    return Grid(START, START + windows * WINDOW, 15)


def test_requests_at_or_under_the_threshold_are_good() -> None:
    reader = MemoryReader()
    Engine(reader).serve(90, 10, windows=2)
    spec = latency.clean({"metric": TTFT, "threshold_ms": 500})
    (share,) = latency.read(reader, service="chat", spec=spec, grid=grid(2))
    assert share.labels == {"instance": "engine-0"}
    assert (list(share.good), list(share.total)) == ([90, 90], [100, 100])


def test_a_window_without_samples_is_not_a_number() -> None:
    reader = MemoryReader()
    engine = Engine(reader)
    engine.serve(5, 0)
    engine.silence(windows=1)
    spec = latency.clean({"metric": TTFT, "threshold_ms": 500})
    (share,) = latency.read(reader, service="chat", spec=spec, grid=grid(2))
    assert share.total[0] == 5
    assert math.isnan(share.total[1])


@pytest.mark.parametrize("threshold_ms", [1_000, 1_000.0, 999.9999999999])
def test_an_edge_is_a_number_whatever_its_text(threshold_ms: float) -> None:
    reader = MemoryReader()
    Engine(reader).serve(1, 2)
    spec = latency.clean({"threshold_ms": threshold_ms})
    (share,) = latency.read(reader, service="chat", spec=spec, grid=grid(1))
    assert share.good == [3]


def test_a_threshold_between_edges_names_the_edges() -> None:
    reader = MemoryReader()
    Engine(reader).serve(1, 0)
    spec = latency.clean({"threshold_ms": 300})
    with pytest.raises(SpecError, match=r"threshold_ms=300.0: allowed: a bucket edge of .* 250, 5"):
        latency.read(reader, service="chat", spec=spec, grid=grid(1))


@pytest.mark.parametrize(
    ("spec", "counted"),
    [
        ({"metric": TTFT}, "requests"),
        ({"metric": "vllm:e2e_request_latency_seconds"}, "requests"),
        ({"metric": "vllm:request_time_per_output_token_seconds"}, "requests"),
        ({"metric": "vllm:inter_token_latency_seconds"}, "gaps between tokens"),
        ({"metric": "vllm:time_per_output_token_seconds"}, "gaps between tokens"),
        ({"metric": "engine:step_seconds"}, "measurements"),
        ({"source": "spans"}, "requests"),
        ({"source": "spans", "span": "prefill"}, "spans"),
    ],
)
def test_what_is_counted_has_a_name(spec: dict[str, Any], counted: str) -> None:
    unit = latency.unit(latency.clean({**spec, "threshold_ms": 500}))
    assert unit.many == unit.word(0) == unit.word(20) == counted
    assert unit.word(1.2) == unit.one != counted


def test_spans_count_by_duration() -> None:
    reader = MemoryReader()
    start_ns = int(START.timestamp() * 1e9)
    for index, duration_ms in enumerate([100, 500, 900]):
        reader.stored_spans.append(
            Span("t", str(index), "", "llm_request", 2, "chat", "engine-0", start_ns,
                 duration_ms * 1_000_000, 0)
        )  # fmt: skip
    spec = latency.clean({"source": "spans", "threshold_ms": 500})
    (share,) = latency.read(reader, service="chat", spec=spec, grid=grid(1))
    assert (share.good, share.total) == ([2], [3])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "threshold_ms=None: allowed: milliseconds"),
        ({"threshold_ms": 0}, "threshold_ms=0: allowed: milliseconds, more than 0"),
        ({"threshold_ms": True}, "threshold_ms=True"),
        ({"threshold_ms": 5, "source": "logs"}, "source='logs': allowed: metric, spans"),
        ({"threshold_ms": 5, "le": "1"}, "le='1': allowed: no such parameter, only metric, source"),
        (
            {"threshold_ms": 5, "metric": ""},
            "metric='': allowed: a name of 1 to 200 printable characters",
        ),
    ],
)
def test_a_wrong_spec_names_field_value_and_what_is_allowed(
    spec: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        latency.clean(spec)


def test_says_what_a_good_event_is() -> None:
    assert latency.describe(latency.clean({"threshold_ms": 500})) == "time to first token ≤ 500 ms"
    spans = {"source": "spans", "measure": "gen_ai.latency.e2e", "threshold_ms": 2_000}
    assert latency.describe(latency.clean(spans)) == "e2e ≤ 2000 ms"
