"""/traces/ and /traces/<id>/: which requests there were, and where the time of one went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.selectors import incidents_during
from controlplane.fleet.selectors import engines_of
from controlplane.web.access import TenantRequest, page, send
from controlplane.web.charts import RANGES
from controlplane.web.filters import BadFilter
from controlplane.web.heat import BOUNDS_S, heat, whole_windows
from controlplane.web.missed import LATENCY, missed, promised, seconds
from controlplane.web.pages.overview import otlp_url
from controlplane.web.search import FILTERS, asked
from controlplane.web.waterfall import STATUS_ERROR, waterfall
from slo.models import Objective
from tracing import query
from tracing.search import REQUEST_ID
from tracing.types import Span

ROWS = 50


@dataclass(frozen=True)
class Bar:
    """A part of a request's time: its kind, as the waterfall colours it, and its place; both are
    shares of the longest request listed."""

    kind: str
    left: float
    width: float


@dataclass(frozen=True)
class TraceRow:
    """A request in the list; None where its span does not carry the fact. `late` is what its entry
    span alone tells."""

    span: Span
    late: bool
    ended: datetime
    request_id: str
    took_s: float
    ttft_s: float | None
    tokens_in: str | None
    tokens_out: str | None
    bars: tuple[Bar, ...]

    @property
    def failed(self) -> bool:
        return self.span.status_code == STATUS_ERROR


@page
def traces(request: TenantRequest) -> HttpResponse:
    """Answers 400 with the reason when a filter cannot be read; nothing is listed then."""
    now = timezone.now()
    raw = {key: str(text) for key, text in request.GET.items() if key != "part"}
    context = {
        "raw": raw,
        "ranges": RANGES,
        "services": services_of(request.tenant, raw.get("service", "")),
        "now": now,
        "otlp_url": otlp_url(),
        "page_state": "none",
    }
    try:
        wanted = asked(raw, now)
    except BadFilter as error:
        return render(request, "traces.html", context | {"problem": str(error)}, status=400)
    reader = query.reader(str(request.tenant.pk))
    search, step_s = whole_windows(wanted.search)
    drawn = heat(search, step_s, reader.latency_heat(search, step_s=step_s, bounds_s=BOUNDS_S))
    spans = reader.traces(wanted.search, slowest=wanted.slowest, after=wanted.after, limit=ROWS + 1)
    context |= {
        "asked": wanted,
        "minutes": None if wanted.cut else wanted.minutes,
        "heat": drawn,
        "rows": rows_of(spans[:ROWS], promised(request.tenant)),
        "next": _place(spans[ROWS - 1], wanted.slowest) if len(spans) > ROWS else "",
        "cleared": dict.fromkeys(FILTERS),
        "page_state": "ok" if spans else "none",
    }
    return render(request, "traces.html", context)


def services_of(tenant: Tenant, chosen: str) -> list[str]:
    """Names to choose from: of engines and of objectives, and the chosen one."""
    promised = Objective.objects.filter(tenant=tenant).values_list("service", flat=True)
    names = {engine.service for engine in engines_of(tenant)} | set(promised) | {chosen}
    return sorted(names - {""})


def rows_of(spans: Sequence[Span], promises: Sequence[Objective]) -> list[TraceRow]:
    longest = max((span.duration_ns for span in spans), default=0) or 1
    return [_row(span, longest / 1e9, promises) for span in spans]


def _row(span: Span, longest_s: float, promises: Sequence[Objective]) -> TraceRow:
    carried = span.attributes
    took_s = span.duration_ns / 1e9
    return TraceRow(
        span=span,
        late=bool(missed(promises, span, [span], failed=False)),
        ended=datetime.fromtimestamp(span.end_ns / 1e9, UTC),
        request_id=carried.get(REQUEST_ID, ""),
        took_s=took_s,
        ttft_s=seconds(carried.get(f"{LATENCY}time_to_first_token")),
        tokens_in=carried.get("gen_ai.usage.prompt_tokens"),
        tokens_out=carried.get("gen_ai.usage.completion_tokens"),
        bars=tuple(_bars(span, took_s, longest_s)),
    )


def _bars(span: Span, took_s: float, longest_s: float) -> list[Bar]:
    """The whole request, over it the parts its span names: queue, then prefill, then decode."""
    bars = [Bar("root", 0.0, took_s / longest_s)]
    at_s = 0.0
    for kind, name in PARTS:
        part_s = seconds(span.attributes.get(LATENCY + name))
        if part_s is None:
            continue
        part_s = min(part_s, took_s - at_s)
        if part_s > 0:
            bars.append(Bar(kind, at_s / longest_s, part_s / longest_s))
            at_s += part_s
    return bars


PARTS = (
    ("queue", "time_in_queue"),
    ("prefill", "time_in_model_prefill"),
    ("decode", "time_in_model_decode"),
)


def _place(span: Span, slowest: bool) -> str:
    return f"{span.duration_ns if slowest else span.end_ns}-{span.trace_id}"


@page
def trace(request: TenantRequest, trace_id: str) -> HttpResponse:
    """Raises Http404 for a trace this tenant never sent, or that has been forgotten since."""
    spans = query.reader(str(request.tenant.pk)).trace(trace_id)
    if not spans:
        raise Http404(f"trace {trace_id} is not stored for {request.tenant}")
    drawn = waterfall(spans)
    root, attributes = drawn.root, drawn.root.attributes
    context = {
        "trace_id": trace_id,
        "waterfall": drawn,
        "missed": missed(promised(request.tenant), root, spans, failed=drawn.failed),
        "incidents": incidents_during(
            request.tenant,
            service=root.service,
            engine=root.instance,
            since=datetime.fromtimestamp(root.start_ns / 1e9, UTC),
            until=datetime.fromtimestamp(root.end_ns / 1e9, UTC),
        ),
        "queue_s": drawn.parts.get("queue"),
        "prefill_s": drawn.parts.get("prefill"),
        "decode_s": drawn.parts.get("decode"),
        "gap_s": drawn.parts.get("gap"),
        "ttft_s": seconds(attributes.get(f"{LATENCY}time_to_first_token")),
        "prompt_tokens": attributes.get("gen_ai.usage.prompt_tokens"),
        "completion_tokens": attributes.get("gen_ai.usage.completion_tokens"),
    }
    return send(request, "trace.html", context)
