"""The tables, in ClickHouse SQL.

Partitions are days of *arrival*, not of event time: one insert is then one part, which is what
makes a batch atomic, and no sender can open a hundred partitions with odd timestamps.
Reads prune by the sort key. Retention drops whole days of arrival.

Duplicates (a batch sent again after a lost acknowledgement) share the sort key, so
ReplacingMergeTree drops them when parts merge; readers drop them before that with LIMIT 1 BY.
"""

from __future__ import annotations

# An acknowledged insert survives kill -9 and power loss.
_DURABLE = "fsync_after_insert = 1, fsync_part_directory = 1, ttl_only_drop_parts = 1"

# What repeats from span to span (attribute keys, the resource, as JSON) is stored as references:
# half the bytes to sort, compress and merge, which is what an insert costs.
_SPANS = """
CREATE TABLE IF NOT EXISTS spans (
    tenant LowCardinality(String),
    service LowCardinality(String),
    end DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)),
    trace_id FixedString(16) CODEC(ZSTD(1)),
    span_id FixedString(8) CODEC(ZSTD(1)),
    parent_span_id FixedString(8) CODEC(ZSTD(1)),
    name LowCardinality(String),
    kind UInt8,
    instance LowCardinality(String),
    node LowCardinality(String),
    start DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)),
    duration_ns UInt64 CODEC(T64, ZSTD(1)),
    status_code UInt8,
    status_message String CODEC(ZSTD(1)),
    attributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
    resource LowCardinality(String) CODEC(ZSTD(1)),
    arrived Date DEFAULT today(),
    INDEX by_trace trace_id TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree
PARTITION BY arrived
ORDER BY (tenant, service, end, trace_id, span_id)
TTL arrived + INTERVAL {retention_days} DAY
SETTINGS {durable}
"""

_SAMPLES = """
CREATE TABLE IF NOT EXISTS samples (
    tenant LowCardinality(String),
    metric LowCardinality(String),
    series UInt64,
    time DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    value Float64 CODEC(Gorilla, ZSTD(1)),
    arrived Date DEFAULT today()
) ENGINE = ReplacingMergeTree
PARTITION BY arrived
ORDER BY (tenant, metric, series, time)
TTL arrived + INTERVAL {retention_days} DAY
SETTINGS {durable}
"""

# `first` is the time of the oldest sample: what tells a new series from one with a gap.
_SERIES = """
CREATE TABLE IF NOT EXISTS series (
    tenant LowCardinality(String),
    metric LowCardinality(String),
    series UInt64,
    labels SimpleAggregateFunction(any, Map(String, String)),
    first SimpleAggregateFunction(min, DateTime64(3, 'UTC')),
    seen SimpleAggregateFunction(max, Date) DEFAULT today()
) ENGINE = AggregatingMergeTree
ORDER BY (tenant, metric, series)
TTL seen + INTERVAL {retention_days} DAY
SETTINGS {durable}
"""


def statements(retention_days: int) -> list[str]:
    """What creates the tables where they are missing and sets how long rows are kept."""
    if not 1 <= retention_days <= 3650:
        raise ValueError(f"retention_days={retention_days}, allowed: 1 to 3650")
    create = [
        table.format(retention_days=retention_days, durable=_DURABLE)
        for table in (_SPANS, _SAMPLES, _SERIES)
    ]
    # CREATE IF NOT EXISTS leaves an older table's TTL alone; stating it again is free.
    ttl = [
        f"ALTER TABLE {table} MODIFY TTL {column} + INTERVAL {retention_days} DAY"
        for table, column in (("spans", "arrived"), ("samples", "arrived"), ("series", "seen"))
    ]
    return create + ttl
