"""/ui/: every component in every state, drawn by the parts the pages are made of. For staff."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _

from controlplane.web.access import TenantRequest, page
from controlplane.web.charts import RANGES
from controlplane.web.forms import FreezeForm
from controlplane.web.pages.overview import FirstRun
from controlplane.web.samples import fleet, incidents, objectives
from controlplane.web.templatetags.ui import STATES


@page
def ui(request: TenantRequest) -> HttpResponse:
    """Raises PermissionDenied for anyone but staff."""
    _staff_check(request)
    context = {
        "states": list(STATES),
        "lines": incidents.story_lines(),
        "rows": objectives.objective_rows(),
        "budgets": objectives.budgets(),
        "charts": objectives.questions(),
        "src": reverse("ui-series"),
        "ranges": RANGES,
        "minutes": 60,
        "cells": fleet.cells(),
        "knobs": fleet.knob_rows(),
        "evidence": incidents.evidence(),
        "incident": incidents.story_lines()[0].incident,
        "axis": (incidents.ago(minutes=12).timestamp(), incidents.NOW.timestamp()),
        "actions": incidents.actions(),
        "deliveries": incidents.deliveries(),
        "traces": fleet.trace_rows(),
        "heat": fleet.heat_map(),
        "form": FreezeForm({"reason": "", "minutes": "0"}),
        "first": FirstRun(
            tokens=True, agent=False, telemetry=True, objective=False,
            otlp_url="http://127.0.0.1:4318", web_url="http://127.0.0.1:8000",
            grpc_address="127.0.0.1:4317",
        ),
        "page_state": "none",
    }  # fmt: skip
    return render(request, "ui.html", context)


@page
def ui_series(request: TenantRequest) -> HttpResponse:
    _staff_check(request)
    return JsonResponse(objectives.series())


def _staff_check(request: TenantRequest) -> None:
    if not request.user.is_staff:
        raise PermissionDenied(_("This page is for staff: it shows how pages are made."))
