"""The questions asked of the store. Values are always parameters; only column names, chosen from
the tables below, are ever put into the text."""

# ruff: noqa: S608 - see above: no value ever becomes text
from __future__ import annotations

from collections.abc import Sequence

from tracing.store.store import Parameter
from tracing.types import Labels

LABELS = "/*labels*/"  # the place of a condition made by `where`

_OF_METRICS = "metric IN {metrics:Array(String)}"

_SERIES_OF_METRIC = f"""
    SELECT metric, series, any(labels) AS labels, min(first) AS first FROM series
    WHERE tenant = {{tenant:String}} AND {_OF_METRICS}
    GROUP BY metric, series"""

# `known` looks at all series of a source, whatever the label condition selects of them.
CATALOGUE = (
    "SELECT metric, series, labels, toUnixTimestamp64Milli(first) AS first_ms,"
    " toUnixTimestamp64Milli(known) AS known_ms FROM ("
    "  SELECT metric, series, labels, first, min(first) OVER ("
    "    PARTITION BY metric, labels['service'], labels['instance'], labels['node']) AS known"
    "  FROM (" + _SERIES_OF_METRIC + ")) WHERE " + LABELS
)

_SELECTED = "tenant = {tenant:String} AND " + _OF_METRICS + " AND " + LABELS
_WITH_LABELS = "series IN (SELECT series FROM (" + _SERIES_OF_METRIC + ") WHERE {})"

SAMPLES = (
    "SELECT series, toUnixTimestamp64Milli(time) AS time_ms, value,"
    # Of (start + w step, start + (w + 1) step], w below 0 before the grid starts.
    " floor((time_ms - {start_ms:Int64} - 1) / {step_ms:Int64}) AS w FROM samples WHERE "
    + _SELECTED
    + " AND time > fromUnixTimestamp64Milli({after_ms:Int64}, 'UTC')"
    " AND time <= fromUnixTimestamp64Milli({until_ms:Int64}, 'UTC')"
    " ORDER BY series, time LIMIT 1 BY series, time"
)

SAMPLES_AHEAD = SAMPLES + " LIMIT {most:UInt64}"

# How the samples of one series and window become one.
_OVERS = {
    "avg": "avg(value)",
    "max": "max(value)",
    "min": "min(value)",
    "last": "argMax(value, time_ms)",
}

# A day of charts is millions of samples and a few hundred windows: what leaves the store is what
# the answer depends on.
GAUGES = {
    over: f"SELECT series, max(time_ms) AS newest_ms, {value} AS reduced FROM ("
    + SAMPLES
    + ") GROUP BY series, w ORDER BY series, newest_ms"
    for over, value in _OVERS.items()
}

# Between two resets a counter's steps add up to its last value less its first, so these tell the
# growth of every window exactly: the first sample, the last of each window, both sides of a reset.
COUNTERS = (
    "SELECT series, time_ms, value FROM (SELECT series, time_ms, value, w,"
    " lagInFrame(value, 1, inf) OVER near AS previous,"
    " leadInFrame(value, 1, value) OVER near AS next,"
    " leadInFrame(w, 1, inf) OVER near AS next_w FROM (" + SAMPLES + ")"
    " WINDOW near AS (PARTITION BY series ORDER BY time_ms"
    " ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING))"
    " WHERE value < previous OR next < value OR w != next_w ORDER BY series, time_ms"
)

PREDECESSORS = (
    "SELECT series, argMax(value, time) AS last_value FROM samples WHERE "
    + _SELECTED
    + " AND time <= fromUnixTimestamp64Milli({until_ms:Int64}, 'UTC') GROUP BY series"
)

LAST_SEEN = (
    "SELECT metric, labels['instance'] AS instance,"
    " toUnixTimestamp64Milli(max(newest)) AS newest_ms FROM ("
    "  SELECT series, max(time) AS newest FROM samples"
    "  WHERE tenant = {tenant:String} AND " + _OF_METRICS + " "
    "  AND time > fromUnixTimestamp64Milli({since_ms:Int64}, 'UTC')"
    "  AND time <= fromUnixTimestamp64Milli({now_ms:Int64}, 'UTC') GROUP BY series"
    ") AS heard INNER JOIN (" + _SERIES_OF_METRIC + ") AS known USING series"
    " WHERE " + LABELS + " GROUP BY metric, instance"
)

SPAN_COLUMNS = """
    lower(hex(trace_id)) AS trace_id,
    lower(hex(span_id)) AS span_id,
    if(parent_span_id = toFixedString('', 8), '', lower(hex(parent_span_id))) AS parent_span_id,
    name, kind, service, instance,
    toUnixTimestamp64Nano(start) AS start_ns, duration_ns, status_code, status_message,
    attributes, resource"""

TRACE = f"""
SELECT {SPAN_COLUMNS} FROM (
    SELECT * FROM spans
    WHERE tenant = {{tenant:String}} AND trace_id = unhex({{trace_id:String}})
    ORDER BY start, span_id LIMIT 1 BY span_id LIMIT {{limit:UInt32}}
) ORDER BY start_ns, span_id
"""

_IN_TIME = (
    "tenant = {tenant:String}"
    " AND end > fromUnixTimestamp64Nano({start_ns:Int64}, 'UTC')"
    " AND end <= fromUnixTimestamp64Nano({end_ns:Int64}, 'UTC')"
)

SPAN_LAST_SEEN = (
    "SELECT instance, toUnixTimestamp64Milli(toDateTime64(max(end), 3, 'UTC')) AS newest_ms"
    f" FROM spans WHERE {_IN_TIME} AND service = {{service:String}} AND name = {{name:String}}"
    " GROUP BY instance"
)

_SPAN_LABELS = ("service", "instance", "node", "name")


def labelled(text: str, labels: Labels, column: str) -> tuple[str, dict[str, Parameter]]:
    """`text` with its LABELS condition filled in, and the parameters of that.

    `column` is "labels" where the text has that column, "series" where it has ids only. `le` is
    compared as a number: 0.5, 0.50 and 5e-1 are one bound. Raises ValueError for an `le` that is
    none.
    """
    conditions = []
    parameters: dict[str, Parameter] = {}
    for i, (key, value) in enumerate(sorted(labels.items())):
        parameters[f"k{i}"] = key
        if key == "le":
            parameters[f"v{i}"] = float(value)
            conditions.append(f"toFloat64OrNull(labels[{{k{i}:String}}]) = {{v{i}:Float64}}")
        else:
            parameters[f"v{i}"] = value
            conditions.append(f"labels[{{k{i}:String}}] = {{v{i}:String}}")
    condition = " AND ".join(conditions) or "1"
    if conditions and column == "series":
        condition = _WITH_LABELS.replace("{}", condition)
    return text.replace(LABELS, condition), parameters


def of_all_metrics(text: str) -> str:
    """`text`, already labelled, without its condition on metrics."""
    return text.replace(_OF_METRICS, "1")


def _measured(measure: str) -> tuple[str, dict[str, Parameter]]:
    """Seconds of a span by `measure`, NULL where it has none: NaN and infinity are none."""
    if measure == "duration":
        return "toNullable(duration_ns / 1e9)", {}
    seconds = "toFloat64OrNull(attributes[{measure:String}])"
    return f"if(isFinite({seconds}), {seconds}, NULL)", {"measure": measure}


def _label(label: str, i: int) -> tuple[str, dict[str, Parameter]]:
    if label in _SPAN_LABELS:
        return f"toString({label})", {}
    key = f"{{by{i}:String}}"
    own = f"mapContains(attributes, {key}), attributes[{key}]"
    return f"if({own}, JSONExtractString(resource, {key}))", {f"by{i}": label}


def span_share(measure: str, by: Sequence[str]) -> tuple[str, dict[str, Parameter]]:
    """Rows (key, w, good, total): window w of spans that ended in it, grouped by labels."""
    parameters: dict[str, Parameter] = {}
    seconds = "toNullable(0.0)"
    good = "status_code != 2"  # Status.StatusCode.ERROR
    if measure != "status":
        seconds, parameters = _measured(measure)
        good = "seconds <= {threshold:Float64}"
    keys = []
    for i, label in enumerate(by):
        text, found = _label(label, i)
        keys.append(text)
        parameters |= found
    key = f"[{', '.join(keys)}]" if keys else "CAST([], 'Array(String)')"
    text = f"""
SELECT key, w, countIf({good}) AS good, count() AS total FROM (
    SELECT {key} AS key, {seconds} AS seconds, status_code, trace_id, span_id,
        least(intDiv(toUnixTimestamp64Nano(end) - {{start_ns:Int64}} - 1, {{step_ns:Int64}}),
              {{windows:Int64}} - 1) AS w
    FROM spans
    WHERE {_IN_TIME} AND service = {{service:String}} AND name = {{name:String}}
    LIMIT 1 BY trace_id, span_id
) WHERE seconds IS NOT NULL GROUP BY key, w
"""
    return text, parameters


def _filtered(filters: Labels) -> tuple[str, dict[str, Parameter]]:
    assert all(column in _SPAN_LABELS for column in filters)
    conditions = [f"{column} = {{{column}:String}}" for column in filters]
    return " AND ".join([_IN_TIME, *conditions]), dict(filters)


def spans(filters: Labels, slowest_by: str | None) -> tuple[str, dict[str, Parameter]]:
    """Newest spans first, or slowest first by a measure; `filters` are columns of the table."""
    condition, parameters = _filtered(filters)
    order = "end"
    if slowest_by is not None:
        order, found = _measured(slowest_by)
        parameters |= found
        condition += f" AND {order} IS NOT NULL"
    # The keys first, so that only `limit` rows are read with their maps.
    text = f"""
SELECT {SPAN_COLUMNS} FROM (
    SELECT *, {order} AS rank FROM spans
    WHERE {condition} AND (service, end, trace_id, span_id) IN (
        SELECT service, end, trace_id, span_id FROM spans WHERE {condition}
        ORDER BY {order} DESC, trace_id, span_id LIMIT 1 BY trace_id, span_id
        LIMIT {{limit:UInt32}}
    ) ORDER BY rank DESC, trace_id, span_id LIMIT 1 BY trace_id, span_id
) ORDER BY rank DESC, trace_id, span_id
"""
    return text, parameters
