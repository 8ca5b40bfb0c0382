"""What is left after a change was kept: how much is still missed, and why no more is tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile

from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.actions.models import Action, State
from controlplane.diagnosis.cause import UNKNOWN
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.diagnosis.selectors import advice, diagnosis_of
from controlplane.diagnosis.services import BAD_WINDOWS_TO_OPEN, window_is_good
from slo.budget import Counts
from slo.models import Reading
from tracing.types import Signal

WINDOWS_MAX = 40


@dataclass(frozen=True)
class Left:
    """`counts` are of the newest control windows in a row, from `since` on, that were not good."""

    kept_at: datetime
    since: datetime
    counts: Counts
    look: Diagnosis

    @property
    def words(self) -> str:
        """How much is missed since when, and why nothing more is changed."""
        words = _(
            "since %(since)s, %(share)s of %(total)s %(counted)s missed it all the same; %(why)s"
        )
        unexplained = _("that is not explained, so nothing more is changed")
        return words % {
            "since": f"{timezone.localtime(self.since):%H:%M:%S}",
            "share": f"{self.counts.bad_share or 0:.1%}",
            "total": f"{self.counts.total:,.0f}",
            "counted": _(self.look.incident.objective.unit.word(self.counts.total)),
            "why": unexplained if self._unexplained else self.look.facts["no_action"],
        }

    @property
    def nearest(self) -> list[str]:
        """Of what is not explained: what the nearest cause fails on, and what a person can do."""
        return [self.look.because, advice(self.look)] if self._unexplained else []

    @property
    def _unexplained(self) -> bool:
        return self.look.cause == UNKNOWN


def left_of(incident: Incident, acted: Sequence[Action]) -> Left | None:
    """None unless the newest of `acted` was kept in this run of the incident and stands, a look was
    taken since and asked for nothing more, and as many windows in a row as open an incident were
    measured since and not good. Not good rather than bad: that is what keeps an incident open, and
    of what a kept change leaves little is over the bar that opens one.
    """
    kept = acted[-1] if acted else None
    if kept is None or kept.ended_at is None or incident.state != Incident.State.OPEN:
        return None
    if kept.state != State.VERIFIED or kept.undoes_id or kept.overridden:
        return None
    if kept.created_at < incident.run_since:
        return None
    look = diagnosis_of(incident)
    if look is None or look.made_at <= kept.ended_at or not look.facts.get("no_action"):
        return None
    windows = _missed(incident, kept.ended_at)
    if len(windows) < BAD_WINDOWS_TO_OPEN:
        return None
    counts = sum((Counts(w.good, w.total) for w in windows), Counts(0, 0))
    return Left(kept.ended_at, _start(windows[-1]), counts, look)


def _missed(incident: Incident, since: datetime) -> list[Reading]:
    """The newest windows, newest first, up to one that was good or not measured."""
    objective = incident.objective
    rows = Reading.objects.filter(
        objective=objective, scope=incident.scope, window_end__gt=since
    ).order_by("-window_end")[:WINDOWS_MAX]

    def missed(window: Reading) -> bool:
        good = window_is_good(Counts(window.good, window.total), objective.target)
        return _start(window) >= since and window.signal == Signal.OK and not good

    return list(takewhile(missed, rows))


def _start(window: Reading) -> datetime:
    return window.window_end - timedelta(seconds=window.window_s)
