"""The loop: judge, explain, act, tell, and prove that it helped. One pass, top to bottom.

Everything it knows is in the database and the telemetry store; killed anywhere, the next pass finds
out from the rows what is left to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime

from controlplane.accounts.models import Tenant
from controlplane.actions.selectors import acted_at, actions_of, sentence
from controlplane.actions.services import action_propose, actions_reconcile
from controlplane.alerts.services import incident_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import diagnosis_due, incidents_open, story, story_due
from controlplane.diagnosis.services import incident_explain, incident_update, incidents_lapse
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
    each_incident(tenant, lambda incident: explain_and_act(incident, reader, now))
    actions_reconcile(tenant=tenant, reader=reader, now=now)

    # Tell: what, because of what, and what is being done.
    each_incident(tenant, lambda incident: tell(incident, now))


def each_incident(tenant: Tenant, handle: Callable[[Incident], None]) -> None:
    for incident in incidents_open(tenant):
        try:
            handle(incident)
        except Exception:  # one incident in trouble does not stop the others
            log.exception("incident %s: could not be handled", incident.pk)


def explain_and_act(incident: Incident, reader: Reader, now: datetime) -> None:
    """Asks the causes, and takes the named one's remedy, unless a trial is still running."""
    if any(action.ended_at is None for action in actions_of(incident)):
        return
    if not diagnosis_due(incident, now=now, acted_at=acted_at(incident)):
        return
    diagnosis = incident_explain(incident=incident, reader=reader, now=now)
    if diagnosis is not None:
        engine = engine_of(incident)
        action_propose(incident=incident, diagnosis=diagnosis, engine=engine, now=now)


def tell(incident: Incident, now: datetime) -> None:
    """One message per channel, once there is an explanation to give, or none to be had."""
    if not story_due(incident, now=now):
        return
    told, action = story(incident), next(reversed(actions_of(incident)), None)
    doing = sentence(action) if action else told.no_action
    parts = filter(None, (told.what, told.because, doing))
    incident_tell(
        incident=incident,
        title=told.what,
        text=". ".join(part[0].upper() + part[1:] for part in parts),
        now=now,
        engine=action.engine.name if action else incident.scope,
        cause=told.cause_label,
        action=doing,
    )
