"""REST of incidents, read-only: the list, newest first, and one with its evidence and rivals."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404
from django.urls import path
from django.utils.translation import gettext as _
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import request_tenant
from controlplane.diagnosis.models import Evidence, Incident
from controlplane.diagnosis.selectors import Story, incident_get, incidents_recent, story

LIST_MAX = 100


class Incidents(APIView):
    """GET the newest incidents, open and closed."""

    def get(self, request: Request) -> Response:
        found = incidents_recent(request_tenant(request), LIST_MAX)
        return Response({"incidents": [incident_json(i, story(i)) for i in found]})


class IncidentById(APIView):
    """GET one incident with the evidence for and against each cause."""

    def get(self, request: Request, incident_id: UUID) -> Response:
        try:
            incident = incident_get(request_tenant(request), incident_id)
        except Incident.DoesNotExist:
            raise Http404(_("No incident has the id %(id)s.") % {"id": incident_id}) from None
        told = story(incident)
        return Response(incident_json(incident, told) | explanation_json(told))


def incident_json(incident: Incident, told: Story) -> dict[str, Any]:
    return {
        "id": str(incident.pk),
        "objective": incident.objective.slug,
        "service": incident.objective.service,
        "scope": incident.scope,
        "state": incident.state,
        "trigger": incident.trigger,
        "bad_since": incident.bad_since,
        "opened_at": incident.opened_at,
        "closed_at": incident.closed_at,
        "reopened": incident.reopened,
        "bad_events": incident.bad_events,
        "total_events": incident.total_events,
        "example_trace_id": incident.example_trace_id,
        "what": told.what,
        "because": told.because,
        "cause": told.cause,
        "no_action": told.no_action,
    }


def explanation_json(told: Story) -> dict[str, Any]:
    diagnosis = told.diagnosis
    return {
        "score": told.score,
        "facts": diagnosis.facts if diagnosis else {},
        "remedy": diagnosis.remedy if diagnosis else [],
        "explained_at": diagnosis.made_at if diagnosis else None,
        "evidence_for": [_evidence_json(e) for e in told.evidence_for],
        "evidence_against": [_evidence_json(e) for e in told.evidence_against],
        "rivals": [
            {
                "cause": rival.cause,
                "score": rival.score,
                "because": rival.because,
                "evidence": [_evidence_json(e) for e in rival.evidence],
            }
            for rival in told.rivals
        ],
    }


def _evidence_json(evidence: Evidence) -> dict[str, Any]:
    names = "sentence supports metric unit before value threshold points"
    return {name: getattr(evidence, name) for name in names.split()}


urlpatterns = [
    path("incidents/", Incidents.as_view(), name="api-incidents"),
    path("incidents/<uuid:incident_id>/", IncidentById.as_view(), name="api-incident"),
]
