"""REST of incidents, read-only: the list, newest first, and one with its evidence and rivals."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404
from django.urls import path
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import request_tenant
from controlplane.accounts.rest import (
    ListQuery,
    Page,
    Shape,
    choice,
    documented,
    list_of,
    listed,
    moment,
    page_of,
    text,
)
from controlplane.diagnosis.models import Incident, Severity
from controlplane.diagnosis.selectors import incident_get, incidents_asked, story

COUNTED = "what the events are: requests, gaps between tokens, …"


class IncidentQuery(ListQuery):
    state = choice(Incident.State.values)
    objective = text(help_text="its slug")
    engine = text(help_text="the engine the incident is about; none given: whatever its scope")
    since = moment(help_text="opened at this time or later")


class EvidenceShape(Shape):
    """One measured fact for or against a cause."""

    sentence = serializers.CharField()
    supports = serializers.BooleanField()
    metric = serializers.CharField(allow_blank=True)
    query = serializers.CharField(allow_blank=True, help_text="what the fact was read from")
    unit = serializers.CharField(allow_blank=True)
    before = serializers.FloatField(allow_null=True)
    value = serializers.FloatField(allow_null=True)
    threshold = serializers.FloatField(allow_null=True)
    points = serializers.ListField(
        child=serializers.ListField(child=serializers.FloatField(allow_null=True)),
        help_text="[unix seconds, value], null where nothing was measured",
    )


class RivalShape(Shape):
    """A cause that was examined and not named."""

    cause = serializers.CharField()
    score = serializers.FloatField()
    because = serializers.CharField()
    evidence = EvidenceShape(many=True)


class HitShape(Shape):
    """Another incident of the same story."""

    incident = serializers.UUIDField(source="incident.pk")
    objective = serializers.CharField(source="incident.objective.slug")
    bad_events = serializers.FloatField(source="bad")
    total_events = serializers.FloatField(source="total")
    unit = serializers.CharField(source="incident.objective.unit.many", help_text=COUNTED)


class EpisodeShape(Shape):
    """One time an incident was open."""

    bad_since = serializers.DateTimeField()
    opened_at = serializers.DateTimeField()
    closed_at = serializers.DateTimeField(allow_null=True)
    bad_events = serializers.FloatField()
    total_events = serializers.FloatField()
    unmeasured = serializers.JSONField(help_text="[from, to] of each stretch nobody watched")


class IncidentShape(Shape):
    """An incident in words and numbers. Made from {"incident", "told"}."""

    id = serializers.UUIDField(source="incident.pk")
    objective = serializers.CharField(source="incident.objective.slug")
    objective_name = serializers.CharField(source="incident.objective.name")
    service = serializers.CharField(source="incident.objective.service")
    scope = serializers.CharField(source="incident.scope", help_text="an engine; empty: all")
    state = serializers.ChoiceField(source="incident.state", choices=Incident.State.choices)
    trigger = serializers.CharField(
        source="incident.trigger", help_text="the rule that opened it last"
    )
    severity = serializers.ChoiceField(
        source="incident.severity",
        choices=Severity.choices,
        help_text="of the most urgent rule that has fired for it",
    )
    bad_since = serializers.DateTimeField(source="incident.bad_since", help_text="the first time")
    opened_at = serializers.DateTimeField(source="incident.opened_at")
    closed_at = serializers.DateTimeField(source="incident.closed_at", allow_null=True)
    reopened = serializers.IntegerField(source="incident.reopened")
    episodes = EpisodeShape(source="incident.runs", many=True, help_text="oldest first")
    bad_events = serializers.FloatField(
        source="incident.bad_events", help_text="of the newest episode, as the words below"
    )
    total_events = serializers.FloatField(source="incident.total_events")
    unit = serializers.CharField(source="incident.objective.unit.many", help_text=COUNTED)
    example_trace_id = serializers.CharField(source="incident.example_trace_id")
    what = serializers.CharField(source="told.what")
    because = serializers.CharField(source="told.because", help_text="empty until explained")
    cause = serializers.CharField(source="told.cause", help_text="empty until explained")
    explained_at = serializers.DateTimeField(
        source="told.diagnosis.made_at", default=None, allow_null=True
    )
    verdict = serializers.CharField(
        source="told.verdict", help_text="infeasible: no knob can mend it; else empty"
    )
    no_action = serializers.CharField(
        source="told.no_action", help_text="why nothing is tried now; empty: something is"
    )
    part_of = serializers.UUIDField(
        source="incident.part_of_id", allow_null=True, help_text="the incident whose story it is in"
    )
    hits = HitShape(source="told.hits", many=True)


class IncidentWholeShape(IncidentShape):
    """The same with the explanation under it."""

    score = serializers.FloatField(source="told.score")
    facts = serializers.DictField(source="told.diagnosis.facts", default=dict)
    remedy = serializers.ListField(
        source="told.diagnosis.remedy", default=list, child=serializers.DictField()
    )
    window_start = serializers.DateTimeField(
        source="told.diagnosis.window_start", default=None, allow_null=True
    )
    window_end = serializers.DateTimeField(
        source="told.diagnosis.window_end", default=None, allow_null=True
    )
    evidence_for = EvidenceShape(source="told.evidence_for", many=True)
    evidence_against = EvidenceShape(source="told.evidence_against", many=True)
    also = RivalShape(source="told.also", many=True, help_text="named beside the cause")
    rivals = RivalShape(source="told.rivals", many=True)


class DiagnosisShape(Shape):
    """One explanation; the newest is the one that holds."""

    made_at = serializers.DateTimeField()
    cause = serializers.CharField()
    score = serializers.FloatField()
    because = serializers.CharField()
    facts = serializers.DictField()
    also = serializers.ListField(
        child=serializers.DictField(), help_text="named beside the cause; `because` tells of both"
    )
    remedy = serializers.ListField(child=serializers.DictField())
    window_start = serializers.DateTimeField()
    window_end = serializers.DateTimeField()
    evidence = EvidenceShape(source="evidence.all", many=True)


class Incidents(APIView):
    """What went wrong, newest first."""

    @documented(query=IncidentQuery, answer=list_of("incidents", IncidentShape))
    def get(self, request: Request) -> Response:
        """List incidents"""
        asked = IncidentQuery.of(request)
        filters = {name: asked[name] for name in ("state", "objective", "engine", "since")
                   if name in asked}  # fmt: skip
        rows = incidents_asked(request_tenant(request), **filters)
        page = page_of(rows, asked, by=("-opened_at", "id"))
        told = [row_of(incident) for incident in page.rows]
        return listed("incidents", Page(told, page.next), IncidentShape)


class IncidentById(APIView):
    """One incident with the evidence for and against each cause."""

    @documented(answer=IncidentWholeShape)
    def get(self, request: Request, incident_id: UUID) -> Response:
        """Read an incident"""
        return Response(IncidentWholeShape(row_of(found(request, incident_id))).data)


class Diagnoses(APIView):
    """How an incident was explained as it went on, newest first."""

    @documented(query=ListQuery, answer=list_of("diagnoses", DiagnosisShape))
    def get(self, request: Request, incident_id: UUID) -> Response:
        """List an incident's explanations"""
        rows = found(request, incident_id).diagnoses.prefetch_related("evidence")
        page = page_of(rows, ListQuery.of(request), by=("-made_at", "id"))
        return listed("diagnoses", page, DiagnosisShape)


def found(request: Request, incident_id: UUID) -> Incident:
    """Raises Http404, for another tenant's incident as for one that never was."""
    try:
        return incident_get(request_tenant(request), incident_id)
    except Incident.DoesNotExist:
        raise Http404(_("No incident has the id %(id)s.") % {"id": incident_id}) from None


def row_of(incident: Incident) -> dict[str, Any]:
    return {"incident": incident, "told": story(incident)}


urlpatterns = [
    path("incidents/", Incidents.as_view(), name="api-incidents"),
    path("incidents/<uuid:incident_id>/", IncidentById.as_view(), name="api-incident"),
    path("incidents/<uuid:incident_id>/diagnoses/", Diagnoses.as_view(), name="api-diagnoses"),
]
