"""/: the story lines, the objectives, worst first, their charts, and the fleet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpResponse
from django.utils import timezone

from controlplane.accounts.models import Tenant, Token
from controlplane.fleet.models import Engine
from controlplane.web.access import TenantRequest, minutes_of, page, send
from controlplane.web.charts import RANGES, questions
from controlplane.web.fleet import fleet_cells
from controlplane.web.pages.objectives import ObjectiveRow, objective_rows, page_state
from controlplane.web.story import StoryLine, story_lines
from slo.models import Objective
from tracing import query


@page
def overview(request: TenantRequest) -> HttpResponse:
    now = timezone.now()
    lines = story_lines(request.tenant, now)
    rows = objective_rows(request.tenant, now, lines)
    shown = _shown(lines, rows)
    is_open = [line for line in lines if line.state != "ok"]
    context = {
        "lines": lines,
        "open_count": len(is_open),
        "acting_count": sum(line.state == "act" for line in lines),
        "rows": rows,
        "smallest": next((row for row in rows if row.standing.budget_left is not None), None),
        "met_all": all(row.standing.state in ("met", "no_data") for row in rows),
        "shown": shown,
        "charts": questions(shown) if shown else [],
        "minutes": minutes_of(request, 15),
        "ranges": RANGES,
        "cells": fleet_cells(request.tenant, lines, now),
        "first_run": first_run(request.tenant, now),
        "page_state": "act" if any(line.state == "act" for line in is_open) else page_state(rows),
    }
    return send(request, "overview.html", context, parts=("story", "objectives", "fleet", "first"))


def _shown(lines: list[StoryLine], rows: list[ObjectiveRow]) -> Objective | None:
    """The objective whose charts stand on the page: of the first story, else the worst."""
    if lines:
        return lines[0].incident.objective
    return rows[0].standing.objective if rows else None


@dataclass(frozen=True)
class FirstRun:
    """What is connected so far; the page shows the steps until an engine reports and
    something is promised."""

    tokens: bool
    agent: bool
    telemetry: bool
    objective: bool
    otlp_url: str
    web_url: str

    @property
    def started(self) -> bool:
        return self.agent or self.telemetry or self.objective


def first_run(tenant: Tenant, now: datetime) -> FirstRun | None:
    """None once engines report and something is promised: from then on there is better to show."""
    has_engine = Engine.objects.filter(tenant=tenant).exists()
    has_objective = Objective.objects.filter(tenant=tenant).exists()
    if has_engine and has_objective:
        return None
    reader = query.reader(str(tenant.pk))
    spans = reader.spans(now - timedelta(hours=1), now, limit=1)
    kinds = set(Token.objects.filter(tenant=tenant, revoked_at=None).values_list("kind", flat=True))
    host = urlsplit(settings.TRIMTAB_PUBLIC_URL)
    return FirstRun(
        tokens={Token.Kind.INGEST, Token.Kind.AGENT} <= kinds,
        agent=has_engine,
        telemetry=bool(spans),
        objective=has_objective,
        otlp_url=f"{host.scheme}://{host.hostname}:{settings.TRIMTAB_OTLP_PORT}",
        web_url=settings.TRIMTAB_PUBLIC_URL,
    )
