"""Reads of the alerts room: channels, what is silenced, what was said."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db.models import QuerySet

from controlplane.accounts.models import Tenant
from controlplane.alerts.groups import Group
from controlplane.alerts.models import Channel, Delivery, Silence
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine
from slo.models import Objective


def channels_of(tenant: Tenant) -> QuerySet[Channel]:
    """By name."""
    return Channel.objects.filter(tenant=tenant).order_by("name")


def silences_of(tenant: Tenant) -> QuerySet[Silence]:
    """Newest first, over or not."""
    return Silence.objects.filter(tenant=tenant).order_by("-created_at", "-id")


def silences_active(tenant_id: UUID, now: datetime) -> QuerySet[Silence]:
    """Those that hold now; the one that holds longest first."""
    rows = Silence.objects.filter(tenant=tenant_id, created_at__lte=now, until__gt=now)
    return rows.filter(ended_at=None).order_by("-until", "id")


def silence_of(group: Group, now: datetime) -> Silence | None:
    """The silence nobody is to hear of the group by: one fits each incident that burns."""
    active = list(silences_active(group.head.tenant_id, now))
    fitting = [
        next((silence for silence in active if _fits(silence, incident)), None)
        for incident in group.all
        if incident.state == Incident.State.OPEN
    ]
    return fitting[0] if fitting and all(fitting) else None


def silence_of_engine(engine: Engine, now: datetime) -> Silence | None:
    """The silence of the whole engine or of its service."""
    whole = silences_active(engine.tenant_id, now).filter(objective="")
    return whole.filter(service__in=("", engine.service), engine__in=("", engine.name)).first()


def scopes_known(tenant: Tenant) -> dict[str, set[str]]:
    """What a silence may be about; an engine that is gone as long as an incident names it."""
    objectives = Objective.objects.filter(tenant=tenant)
    engines = Engine.objects.filter(tenant=tenant).values_list("name", flat=True)
    scopes = Incident.objects.filter(tenant=tenant).values_list("scope", flat=True)
    return {
        "service": set(objectives.values_list("service", flat=True)),
        "objective": set(objectives.values_list("slug", flat=True)),
        "engine": {*engines, *scopes.distinct()} - {""},
    }


def deliveries_of(tenant: Tenant) -> QuerySet[Delivery]:
    """The log, newest first."""
    rows = Delivery.objects.filter(tenant=tenant).select_related("channel", "silence")
    return rows.order_by("-created_at", "-id")


def _fits(silence: Silence, incident: Incident) -> bool:
    has = {
        "service": incident.objective.service,
        "objective": incident.objective.slug,
        "engine": incident.scope,
    }
    wants = {name: getattr(silence, name) for name in has}
    return all(has[name] == want for name, want in wants.items() if want)
