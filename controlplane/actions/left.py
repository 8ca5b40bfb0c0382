"""What is left after a change was kept: how much is still missed, and why no more is tried; and how
much was, where it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.actions.models import Action, State
from controlplane.actions.standing import overridden_at
from controlplane.diagnosis.cause import UNKNOWN
from controlplane.diagnosis.models import Diagnosis, Episode, Incident
from controlplane.diagnosis.selectors import advice, diagnosis_of
from controlplane.diagnosis.services import (
    BAD_WINDOWS_TO_OPEN,
    GOOD_WINDOWS_TO_CLOSE,
    window_is_good,
)
from slo.budget import Counts
from slo.indicator import Unit
from slo.models import Reading
from slo.readings import sums_measured
from tracing.types import Signal

WINDOWS_MAX = 40


@dataclass(frozen=True)
class Left:
    """While it goes on, `counts` are of the newest control windows in a row, from `since` on, that
    were not good, and `look` is the newest; once over, of all from `since`, when the change was
    kept, to `until`, when it was good at last or the change was overridden."""

    kept_at: datetime
    since: datetime
    counts: Counts
    unit: Unit
    look: Diagnosis | None = None
    until: datetime | None = None

    @property
    def words(self) -> str:
        """How much is missed since when, and why nothing more is changed; or was, until when."""
        told = {
            "since": _clock(self.since),
            "share": f"{self.counts.bad_share or 0:.1%}",
            "total": f"{self.counts.total:,.0f}",
            "counted": _(self.unit.word(self.counts.total)),
        }
        if self.until is not None:
            words = _(
                "from %(since)s to %(until)s, %(share)s of %(total)s %(counted)s missed it all "
                "the same"
            )
            return words % {**told, "until": _clock(self.until)}
        words = _(
            "since %(since)s, %(share)s of %(total)s %(counted)s missed it all the same; %(why)s"
        )
        unexplained = _("that is not explained, so nothing more is changed")
        why = self.look.facts["no_action"] if self.look and not self._unexplained else unexplained
        return words % {**told, "why": why}

    @property
    def nearest(self) -> list[str]:
        """Of what is not explained: what the nearest cause fails on, and what a person can do."""
        if self.look is None or not self._unexplained:
            return []
        return [self.look.because, advice(self.look)]

    @property
    def _unexplained(self) -> bool:
        return self.look is not None and self.look.cause == UNKNOWN


def left_of(incident: Incident, acted: Sequence[Action]) -> Left | None:
    """None unless the newest of `acted` was kept in this run of the incident and stands, a look was
    taken since and asked for nothing more, and as many windows in a row as open an incident were
    measured since and not good. Not good rather than bad: that is what keeps an incident open, and
    of what a kept change leaves little is over the bar that opens one.

    Of one that is over, see `left_in`.
    """
    if incident.state != Incident.State.OPEN:
        return left_in(incident, incident.run, acted)
    kept = acted[-1] if acted else None
    if kept is None or kept.ended_at is None:
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
    unit = incident.objective.unit
    return Left(kept.ended_at, _start(windows[-1]), counts, unit, look)


def left_in(incident: Incident, episode: Episode, acted: Sequence[Action]) -> Left | None:
    """What the last change that was kept in an episode left until that was over.

    None where none was, where it was over within two control windows, where no more was missed
    than a kept promise would show, and where that was not measured.
    """
    return lefts_in([(incident, episode, acted)])[0]


def lefts_in(cases: Sequence[tuple[Incident, Episode, Sequence[Action]]]) -> list[Left | None]:
    """`left_in` of many episodes in one query."""
    window = timedelta(seconds=settings.TRIMTAB_CONTROL_WINDOW_S)
    spans = [(case[0], _span(*case, window)) for case in cases]
    asked = {
        (incident.objective, incident.scope, at) for incident, span in spans for at in span or ()
    }
    sums = sums_measured(asked, window.total_seconds())

    def left(incident: Incident, since: datetime, until: datetime) -> Left | None:
        objective, scope = incident.objective, incident.scope
        first, last = (sums.get((objective, scope, at)) for at in (since, until))
        if first is None or last is None:
            return None
        counts = last - first
        if not counts.total or window_is_good(counts, objective.target):
            return None
        return Left(since, since, counts, objective.unit, until=until)

    return [left(incident, *span) if span else None for incident, span in spans]


def _span(
    incident: Incident, episode: Episode, acted: Sequence[Action], window: timedelta
) -> tuple[datetime, datetime] | None:
    """From when its last change was kept to the windows that ended it, or to when it was
    overridden."""
    if episode.closed_at is None or (incident.lapsed and episode.closed_at == incident.closed_at):
        return None
    kept = [action for action in acted if _kept_in(episode, action)]
    if not kept or kept[-1].ended_at is None:
        return None
    since, over = kept[-1].ended_at, overridden_at(kept[-1])
    until = episode.closed_at - GOOD_WINDOWS_TO_CLOSE * window
    until = min(until, over) if over else until
    return (since, until) if until - since >= BAD_WINDOWS_TO_OPEN * window else None


def _kept_in(episode: Episode, action: Action) -> bool:
    if action.state != State.VERIFIED or action.undoes_id or action.ended_at is None:
        return False
    end = episode.closed_at
    return episode.bad_since <= action.ended_at and (end is None or action.ended_at < end)


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


def _clock(at: datetime) -> str:
    return f"{timezone.localtime(at):%H:%M:%S}"


def _start(window: Reading) -> datetime:
    return window.window_end - timedelta(seconds=window.window_s)
