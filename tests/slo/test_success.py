from __future__ import annotations

import math
from typing import Any

import pytest

from slo.indicator import SpecError, indicators
from tests.memory_reader import MemoryReader
from tests.slo.fleet_of_samples import START, WINDOW
from tracing.types import Grid, ShareSeries

success = indicators()["success"]
DONE, FAILED = "vllm:request_success_total", "engine:requests_failed_total"
REJECTED = "vllm:admission_rejections_total"


def grow(reader: MemoryReader, metric: str, by: float, **labels: str) -> None:
    for at, value in ((START, 0.0), (START + WINDOW, by)):
        reader.add(metric, at, value, {"instance": "engine-0", "service": "chat", **labels})


def read(reader: MemoryReader, **spec: Any) -> list[ShareSeries]:
    grid = Grid(START, START + WINDOW, 15)
    return success.read(reader, service="chat", spec=success.clean(spec), grid=grid)


def test_what_is_counted_has_a_name() -> None:
    for spec, counted in (
        ({}, "requests"), ({"source": "spans"}, "requests"),
        ({"source": "spans", "span": "tool"}, "spans"),
    ):  # fmt: skip
        assert success.unit(success.clean(spec)).many == counted


def test_failed_and_rejected_requests_are_bad() -> None:
    reader = MemoryReader()
    grow(reader, DONE, 80, finished_reason="stop")
    grow(reader, DONE, 10, finished_reason="length")
    grow(reader, FAILED, 4)
    grow(reader, REJECTED, 6, reason="queue_full")
    (share,) = read(reader)
    assert (share.good, share.total) == ([90], [100])


def test_an_error_series_that_never_existed_is_no_errors() -> None:
    reader = MemoryReader()
    grow(reader, DONE, 50, finished_reason="stop")
    (share,) = read(reader)
    assert (share.good, share.total) == ([50], [50])


def test_nothing_but_errors_is_all_bad() -> None:
    reader = MemoryReader()
    grow(reader, FAILED, 7)
    (share,) = read(reader)
    assert (share.good, share.total) == ([0], [7])


def test_nothing_measured_is_not_zero() -> None:
    assert read(MemoryReader()) == []
    reader = MemoryReader()
    stopped = {"instance": "e", "service": "chat", "finished_reason": "stop"}
    reader.add(DONE, START, 5, stopped)
    reader.add(FAILED, START + WINDOW, 5, {"instance": "f", "service": "chat"})
    shares = {s.labels["instance"]: s for s in read(reader)}
    assert all(math.isnan(t) for i, s in shares.items() if i == "e" for t in s.total)


def test_a_client_that_hung_up_is_no_event_unless_said_so() -> None:
    reader = MemoryReader()
    grow(reader, DONE, 50, finished_reason="stop")
    grow(reader, DONE, 5, finished_reason="abort")
    assert read(reader)[0].total == [50]
    share = read(reader, bad_reasons=["abort"])[0]
    assert (share.good, share.total) == ([50], [55])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"good_reasons": []}, r"good_reasons=\[\]: allowed: a list of 1 to 8 names"),
        ({"bad_reasons": ["stop"]}, r"bad_reasons=.*reasons that are not good ones: \['stop'\]"),
        ({"bad_metrics": []}, r"bad_metrics=\[\]: allowed: at least one, or one of bad_reasons"),
        ({"source": "spans", "metric": "x"}, "metric='x': allowed: no such parameter"),
    ],
)
def test_a_wrong_spec_names_field_value_and_what_is_allowed(
    spec: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        success.clean(spec)
