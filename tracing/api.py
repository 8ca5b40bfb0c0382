"""REST of telemetry, read-only: requests and their spans, and series over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.http import Http404
from django.urls import path
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import ApiError, request_tenant
from controlplane.accounts.rest import (
    ListQuery,
    Page,
    Query,
    Shape,
    choice,
    cursor_make,
    cursor_read,
    documented,
    invalid,
    list_of,
    listed,
    moment,
    text,
)
from tracing import query
from tracing.search import TRACES_MAX
from tracing.types import (
    Grid,
    HistogramSeries,
    Place,
    Reader,
    Series,
    Span,
    StoreError,
    TraceSearch,
)

RANGE_DEFAULT = timedelta(hours=1)
SEARCH_RANGE_MAX = timedelta(days=7)
CLOCK_AHEAD_MAX = timedelta(days=1)
STEP_S_DEFAULT = 15.0
WINDOWS_MAX = 2_000
SERIES_MAX = 500
LABELS_MAX = 8
HOUR_MS = 3_600_000.0
STATUS = {0: "unset", 1: "ok", 2: "error"}  # OpenTelemetry's Status.StatusCode


class TraceQuery(ListQuery):
    service = text()
    min_duration_ms = serializers.FloatField(required=False, min_value=0, max_value=24 * HOUR_MS)
    max_duration_ms = serializers.FloatField(required=False, min_value=0, max_value=24 * HOUR_MS)
    status = choice(["ok", "error"], help_text="ok: did not end in an error")
    id = text(help_text="part of the request id, or the beginning of the trace id")
    since = moment(help_text="ended after; an hour ago without it, at most 7 days before `until`")
    until = moment(help_text="ended at or before; now without it")
    order = serializers.ChoiceField(choices=["newest", "slowest"], default="newest")


class SeriesQuery(Query):
    metric = serializers.CharField(max_length=200, help_text="a histogram's without _bucket")
    kind = serializers.ChoiceField(
        choices=["gauge", "increase", "histogram"],
        default="gauge",
        help_text="increase: growth of a counter in each window",
    )
    over = serializers.ChoiceField(
        choices=["avg", "max", "min", "last"], default="avg", help_text="gauges: within a window"
    )
    service = text()
    instance = text(help_text="the engine's name")
    node = text()
    where = text(help_text="further labels: name=value, separated by commas")
    by = text(help_text="labels to keep, separated by commas; the rest is added up")
    since = moment(help_text="an hour before `until` without it")
    until = moment(help_text="now without it")
    step_s = serializers.FloatField(default=STEP_S_DEFAULT, min_value=1, max_value=86_400)


class TraceShape(Shape):
    """A request, told by its entry span."""

    trace_id = serializers.CharField()
    name = serializers.CharField(allow_blank=True)
    service = serializers.CharField(allow_blank=True)
    instance = serializers.CharField(allow_blank=True)
    started_at = serializers.SerializerMethodField()
    duration_s = serializers.SerializerMethodField()
    status = serializers.SerializerMethodField(help_text="unset, ok or error")
    status_message = serializers.CharField(allow_blank=True)
    attributes = serializers.DictField(child=serializers.CharField(allow_blank=True))

    def get_started_at(self, span: Span) -> datetime:
        return datetime.fromtimestamp(span.start_ns / 1e9, UTC)

    def get_duration_s(self, span: Span) -> float:
        return span.duration_ns / 1e9

    def get_status(self, span: Span) -> str:
        return STATUS.get(span.status_code, "unset")


class SpanShape(TraceShape):
    span_id = serializers.CharField()
    parent_span_id = serializers.CharField(allow_blank=True, help_text="empty at the root")
    kind = serializers.IntegerField(help_text="OpenTelemetry's SpanKind")
    resource = serializers.DictField()


class TraceWholeShape(Shape):
    trace_id = serializers.CharField()
    spans = SpanShape(many=True, help_text="by start; at most 10,000")


class SeriesShape(Shape):
    """One value a window, null where nothing was measured; a histogram has counts a bucket."""

    labels = serializers.DictField(child=serializers.CharField(allow_blank=True))
    values = serializers.ListField(
        child=serializers.FloatField(allow_null=True), required=False, help_text="but histograms"
    )
    bounds = serializers.ListField(child=serializers.FloatField(), required=False)
    counts = serializers.ListField(
        child=serializers.ListField(child=serializers.FloatField(allow_null=True)),
        required=False,
        help_text="per window, per bucket; the last is above the last bound",
    )
    sums = serializers.ListField(child=serializers.FloatField(allow_null=True), required=False)


class SeriesListShape(Shape):
    """Window i is (since + i · step_s, since + (i + 1) · step_s]."""

    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    step_s = serializers.FloatField()
    series = SeriesShape(many=True)


class Telemetry(APIView):
    """A view that asks the store: 503 while that does not answer."""

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, StoreError):
            exc = ApiError(503, "unavailable", _("Telemetry cannot be read just now: try again."))
        return super().handle_exception(exc)


class Traces(Telemetry):
    """Which requests there were."""

    @documented(query=TraceQuery, answer=list_of("traces", TraceShape))
    def get(self, request: Request) -> Response:
        """Search requests"""
        asked = TraceQuery.of(request)
        start, end = _range(asked, timezone.now(), SEARCH_RANGE_MAX)
        longest_ms = asked.get("max_duration_ms")
        search = TraceSearch(
            start,
            end,
            service=asked.get("service"),
            longer_s=asked.get("min_duration_ms", 0.0) / 1_000,
            until_s=None if longest_ms is None else longest_ms / 1_000,
            failed=asked["status"] == "error" if "status" in asked else None,
            text=asked.get("id", ""),
        )
        page = _page(_reader(request), search, asked)
        return listed("traces", page, TraceShape)


class TraceById(Telemetry):
    """Every span of a request."""

    @documented(answer=TraceWholeShape)
    def get(self, request: Request, trace_id: str) -> Response:
        """Read a trace"""
        spans = _reader(request).trace(trace_id)
        if not spans:
            raise Http404(_("No trace has the id %(id)s.") % {"id": trace_id})
        return Response(TraceWholeShape({"trace_id": trace_id.lower(), "spans": spans}).data)


class SeriesOfMetric(Telemetry):
    """A metric over time, as the pages and the judge read it."""

    @documented(query=SeriesQuery, answer=SeriesListShape)
    def get(self, request: Request) -> Response:
        """Read series of a metric"""
        asked = SeriesQuery.of(request)
        grid = _grid(asked, timezone.now())
        where, by = _where(asked), _names(asked, "by")
        if asked["kind"] == "histogram" and "le" in {*where, *by}:
            raise invalid("by", asked.get("by", ""), _("not le: the bounds are in the answer"))
        found = _read(_reader(request), asked, grid, where, by)
        if len(found) > SERIES_MAX:
            words = _("%(count)d series, allowed: %(most)d; narrow it, or keep fewer labels")
            raise invalid("by", asked.get("by", ""), words % {
                "count": len(found), "most": SERIES_MAX,
            })  # fmt: skip
        return Response(
            {
                "since": grid.start,
                "until": grid.end,
                "step_s": grid.step_s,
                "series": [_series_json(one) for one in found],
            }
        )


def _reader(request: Request) -> Reader:
    return query.reader(str(request_tenant(request).pk))


def _range(
    asked: Mapping[str, Any], now: datetime, longest: timedelta
) -> tuple[datetime, datetime]:
    """Raises ApiError 400 for one that is empty, too long, or where nothing can be."""
    end: datetime = asked.get("until", now)
    first = now - timedelta(days=settings.TRIMTAB_RETENTION_DAYS) - longest
    if not first <= end <= now + CLOCK_AHEAD_MAX:
        words = _("allowed: %(first)s to a day from now")
        raise invalid("until", end.isoformat(), words % {"first": first.date().isoformat()})
    start: datetime = asked.get("since", end - RANGE_DEFAULT)
    if not end - longest <= start < end:
        words = _("allowed: before `until`, by at most %(hours)g h")
        hours = longest.total_seconds() / 3_600
        raise invalid("since", start.isoformat(), words % {"hours": hours})
    return start, end


def _page(reader: Reader, search: TraceSearch, asked: Mapping[str, Any]) -> Page[Span]:
    slowest, limit = asked["order"] == "slowest", asked["limit"]
    of = f"traces {asked['order']}"
    after = None
    if "cursor" in asked:
        rank_ns, trace_id = cursor_read(asked["cursor"], of=of)
        after = Place(int(rank_ns), trace_id)
    most = min(limit + 1, TRACES_MAX)
    spans = reader.traces(search, slowest=slowest, after=after, limit=most)
    if len(spans) < most:
        return Page(spans, None)
    last = spans[:limit][-1]
    rank = last.duration_ns if slowest else last.end_ns
    return Page(spans[:limit], cursor_make([str(rank), last.trace_id], of=of))


def _grid(asked: Mapping[str, Any], now: datetime) -> Grid:
    """Windows on whole steps since the epoch, so that two answers fit together."""
    step_s = asked["step_s"]
    start, end = _range(asked, now, timedelta(seconds=step_s * WINDOWS_MAX))
    edge_s = math.floor(end.timestamp() / step_s) * step_s
    count = max(1, math.ceil(round((edge_s - start.timestamp()) / step_s, 6)))
    edge = datetime.fromtimestamp(edge_s, UTC)
    return Grid(edge - timedelta(seconds=step_s * count), edge, step_s)


def _where(asked: Mapping[str, Any]) -> dict[str, str]:
    where = {name: asked[name] for name in ("service", "instance", "node") if name in asked}
    for pair in _names(asked, "where"):
        name, equals, value = pair.partition("=")
        if not equals or not name or name in where:
            words = _("allowed: name=value, each name once, separated by commas")
            raise invalid("where", asked["where"], words)
        if name == "le" and not _is_number(value):
            raise invalid("where", asked["where"], _("le wants a number"))
        where[name] = value
    return where


def _is_number(value: str) -> bool:
    try:
        return not math.isnan(float(value))
    except ValueError:
        return False


def _names(asked: Mapping[str, Any], key: str) -> list[str]:
    names = [name for name in asked.get(key, "").split(",") if name]
    if len(names) > LABELS_MAX or len(set(names)) < len(names):
        words = _("allowed: at most %d, each once")
        raise invalid(key, asked[key], words % LABELS_MAX)
    return names


def _read(
    reader: Reader,
    asked: Mapping[str, Any],
    grid: Grid,
    where: dict[str, str],
    by: Sequence[str],
) -> Sequence[Series | HistogramSeries]:
    metric = asked["metric"]
    if asked["kind"] == "histogram":
        return reader.histogram(metric, grid, where=where, by=by)
    if asked["kind"] == "increase":
        return reader.increase(metric, grid, where=where, by=by)
    return reader.gauge(metric, grid, where=where, by=by, over=asked["over"])


def _series_json(series: Series | HistogramSeries) -> dict[str, Any]:
    if isinstance(series, Series):
        return {"labels": series.labels, "values": [_known(v) for v in series.values]}
    return {
        "labels": series.labels,
        "bounds": series.bounds,
        "counts": [[_known(v) for v in window] for window in series.counts],
        "sums": [_known(v) for v in series.sums],
    }


def _known(value: float) -> float | None:
    """JSON has neither NaN nor infinity; neither is a measurement."""
    return value if math.isfinite(value) else None


urlpatterns = [
    path("traces/", Traces.as_view(), name="api-traces"),
    path("traces/<slug:trace_id>/", TraceById.as_view(), name="api-trace"),
    path("series/", SeriesOfMetric.as_view(), name="api-series"),
]
