"""A reader that has read ahead answers as one that asks the store each time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.tracing.otlp import CHAT, Metrics, send_metrics
from tracing import series
from tracing.ingest import Door
from tracing.query import StoreReader
from tracing.store.store import Parameter, Store
from tracing.types import Grid, Reader

T0 = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=20)
ONE = {"service": "chat", "instance": "engine-0"}


class Counted:
    """The store, counting what it is asked."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asked = 0

    def insert(self, table: str, rows: Any) -> None:
        raise AssertionError("a reader writes nothing")

    def query(self, sql: str, parameters: Mapping[str, Parameter] | None = None) -> Any:
        self.asked += 1
        return self.store.query(sql, parameters)

    def close(self) -> None:
        raise AssertionError("a reader closes nothing")


@pytest.fixture
def counted(store: Store) -> Counted:
    return Counted(store)


@pytest.fixture
def plain(counted: Counted, door: Door, tenant: str) -> StoreReader:
    """Over ten minutes of two engines: scrapes lost, counters reset, one that begins half-way."""
    draw = random.Random(3)
    for engine in ("engine-0", "engine-1"):
        total, buckets = 100.0, [5, 1, 0]
        page = Metrics({**CHAT, "service.instance.id": engine})
        for second in range(0, 600, 5):
            now = at(second)
            total = 0.0 if draw.random() < 0.05 else total + draw.randrange(9)
            buckets = [count + draw.randrange(3) for count in buckets]
            if draw.random() < 0.1:
                continue
            page.counter("c", now, total, reason="stop")
            page.gauge("g", now, draw.random())
            page.histogram("h", now, [0.1, 1.0], buckets, total, phase="decode")
            if second > 300:
                page.counter("c", now, second - 300, reason="length")
        send_metrics(door, tenant, page, page)
    return StoreReader(counted, tenant)


def at(second: float) -> datetime:
    return T0 + timedelta(seconds=second)


def answers(reader: Reader, grid: Grid, where: Mapping[str, str]) -> str:
    """In words, where NaN equals itself."""
    found = [reader.increase("c", grid, where=where, by=by) for by in ((), ("reason",))]
    levels = [reader.gauge("g", grid, where=where, over=o) for o in ("max", "min", "last")]
    (mean,) = reader.gauge("g", grid, where=where)
    nothing = [reader.gauge("absent", grid, where=where), reader.increase("g_", grid, where=where)]
    histograms = [reader.histogram("h", grid, where=where, by=by) for by in ((), ("phase",))]
    return repr((found, levels, [f"{v:.9g}" for v in mean.values], nothing, histograms))


def test_what_was_read_ahead_is_answered_alike_and_not_asked_again(
    plain: StoreReader, counted: Counted
) -> None:
    reader = plain.ahead(Grid(at(0), at(600), 15), where=ONE)
    for grid in (
        Grid(at(300), at(600), 15), Grid(at(310), at(450), 5), Grid(at(400), at(590), 1),
        Grid(at(30), at(590), 70),
    ):  # fmt: skip
        expected, before = answers(plain, grid, ONE), counted.asked
        assert answers(reader, grid, ONE) == expected
        assert counted.asked == before


@pytest.mark.parametrize(
    ("start", "end", "where"),
    [(-60, 60, ONE), (500, 640, ONE), (100, 200, {"service": "chat"}), (100, 200, {})],
)
def test_what_lies_beyond_is_asked_of_the_store(
    plain: StoreReader, start: float, end: float, where: Mapping[str, str]
) -> None:
    reader = plain.ahead(Grid(at(0), at(600), 15), where=ONE)
    grid = Grid(at(start), at(end), 15)
    assert answers(reader, grid, where) == answers(plain, grid, where)


@pytest.mark.parametrize(("limit", "most"), [("AHEAD_SAMPLES_MAX", 100), ("AHEAD_SERIES_MAX", 3)])
def test_too_much_to_hold_is_asked_of_the_store(
    plain: StoreReader, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(series, limit, most)
    grid = Grid(at(300), at(600), 15)
    assert answers(plain.ahead(grid, where=ONE), grid, ONE) == answers(plain, grid, ONE)


def test_nothing_ahead_is_an_empty_answer(plain: StoreReader) -> None:
    reader = plain.ahead(Grid(at(0), at(60), 15), where={"service": "nobody"})
    assert reader.gauge("g", Grid(at(0), at(60), 15), where={"service": "nobody"}) == []


def test_some_metrics_are_read_ahead_and_the_others_asked_for(
    plain: StoreReader, counted: Counted
) -> None:
    grid = Grid(at(300), at(600), 15)
    reader = plain.ahead(grid, where=ONE, metrics=("c", "h"))
    expected, asked = answers(plain, grid, ONE), counted.asked
    reader.increase("c", grid, where=ONE)
    reader.histogram("h", grid, where=ONE, by=("phase",))
    assert counted.asked == asked
    assert answers(reader, grid, ONE) == expected


def test_a_look_goes_on_from_the_one_before(plain: StoreReader, counted: Counted) -> None:
    """Who holds now against long ago reads both, and not what lies between."""
    then, now = Grid(at(30), at(90), 15), Grid(at(500), at(600), 15)
    reader = plain.ahead(then, where=ONE).ahead(now, where=ONE)
    expected, asked = [answers(plain, grid, ONE) for grid in (then, now)], counted.asked
    assert [answers(reader, grid, ONE) for grid in (then, now)] == expected
    assert counted.asked == asked


def test_of_what_is_not_there_no_samples_are_asked(plain: StoreReader, counted: Counted) -> None:
    grid, asked = Grid(at(0), at(600), 15), counted.asked
    assert plain.gauge("absent", grid, where=ONE) == []
    assert plain.increase("absent", grid, where=ONE) == []
    assert plain.histogram("absent", grid, where=ONE) == []
    assert counted.asked == asked + 3


def test_the_same_look_is_taken_once(plain: StoreReader) -> None:
    grid = Grid(at(300), at(600), 15)
    assert plain.ahead(grid, where=ONE) is plain.ahead(grid, where=dict(ONE))
    assert plain.ahead(grid, where=ONE) is not plain.ahead(grid, where=ONE, metrics=("c",))
