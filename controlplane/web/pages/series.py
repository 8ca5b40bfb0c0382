"""GET /series/<objective>/?minutes=60: what the charts of an objective draw, as JSON."""

from __future__ import annotations

from django.http import HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.utils import timezone

from controlplane.web.access import TenantRequest, minutes_of, page
from controlplane.web.charts import series_of
from slo.models import Objective


@page
def series(request: TenantRequest, slug: str) -> HttpResponse:
    objective = get_object_or_404(Objective, tenant=request.tenant, slug=slug)
    return JsonResponse(series_of(objective, minutes=minutes_of(request), now=timezone.now()))
