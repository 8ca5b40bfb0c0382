"""The Reader over metrics: increase, gauge, histogram, last_seen."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from tests.tracing.otlp import CHAT, Metrics, send_metrics
from tracing.ingest import Door
from tracing.query import StoreReader
from tracing.series import THINNED_FROM_S
from tracing.types import Grid

NAN = math.nan
T0 = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=20)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def grid(start: float, end: float, step: float = 15) -> Grid:
    return Grid(at(start), at(end), step)


def same(found: Sequence[float], expected: Sequence[float]) -> bool:
    assert len(found) == len(expected)
    return all(
        math.isnan(a) if math.isnan(b) else a == pytest.approx(b)
        for a, b in zip(found, expected, strict=True)
    )


def counted(door: Door, tenant: str, values: dict[float, float], name: str = "c") -> None:
    send_metrics(door, tenant, *(Metrics().counter(name, at(t), v) for t, v in values.items()))


def test_increase_is_the_counters_own_growth(door: Door, tenant: str, reader: StoreReader) -> None:
    counted(door, tenant, {t: 2.0 * t for t in range(0, 61, 5)})
    (series,) = reader.increase("c", grid(0, 60))
    assert same(series.values, [30, 30, 30, 30])
    assert series.labels == {}


def test_windows_are_left_open(door: Door, tenant: str, reader: StoreReader) -> None:
    counted(door, tenant, {0: 1, 15: 10, 30: 100})
    (series,) = reader.increase("c", grid(0, 30))
    assert same(series.values, [9, 90])
    (series,) = reader.increase("c", grid(-0.001, 29.999))
    assert same(series.values, [NAN, 9])
    (gauge,) = reader.gauge("c", grid(0, 30))
    assert same(gauge.values, [10, 100])


def test_a_reset_counts_from_zero(door: Door, tenant: str, reader: StoreReader) -> None:
    counted(door, tenant, {0: 100, 5: 110, 10: 3, 15: 7, 20: 7})
    (series,) = reader.increase("c", grid(0, 30))
    assert same(series.values, [17, 0])


def test_resets_are_handled_before_series_are_summed(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    for t, a, b in ((0, 100, 1), (5, 2, 101), (10, 4, 102)):
        metrics = Metrics().counter("c", at(t), a, kind="a").counter("c", at(t), b, kind="b")
        send_metrics(door, tenant, metrics)
    (series,) = reader.increase("c", grid(0, 15))
    assert same(series.values, [4 + 101])
    by = {s.labels["kind"]: s.values for s in reader.increase("c", grid(0, 15), by=["kind"])}
    assert by == {"a": [4], "b": [101]}


def test_a_gap_is_booked_at_its_end(door: Door, tenant: str, reader: StoreReader) -> None:
    counted(door, tenant, {0: 0, 10: 10, 50: 70, 60: 75})
    (series,) = reader.increase("c", grid(0, 60))
    assert same(series.values, [10, NAN, NAN, 65])


def test_a_gap_longer_than_the_lookback_is_booked_too(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    counted(door, tenant, {0: 5, 600: 70, 610: 75})
    (series,) = reader.increase("c", grid(580, 610))
    assert same(series.values, [NAN, 70])
    (series,) = reader.increase("c", grid(595, 610))
    assert same(series.values, [70])


def test_a_family_first_seen_is_unknown_until_its_second_sample(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    counted(door, tenant, {5: 1000, 20: 1010})
    (series,) = reader.increase("c", grid(0, 30))
    assert same(series.values, [NAN, 10])


def test_a_new_series_of_a_known_family_counts_from_zero(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    for t in (5, 20):
        metrics = Metrics().counter("c", at(t), 100, reason="stop")
        if t == 20:
            metrics.counter("c", at(t), 3, reason="abort")
        send_metrics(door, tenant, metrics)
    found = reader.increase("c", grid(0, 30), by=["reason"])
    assert [s.labels["reason"] for s in found] == ["abort", "stop"]
    assert same(found[0].values, [NAN, 3])
    assert same(found[1].values, [NAN, 0])
    # Whether the family is known does not depend on what is asked for.
    (only,) = reader.increase("c", grid(0, 30), where={"reason": "abort"})
    assert same(only.values, [NAN, 3])


def test_a_new_source_is_unknown_although_others_were_known(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    counted(door, tenant, {0: 1, 20: 2})
    second = Metrics({**CHAT, "service.instance.id": "engine-1"})
    send_metrics(door, tenant, second.counter("c", at(20), 50_000))
    found = reader.increase("c", grid(0, 30), by=["instance"])
    assert same(found[0].values, [NAN, 1])
    assert same(found[1].values, [NAN, NAN])


def test_late_samples_take_their_place(door: Door, tenant: str, reader: StoreReader) -> None:
    counted(door, tenant, {10: 20, 0: 0, 20: 30, 5: 10})
    (series,) = reader.increase("c", grid(0, 30))
    assert same(series.values, [20, 10])


def test_where_matches_labels_exactly_and_le_as_a_number(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    for t, n in ((0, 0), (5, 4)):
        send_metrics(door, tenant, Metrics().histogram("h", at(t), [0.5, 1], [n, n, 0], n))
    for le, expected in (("0.5", 4), ("5e-1", 4), ("0.50", 4), ("1", 8), ("+Inf", 8)):
        (series,) = reader.increase("h_bucket", grid(0, 15), where={"le": le})
        assert same(series.values, [expected])
    assert reader.increase("h_bucket", grid(0, 15), where={"le": "0.7"}) == []
    everything = {"service": "chat", "instance": "engine-0", "node": "node-0"}
    assert len(reader.increase("h_count", grid(0, 15), where=everything)) == 1
    assert reader.increase("h_count", grid(0, 15), where={"node": "node"}) == []
    assert reader.increase("h_count", grid(0, 15), where={"x' OR '1": "\\'\n\t"}) == []


def test_labels_of_the_resource_win_over_labels_of_the_point(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    send_metrics(door, tenant, Metrics().gauge("g", at(5), 1, service="mine", model="m"))
    by = ["service", "exported_service", "model", "absent"]
    (series,) = reader.gauge("g", grid(0, 15), by=by)
    assert series.labels == {
        "service": "chat",
        "exported_service": "mine",
        "model": "m",
        "absent": "",
    }


@pytest.mark.parametrize(
    ("over", "expected"), [("avg", 50), ("max", 57), ("min", 43), ("last", 52)]
)
def test_a_gauge_is_reduced_per_series_then_summed(
    door: Door, tenant: str, reader: StoreReader, over: str, expected: float
) -> None:
    for t, a, b in ((2, 5, 40), (6, 3, 50), (10, 7, 45)):
        metrics = Metrics().gauge("g", at(t), a, k="a").gauge("g", at(t), b, k="b")
        send_metrics(door, tenant, metrics)
    (series,) = reader.gauge("g", grid(0, 30), over=over)
    assert same(series.values, [expected, NAN])
    assert series.last() == expected


def test_an_unknown_reduction_is_refused(reader: StoreReader) -> None:
    with pytest.raises(ValueError, match="over='median', allowed: avg, max, min, last"):
        reader.gauge("g", grid(0, 15), over="median")


def test_a_histogram_is_split_into_buckets(door: Door, tenant: str, reader: StoreReader) -> None:
    for t, n in ((0, 0), (5, 1), (20, 3)):
        counts = [n, 2 * n, 3 * n]
        send_metrics(door, tenant, Metrics().histogram("h", at(t), [0.1, 1], counts, 5.0 * n))
    (found,) = reader.histogram("h", grid(0, 45), by=["instance"])
    assert found.labels == {"instance": "engine-0"}
    assert list(found.bounds) == [0.1, 1.0]
    assert found.counts[0] == [1, 2, 3]
    assert found.counts[1] == [2, 4, 6]
    assert same(found.counts[2], [NAN, NAN, NAN])
    assert same(found.sums, [5, 10, NAN])


def test_histograms_with_different_bounds_meet_at_those_they_share(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    for t, n in ((0, 0), (5, 1)):
        metrics = Metrics().histogram("h", at(t), [0.1, 1, 2], [n, n, n, n], n, model="a")
        metrics.histogram("h", at(t), [1, 5], [n, n, n], n, model="b")
        send_metrics(door, tenant, metrics)
    (found,) = reader.histogram("h", grid(0, 15))
    assert list(found.bounds) == [1.0]
    assert found.counts == [[3, 4]]
    assert len(reader.histogram("h", grid(0, 15), by=["model"])) == 2


def test_a_histogram_is_not_asked_for_by_bucket(reader: StoreReader) -> None:
    with pytest.raises(ValueError, match="'le'"):
        reader.histogram("h", grid(0, 15), where={"le": "1"})


def test_nothing_known_is_an_empty_answer(reader: StoreReader) -> None:
    assert reader.increase("c", grid(0, 60)) == []
    assert reader.gauge("c", grid(0, 60)) == []
    assert reader.histogram("c", grid(0, 60)) == []
    assert reader.last_seen(["c"]) == {}


def test_last_seen_is_the_newest_sample_within_an_hour(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    send_metrics(door, tenant, Metrics().gauge("g", at(3), 1).gauge("g", at(1), 1))
    send_metrics(door, tenant, Metrics().histogram("h", at(7), [1], [1, 1], 1))
    send_metrics(door, tenant, Metrics().gauge("old", at(-3600), 1))
    other = Metrics({**CHAT, "service.instance.id": "engine-1"})
    send_metrics(door, tenant, other.gauge("g", at(5), 1))
    both = {"engine-0": at(3), "engine-1": at(5)}
    assert reader.last_seen(["g"]) == {"g": both}
    assert reader.last_seen(["g", "h"]) == {"g": both, "h": {"engine-0": at(7)}}
    assert reader.last_seen(["g"], where={"instance": "engine-0"}) == {"g": {"engine-0": at(3)}}
    assert reader.last_seen(["g"], where={"service": "nobody"}) == {}
    assert reader.last_seen(["old"]) == {}


def test_a_sample_from_a_clock_ahead_is_not_seen_before_its_time(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    metrics = Metrics().gauge("g", now - timedelta(minutes=2), 1)
    send_metrics(door, tenant, metrics.gauge("g", now + timedelta(minutes=5), 1))
    assert reader.last_seen(["g"]) == {"g": {"engine-0": now - timedelta(minutes=2)}}


def test_wide_windows_are_exact_although_few_samples_leave_the_store(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    draw = random.Random(7)
    total, values = 100.0, {}
    for t in range(-200, 900, 5):
        total = draw.choice([0.0, 3.0]) if draw.random() < 0.05 else total + draw.randrange(4)
        if draw.random() > 0.1:
            values[float(t)] = total
    counted(door, tenant, values)
    (narrow,) = reader.increase("c", grid(0, 900, 15))
    (wide,) = reader.increase("c", grid(0, 900, 60))
    steps = [0.0 if math.isnan(v) else v for v in narrow.values]
    assert same(wide.values, [sum(steps[i : i + 4]) for i in range(0, 60, 4)])
    assert THINNED_FROM_S <= 60
