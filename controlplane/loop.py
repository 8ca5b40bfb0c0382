"""The loop: judge, explain, act, tell, and prove that it helped. One pass, top to bottom.

Everything it knows is in the database and the telemetry store; killed anywhere, the next pass finds
out from the rows what is left to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from datetime import datetime

from controlplane.accounts.models import Tenant
from controlplane.actions.selectors import acted_at, acting
from controlplane.actions.services import action_propose, actions_reconcile
from controlplane.actions.telling import deeds_of, stops_of
from controlplane.alerts.message import sentences
from controlplane.alerts.stops import stop_tell
from controlplane.alerts.telling import incident_tell, incidents_to_tell
from controlplane.diagnosis.explaining import incident_explain
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import diagnosis_due, incidents_open, story, story_due
from controlplane.diagnosis.services import incident_update, incidents_lapse
from controlplane.diagnosis.staging import engine_of
from controlplane.fleet.selectors import engines_of
from slo.services import objectives_judge
from tracing import query
from tracing.types import Reader

log = logging.getLogger(__name__)

_one_pass_at_a_time = threading.Lock()


def run_pass(now: datetime, reader_of: Callable[[str], Reader] = query.reader) -> None:
    """One pass over every tenant. Does nothing while another pass of this process runs."""
    if not _one_pass_at_a_time.acquire(blocking=False):
        return
    try:
        for tenant in Tenant.objects.order_by("slug"):
            try:
                steer(tenant, reader_of(str(tenant.pk)), now)
            except Exception:  # one tenant in trouble does not stop the others
                log.exception("tenant %s: the pass failed", tenant)
    finally:
        _one_pass_at_a_time.release()


def steer(tenant: Tenant, reader: Reader, now: datetime) -> None:
    # Judge: how did each objective do, engine by engine, in the control windows that ended?
    names = [engine.name for engine in engines_of(tenant)]
    for judgement in objectives_judge(tenant=tenant, reader=reader, now=now, engines=names):
        incident_update(judgement=judgement, now=now)
    incidents_lapse(tenant=tenant, now=now)

    # Verify: what became of the changes under way? This may free an engine for the next one.
    actions_reconcile(tenant=tenant, reader=reader, now=now)

    # Explain, choose what to do about it, and hand that to the agents.
    each(incidents_open(tenant), lambda incident: explain_and_act(incident, reader, now))
    actions_reconcile(tenant=tenant, reader=reader, now=now)

    # Tell: what, because of what, what is being done, and what came of it.
    each(incidents_to_tell(tenant), lambda incident: tell(incident, now))
    for stop in stops_of(tenant, now):
        stop_tell(**stop, now=now)


def each(incidents: Iterable[Incident], handle: Callable[[Incident], None]) -> None:
    for incident in incidents:
        try:
            handle(incident)
        except Exception:  # one incident in trouble does not stop the others
            log.exception("incident %s: could not be handled", incident.pk)


def explain_and_act(incident: Incident, reader: Reader, now: datetime) -> None:
    """Asks the causes, and takes the named one's remedy, unless a trial is still running."""
    if acting(incident):
        return
    if not diagnosis_due(incident, now=now, acted_at=acted_at(incident)):
        return
    diagnosis = incident_explain(incident=incident, reader=reader, now=now)
    if diagnosis is not None:
        action_propose(incident=incident, diagnosis=diagnosis, engine=engine_of(incident), now=now)


def tell(incident: Incident, now: datetime) -> None:
    """What is due to each channel: once explained, or unexplainable; at the end, once proved."""
    if not story_due(incident, now=now) or (incident.closed_at and acting(incident)):
        return
    told, (done, deeds) = story(incident), deeds_of(incident, now)
    doing = sentences(*done) or told.no_action
    incident_tell(incident=incident, story=told, doing=doing, now=now, **deeds)
