"""The store: parameters, threads, retention."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from tests.tracing.otlp import Metrics, send_metrics, send_spans, span, trace_request
from tracing.ingest import Door
from tracing.query import StoreReader
from tracing.store import schema
from tracing.store.store import Store, StoreError
from tracing.types import Grid

AWKWARD = ["", "a\tb", "a\nb", "\\", "\\'", "'", '"', "x' OR 1=1 --", "é\u0000z", "{a:String}"]


@pytest.mark.parametrize("text", AWKWARD)
def test_any_text_travels_as_a_parameter(store: Store, text: str) -> None:
    sql = "SELECT {one:String} AS one, {many:Array(String)} AS many"
    (row,) = store.query(sql, {"one": text, "many": [text, "z"]}).to_pylist()
    assert row == {"one": text, "many": [text, "z"]}


def test_numbers_travel_exactly(store: Store) -> None:
    sql = "SELECT {i:Int64} AS i, {f:Float64} AS f, {inf:Float64} AS inf"
    values = {"i": -(2**63), "f": 0.1, "inf": float("inf")}
    assert store.query(sql, values).to_pylist() == [values]


def test_what_the_store_refuses_is_said(store: Store) -> None:
    with pytest.raises(StoreError, match="UNKNOWN_TABLE"):
        store.query("SELECT * FROM nowhere")
    with pytest.raises(StoreError, match="nonsense"):
        store.insert("spans", pa.table({"nonsense": [1]}))


def test_retention_is_checked() -> None:
    with pytest.raises(ValueError, match="retention_days=0, allowed: 1 to 3650"):
        schema.statements(0)


def test_threads_never_see_each_others_parameters(store: Store) -> None:
    """chDB 4.4 mixes the parameters of queries that run at once; the store must not."""
    mixed: list[object] = []

    def ask(name: str) -> None:
        for i in range(50):
            sql = "SELECT {a:String} AS a, {b:Int64} AS b"
            (row,) = store.query(sql, {"a": name, "b": i}).to_pylist()
            if row != {"a": name, "b": i}:
                mixed.append(row)

    threads = [threading.Thread(target=ask, args=(f"tenant-{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == []


def test_readers_and_writers_share_the_store(
    door: Door, store: Store, tenant: str, reader: StoreReader
) -> None:
    now = datetime.now(UTC)
    grid = Grid(now - timedelta(minutes=1), now + timedelta(minutes=1), 120)
    stop = threading.Event()
    problems: list[BaseException] = []
    seen: list[float] = []

    def read() -> None:
        try:
            while not stop.is_set():
                shares = reader.span_share(
                    grid, service="chat", name="llm_request", measure="duration", threshold_s=9
                )
                seen.append(shares[0].total[0] if shares else 0)
                reader.spans(grid.start, grid.end, slowest=True)
                reader.increase("c", grid, by=["instance"])
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for batch in range(10):
        spans = [span(batch * 100 + i) for i in range(1, 51)]
        send_spans(door, tenant, *(trace_request(spans[i : i + 10]) for i in range(0, 50, 10)))
        send_metrics(door, tenant, Metrics().counter("c", now + timedelta(seconds=batch), batch))
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert seen == sorted(seen)
    (share,) = reader.span_share(
        grid, service="chat", name="llm_request", measure="duration", threshold_s=9
    )
    assert share.total == [500]
    assert reader.increase("c", grid)[0].values == [9]


def test_days_of_arrival_older_than_the_retention_are_dropped(
    door: Door, store: Store, tenant: str, reader: StoreReader
) -> None:
    send_spans(door, tenant, trace_request([span(1)]))
    columns = "tenant, service, end, trace_id, span_id, name, start"
    store.query(
        f"INSERT INTO spans ({columns}, arrived) SELECT tenant, service, end, trace_id, "
        "toFixedString('old-span', 8), name, start, today() - 31 FROM spans "
        "WHERE tenant = {tenant:String}",
        {"tenant": tenant},
    )
    store.query("OPTIMIZE TABLE spans FINAL")
    assert [s.span_id for s in reader.trace(f"{1:032x}")] == [f"{1:016x}"]
