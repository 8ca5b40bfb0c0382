"""Which requests there were: the list of traces and the heat map of how long they took.

A request is told by its entry span: one without a parent, or of kind SERVER (its caller may trace
elsewhere). A trace with several counts once, by the longest of them.
"""

# ruff: noqa: S608 - values are parameters; only the columns and conditions below become text
from __future__ import annotations

from collections.abc import Sequence

from tracing.store.store import Parameter
from tracing.types import Place, TraceSearch

TRACES_MAX = 200
CELLS_MAX = 20_000
REQUEST_ID = "gen_ai.request.id"  # OpenTelemetry has none; vLLM's name for it


def traces(
    columns: str, search: TraceSearch, *, slowest: bool, after: Place | None
) -> tuple[str, dict[str, Parameter]]:
    """The entry spans of the requests, newest or slowest first; needs tenant, times and limit."""
    entries, parameters = _entries(search)
    rank = "duration_ns" if slowest else "toUnixTimestamp64Nano(end)"
    beyond = ""
    if after is not None:
        beyond = (
            f" WHERE {rank} < {{rank_ns:UInt64}} OR"
            f" ({rank} = {{rank_ns:UInt64}} AND trace_id > unhex({{after_id:String}}))"
        )
        parameters |= {"rank_ns": after.rank_ns, "after_id": after.trace_id}
    # The keys first, so that only `limit` rows are read with their maps.
    text = f"""
SELECT {columns} FROM (
    SELECT *, {rank} AS rank FROM spans
    WHERE {{tenant:String}} = tenant AND (service, end, trace_id, span_id) IN (
        SELECT service, end, trace_id, span_id FROM ({entries}){beyond}
        ORDER BY {rank} DESC, trace_id LIMIT {{limit:UInt32}}
    ) ORDER BY rank DESC, trace_id LIMIT 1 BY trace_id, span_id
) ORDER BY rank DESC, trace_id
"""
    return text, parameters


def heat(search: TraceSearch, bounds_ns: Sequence[int]) -> tuple[str, dict[str, Parameter]]:
    """Rows (w, b, count, failed) of the requests; needs tenant, times, step_ns and windows."""
    entries, parameters = _entries(search)
    text = f"""
SELECT least(intDiv(toUnixTimestamp64Nano(end) - {{start_ns:Int64}} - 1, {{step_ns:Int64}}),
             {{windows:Int64}} - 1) AS w,
    arrayCount(bound -> toUInt64(bound) < duration_ns, {{bounds:Array(String)}}) AS b,
    count() AS count, countIf(status_code = 2) AS failed
FROM ({entries}) GROUP BY w, b ORDER BY w, b LIMIT {CELLS_MAX}
"""
    return text, parameters | {"bounds": [str(bound) for bound in bounds_ns]}


def _entries(search: TraceSearch) -> tuple[str, dict[str, Parameter]]:
    """One row a request: the keys of its entry span, how long it took and how it ended."""
    conditions = [
        "tenant = {tenant:String}",
        "end > fromUnixTimestamp64Nano({start_ns:Int64}, 'UTC')",
        "end <= fromUnixTimestamp64Nano({end_ns:Int64}, 'UTC')",
        "(kind = 2 OR parent_span_id = toFixedString('', 8))",
    ]
    parameters: dict[str, Parameter] = {}
    if search.service is not None:
        conditions.append("service = {service:String}")
        parameters["service"] = search.service
    if search.longer_s > 0:
        conditions.append("duration_ns > {longer_ns:UInt64}")
        parameters["longer_ns"] = round(search.longer_s * 1e9)
    if search.until_s is not None:
        conditions.append("duration_ns <= {until_ns:UInt64}")
        parameters["until_ns"] = round(search.until_s * 1e9)
    if search.failed is not None:
        conditions.append(f"status_code {'=' if search.failed else '!='} 2")  # StatusCode.ERROR
    if search.text:
        conditions.append(
            f"(positionCaseInsensitiveUTF8(attributes['{REQUEST_ID}'], {{text:String}}) > 0"
            " OR startsWith(lower(hex(trace_id)), lower({text:String})))"
        )
        parameters["text"] = search.text
    return (
        "SELECT service, end, trace_id, span_id, duration_ns, status_code FROM spans"
        f" WHERE {' AND '.join(conditions)} ORDER BY duration_ns DESC, span_id LIMIT 1 BY trace_id"
    ), parameters
