"""Opens, follows and closes incidents.

Everything is derived from the readings, so a pass that was killed half-way is made good by the
next one, and the same pass twice changes nothing. What explains them: explaining.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils.translation import gettext_noop

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.episodes import recount
from controlplane.diagnosis.models import Incident, Severity
from slo.budget import Counts, window_is_bad
from slo.burn import PAIRS
from slo.judging import REJUDGE_WINDOWS, settle_s
from slo.models import Objective, Reading
from slo.readings import MEASURED
from slo.services import Judgement
from tracing.types import Signal

log = logging.getLogger(__name__)

BAD_WINDOWS_TO_OPEN = 2
GOOD_WINDOWS_TO_CLOSE = 4
REOPEN_WITHIN = timedelta(minutes=10)
COVER_WINDOWS = 4
LAPSE_AFTER = timedelta(hours=1)
LAPSED_OFF = gettext_noop("until the objective was switched off")
LAPSED_UNMEASURED = gettext_noop("and for an hour nothing was measured there")
TAIL_WINDOWS_MAX = 40
FAST_BURN = "fast burn"
# One-sided 5 %: a window is good when so many bad events are no surprise under a kept promise.
Z_GOOD = 1.645


def incident_update(*, judgement: Judgement, now: datetime) -> Incident | None:
    """Opens, reopens, follows or closes the incident of one objective and scope (NORMS, Time).

    Opens on two bad windows in a row, or on a firing burn pair while the last two windows are not
    good (a pair looks back minutes and would reopen what has just been put right). One thing has
    one incident: scope "" is covered by an engine's incident of the objective, and the reverse.
    Windows without a signal neither open nor close. A window whose data came late opens as it would
    have in time, while it is among those judged again; an open incident is followed from the newest
    window, whichever was judged. Returns the incident when there is one.
    """
    incident = Incident.objects.filter(
        objective=judgement.objective, scope=judgement.scope, state=Incident.State.OPEN
    ).first()
    tail: list[Reading] = []
    trigger = None
    age_s = (now - judgement.window_end).total_seconds()
    in_time = age_s <= REJUDGE_WINDOWS * judgement.window_s + settle_s()
    # What opens an incident ends with the window that is judged.
    burns = judgement.bad or any(pair.firing for pair in judgement.pairs)
    if judgement.signal == Signal.OK and in_time and burns:
        tail = _tail(judgement.objective, judgement.scope, until=judgement.window_end)
        trigger = _trigger(judgement, tail)
    if incident is not None:
        return _follow(incident, trigger, now)
    if trigger is None or _covered(judgement):
        return None
    return _open(judgement.objective, judgement.scope, trigger, tail, now)


def incidents_lapse(*, tenant: Tenant, now: datetime) -> list[Incident]:
    """Closes the incidents nobody will see the end of; returns them.

    Their objective was switched off, or nothing was measured in their scope for an hour: an engine
    that is gone, an objective that counts something else now.
    """
    lapsed = []
    for incident in Incident.objects.filter(
        tenant=tenant, state=Incident.State.OPEN
    ).select_related("objective"):
        if not incident.objective.enabled:
            incident.lapsed = LAPSED_OFF
        elif not _measured_since(incident, max(incident.run_since, now - LAPSE_AFTER)):
            incident.lapsed = LAPSED_UNMEASURED
        else:
            continue
        incident.state, incident.closed_at = Incident.State.CLOSED, now
        incident.save(update_fields=["lapsed", "state", "closed_at", "updated_at"])
        log.info("incident lapsed: %s, %s", incident, incident.lapsed)
        lapsed.append(incident)
    return lapsed


def window_is_good(counts: Counts, target: float) -> bool:
    """Whether the window is consistent with the promise being kept.

    So many bad events or more would come in less than 5 % of windows of a service that just keeps
    its target (normal approximation). Stricter than "not bad": between the two, an incident
    neither opens nor closes.
    """
    if counts.total <= 0:
        return False
    budget = 1 - target
    slack = Z_GOOD * math.sqrt(counts.total * budget * target)
    return counts.bad <= counts.total * budget + slack


def _tail(objective: Objective, scope: str, *, until: datetime | None = None) -> list[Reading]:
    """The newest readings, newest first; those up to a window's end if one is given."""
    rows = Reading.objects.filter(objective=objective, scope=scope)
    if until is not None:
        rows = rows.filter(window_end__lte=until)
    return list(rows.order_by("-window_end")[:TAIL_WINDOWS_MAX])


def _measured_since(incident: Incident, at: datetime) -> bool:
    return Reading.objects.filter(
        objective=incident.objective,
        scope=incident.scope,
        window_end__gt=at,
        signal__in=MEASURED,
    ).exists()


def _counts(reading: Reading) -> Counts:
    return Counts(reading.good, reading.total)


def _is_bad(reading: Reading, objective: Objective) -> bool:
    return reading.signal == Signal.OK and window_is_bad(
        _counts(reading), objective.target, objective.fast_burn
    )


def _is_good(reading: Reading, objective: Objective) -> bool:
    return reading.signal == Signal.OK and window_is_good(_counts(reading), objective.target)


def _run(tail: Sequence[Reading], wanted: Sequence[bool]) -> list[Reading]:
    """The newest readings that are wanted, without a hole in time between them."""
    run: list[Reading] = []
    for reading, ok in zip(tail, wanted, strict=True):
        joined = not run or _adjacent(reading, run[-1])
        if not (ok and joined):
            break
        run.append(reading)
    return run


def _adjacent(older: Reading, newer: Reading) -> bool:
    gap = newer.window_end - older.window_end
    return gap <= timedelta(seconds=1.5 * newer.window_s)


def _bad_run(tail: Sequence[Reading], objective: Objective) -> list[Reading]:
    return _run(tail, [_is_bad(r, objective) for r in tail])


def _ungood_run(tail: Sequence[Reading], objective: Objective) -> list[Reading]:
    return _run(tail, [r.signal == Signal.OK and not _is_good(r, objective) for r in tail])


def _trigger(judgement: Judgement, tail: Sequence[Reading]) -> str | None:
    if len(_bad_run(tail, judgement.objective)) >= BAD_WINDOWS_TO_OPEN:
        return FAST_BURN
    firing = next((pair.name for pair in judgement.pairs if pair.firing), None)
    if firing and len(_ungood_run(tail, judgement.objective)) >= BAD_WINDOWS_TO_OPEN:
        return f"burn {firing}"
    return None


def _severity(trigger: str | None, before: str = Severity.TICKET) -> str:
    """That of the burn pair (SRE workbook), of the rule of bad windows a page, but none lower than
    `before`: who was woken is told of the end as well."""
    if trigger is None or before == Severity.PAGE:
        return before
    ticket = {f"burn {pair.name}" for pair in PAIRS if pair.severity == Severity.TICKET}
    return Severity.TICKET if trigger in ticket else Severity.PAGE


def _covered(judgement: Judgement) -> bool:
    """Whether an open incident tells of it already. One that is blind covers nothing."""
    lately = judgement.window_end - timedelta(seconds=COVER_WINDOWS * judgement.window_s)
    open_ones = Incident.objects.filter(objective=judgement.objective, state=Incident.State.OPEN)
    if judgement.scope:
        open_ones = open_ones.filter(scope="")
    return any(_measured_since(incident, lately) for incident in open_ones)


def _open(
    objective: Objective, scope: str, trigger: str, tail: Sequence[Reading], now: datetime
) -> Incident | None:
    closed = _closed_lately(objective, scope, now)
    over_at = closed.closed_at if closed else None
    if over_at is not None and over_at >= tail[0].window_end:
        return None  # a window from before the end of what is over
    run = (_bad_run if trigger == FAST_BURN else _ungood_run)(tail, objective)
    first = run[-1]
    bad_since = first.window_end - timedelta(seconds=first.window_s)
    try:
        with transaction.atomic():
            incident = _reopen(closed, trigger, bad_since, now) or Incident.objects.create(
                tenant_id=objective.tenant_id,
                objective=objective,
                scope=scope,
                trigger=trigger,
                severity=_severity(trigger),
                bad_since=bad_since,
                opened_at=now,
            )
            recount(incident)
    except IntegrityError:  # another pass opened it at the same moment
        return Incident.objects.filter(
            objective=objective, scope=scope, state=Incident.State.OPEN
        ).first()
    log.info("incident open: %s, %s", incident, trigger)
    return incident


def _closed_lately(objective: Objective, scope: str, now: datetime) -> Incident | None:
    rows = Incident.objects.filter(
        objective=objective, scope=scope, closed_at__gte=now - REOPEN_WITHIN
    )
    return rows.order_by("-closed_at").first()


def _reopen(
    closed: Incident | None, trigger: str, bad_since: datetime, now: datetime
) -> Incident | None:
    """Begins another episode; the one that ended keeps its times and numbers."""
    if closed is None:
        return None
    closed.run.save()
    closed.state = Incident.State.OPEN
    closed.closed_at = None
    closed.lapsed = ""
    closed.trigger, closed.severity = trigger, _severity(trigger, closed.severity)
    closed.bad_again_since, closed.opened_again_at = bad_since, now
    closed.good_windows = 0
    closed.reopened = F("reopened") + 1
    closed.save()
    closed.refresh_from_db()
    return closed


def _follow(incident: Incident, trigger: str | None, now: datetime) -> Incident:
    """Counts the good windows in a row; those without a signal are not in the row.

    `trigger` is the rule that would have opened it now, if any.
    """
    good = 0
    for reading in _tail(incident.objective, incident.scope):
        if reading.window_end <= incident.run_since or good == GOOD_WINDOWS_TO_CLOSE:
            break
        if reading.signal != Signal.OK:
            continue
        if not _is_good(reading, incident.objective):
            break
        good += 1
    incident.good_windows = good
    incident.severity = _severity(trigger, incident.severity)
    if good >= GOOD_WINDOWS_TO_CLOSE:
        incident.state = Incident.State.CLOSED
        incident.closed_at = now
        log.info("incident closed: %s", incident)
    incident.save(update_fields=["good_windows", "severity", "state", "closed_at", "updated_at"])
    recount(incident)
    return incident
