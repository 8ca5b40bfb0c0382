"""REST of objectives: list them worst first, read one, create or update one by its slug."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.http import Http404
from django.urls import path
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import ApiError, request_tenant
from slo import selectors, services
from slo.indicator import indicators
from slo.selectors import Standing


class Objectives(APIView):
    """GET every enabled objective and how it stands, the least budget first."""

    def get(self, request: Request) -> Response:
        found = selectors.objectives_standing(tenant=request_tenant(request), now=timezone.now())
        return Response({"objectives": [standing_json(standing) for standing in found]})


class ObjectiveBySlug(APIView):
    """GET one objective; PUT creates it (201) or updates it (200), whole."""

    def get(self, request: Request, slug: str) -> Response:
        objective = selectors.objective_get(tenant=request_tenant(request), slug=slug)
        if objective is None:
            raise Http404(_("No objective has the slug %(slug)s.") % {"slug": slug})
        return Response(standing_json(selectors.standing(objective, timezone.now())))

    def put(self, request: Request, slug: str) -> Response:
        if not isinstance(request.data, dict):
            raise ApiError(400, "invalid", _("The body must be a JSON object."))
        tenant = request_tenant(request)
        spec = {**request.data}
        if spec.setdefault("slug", slug) != slug:
            raise ApiError(
                400,
                "invalid",
                _("slug=%(given)r: allowed: %(slug)r, as in the address, or leave it out")
                % {"given": spec["slug"], "slug": slug},
                param="slug",
            )
        known = selectors.objective_get(tenant=tenant, slug=slug) is not None
        try:
            objective = services.objective_apply(tenant=tenant, spec=spec)
        except services.ObjectiveError as error:
            raise ApiError(400, "invalid", str(error), param=error.param) from None
        body = standing_json(selectors.standing(objective, timezone.now()))
        return Response(body, status=200 if known else 201)


def standing_json(standing: Standing) -> dict[str, Any]:
    objective = standing.objective
    last = standing.last_reading
    return {
        **{name: getattr(objective, name) for name in services.FIELDS},
        "good_event": indicators()[objective.indicator].describe(objective.spec),
        "problem": objective.problem,
        "standing": {
            "state": standing.state,
            "attained": standing.attained,
            "budget_left": standing.budget_left,
            "burn_1h": standing.burn_1h,
            "good": standing.counts.good,
            "total": standing.counts.total,
            "signal": standing.signal,
            "stale_s": standing.stale_s,
            "fast_burn_now": standing.fast_burn_now,
            "last_window_end": last.window_end if last else None,
            "pairs": [dataclasses.asdict(pair) for pair in standing.pairs],
        },
    }


urlpatterns = [
    path("objectives/", Objectives.as_view(), name="api-objectives"),
    path("objectives/<slug:slug>/", ObjectiveBySlug.as_view(), name="api-objective"),
]
