"""The story line of an incident: what, because of what, what is done, and how far that has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from uuid import UUID

from django.db.models import Prefetch, prefetch_related_objects
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from controlplane.accounts.models import Tenant
from controlplane.actions.left import Left, left_of, lefts_in
from controlplane.actions.models import IN_FLIGHT, Action, State
from controlplane.actions.selectors import actions_since, earlier_of, sentence
from controlplane.actions.standing import overridden_at
from controlplane.alerts.message import sentences, severity_of
from controlplane.alerts.models import Delivery
from controlplane.diagnosis.cause import UNKNOWN
from controlplane.diagnosis.models import Diagnosis, Episode, Incident, Severity
from controlplane.diagnosis.selectors import (
    Story,
    diagnoses_in,
    diagnosis_of,
    incidents_open,
    incidents_recent,
    looks_again_at,
    story,
)

# A closed incident stays on the overview this long, so that its outcome is seen.
RECENT = timedelta(minutes=30)
RECENT_MAX = 20
# Of more attempts the first ones are only counted; the incident's page has all of them below.
ATTEMPTS_MAX = 3


@dataclass(frozen=True)
class Step:
    """One step of the way; `status` is done, now, next or failed. `note` says to whom, or why."""

    word: str
    status: str
    at: datetime | None = None
    note: str = ""


@dataclass(frozen=True)
class StoryLine:
    """`state` colours the rule: bad, act (something is being done) or ok (over). `earlier` is what
    it had come to before it opened again."""

    incident: Incident
    told: Story
    doing: str
    steps: tuple[Step, ...]
    state: str
    action: Action | None
    deliveries: tuple[Delivery, ...]
    actions: tuple[Action, ...]
    earlier: str = ""

    @property
    def severity(self) -> Severity:
        """As its messages have it: of the most urgent of what the story tells of."""
        return severity_of([self.incident, *(hit.incident for hit in self.told.hits)])

    @property
    def lasted_s(self) -> float:
        """How long it was seen to go on, every time together."""
        now = timezone.now()
        return sum(run.lasted(now).total_seconds() for run in self.incident.runs)

    @property
    def unmeasured_s(self) -> float:
        """How long nobody knows whether it went on."""
        return sum(run.unwatched.total_seconds() for run in self.incident.runs)


def story_lines(tenant: Tenant, now: datetime) -> list[StoryLine]:
    """Open incidents, oldest first, then those closed within RECENT, newest first."""
    lately = [
        incident
        for incident in incidents_recent(tenant, RECENT_MAX)
        if incident.closed_at is not None and incident.closed_at > now - RECENT
    ]
    return lines_of([*incidents_open(tenant), *lately])


def lines_of(incidents: Sequence[Incident]) -> list[StoryLine]:
    """The story of each incident; four queries for all of them together, one for each that is
    open, and one more after a kept change."""
    actions = Action.objects.select_related("engine").order_by("created_at")
    deliveries = Delivery.objects.select_related("channel").order_by("created_at")
    prefetch_related_objects(
        list(incidents),
        Prefetch("actions", actions.prefetch_related("transitions"), to_attr="acted"),
        Prefetch("deliveries", deliveries, to_attr="said"),
    )
    ended = [
        (incident, episode, incident.acted)  # type: ignore[attr-defined]
        for incident in incidents
        for episode in incident.runs[-2:]
        if episode.closed_at is not None
    ]
    keys = [(incident.pk, episode.opened_at) for incident, episode, _acted in ended]
    lefts = dict(zip(keys, lefts_in(ended), strict=True))
    return [_line(incident, lefts) for incident in incidents]


def _line(incident: Incident, lefts: Mapping[tuple[UUID, datetime], Left | None]) -> StoryLine:
    """`lefts` are what kept changes left of episodes that are over, by incident and opening."""
    told = story(incident)
    acted: tuple[Action, ...] = tuple(incident.acted)  # type: ignore[attr-defined]
    said: tuple[Delivery, ...] = tuple(incident.said)  # type: ignore[attr-defined]
    action = acted[-1] if acted else None
    running = action is not None and action.state in IN_FLIGHT
    over = incident.state == Incident.State.CLOSED
    *before, run = incident.runs
    left = lefts.get((incident.pk, run.opened_at)) if over else left_of(incident, acted)
    left_before = lefts.get((incident.pk, before[-1].opened_at)) if before else None
    return StoryLine(
        incident=incident,
        told=told,
        doing=sentences(_doing(incident, told, acted, left)),
        earlier=sentences(*earlier_of(incident, acted, left_before)),
        steps=tuple(_steps(incident, told, acted, said, left)),
        state="act" if running else "ok" if over else "bad",
        action=action,
        deliveries=said,
        actions=acted,
    )


def _doing(incident: Incident, told: Story, acted: Sequence[Action], left: Left | None) -> str:
    if lately := actions_since(acted, incident.run_since):
        return sentences(sentence(lately[-1]), _after(lately[-1], incident, told, left))
    if told.diagnosis is None:
        return ""
    if told.no_action:
        return told.no_action
    if told.cause == UNKNOWN:
        return _("Nothing is changed, because the evidence carries no cause.")
    return ""


def _after(action: Action, incident: Incident, told: Story, left: Left | None) -> str:
    """What is said behind the newest change: what it left, else why no other follows it."""
    if left is not None:
        return left.words
    if action.state in IN_FLIGHT or incident.state == Incident.State.CLOSED:
        return ""
    return told.no_action


def _steps(
    incident: Incident,
    told: Story,
    actions: Sequence[Action],
    said: Sequence[Delivery],
    left: Left | None,
) -> list[Step]:
    *earlier, run = incident.runs
    lately = actions_since(actions, run.bad_since)
    steps = _steps_before(incident, earlier, [a for a in actions if a not in lately], said)
    newest = [Step(_("again") if earlier else _("detected"), "done", run.opened_at)]
    first = min((made.made_at for made in diagnoses_in(incident, run)), default=None)
    newest.append(Step(_("explained"), "done", first) if first else Step(_("explain"), "now"))
    newest.append(_step_told([d for d in said if d.created_at >= run.opened_at]))
    newest.extend(_steps_tried(lately, told))
    if left is not None:
        newest.append(Step(_("not enough"), "failed", left.since))
    if run.closed_at is not None:
        went = [step for step in newest if step.at]  # nothing is to come any more
        return _as_it_went([*steps, *went, Step(_("over"), "done", run.closed_at)])
    to_come = _steps_to_come(actions, diagnosis_of(incident))
    return [*_as_it_went([*steps, *newest]), *to_come]


def _steps_before(
    incident: Incident,
    earlier: Sequence[Episode],
    actions: Sequence[Action],
    said: Sequence[Delivery],
) -> list[Step]:
    """The way of the episode before the newest, after the number of those before it."""
    if not earlier:
        return []
    steps, last = [], earlier[-1]
    if more := earlier[:-1]:
        words = ngettext("%d time before", "%d times before", len(more)) % len(more)
        steps.append(Step(words, "done", more[0].opened_at))
    way = [Step(_("again") if more else _("detected"), "done", last.opened_at)]
    if made := diagnoses_in(incident, last):
        way.append(Step(_("explained"), "done", made[-1].made_at))
    told = [d for d in said if last.opened_at <= d.created_at < incident.run.opened_at]
    if any(delivery.sent_at for delivery in told):
        way.append(_step_told(told))
    for action in actions_since(actions, last.bad_since)[-ATTEMPTS_MAX:]:
        way.extend(_steps_acted(action))
    way.append(Step(_("over"), "done", last.closed_at))
    return [*steps, *way]


def _as_it_went(steps: Sequence[Step]) -> list[Step]:
    """What is over by its time, as people are told while the agent acts; then what is to come."""
    dated = [(step.at, step) for step in steps if step.at is not None and step.status != "now"]
    over = [step for _at, step in sorted(dated, key=itemgetter(0))]
    return [*over, *(step for step in steps if step not in over)]


def _step_told(said: Sequence[Delivery]) -> Step:
    names = ", ".join(dict.fromkeys(delivery.channel.name for delivery in said))
    sent = [delivery.sent_at for delivery in said if delivery.sent_at is not None]
    if sent:
        return Step(_("told"), "done", min(sent), names)
    written = min((delivery.created_at for delivery in said), default=None)
    if any(delivery.state == Delivery.State.FAILED for delivery in said):
        return Step(_("not told"), "failed", written, names)
    if said and all(delivery.state == Delivery.State.SILENCED for delivery in said):
        return Step(_("silenced"), "next", written, names)
    return Step(_("tell"), "now" if said else "next", None, names)


def _steps_tried(actions: Sequence[Action], told: Story) -> list[Step]:
    """What was tried and what came of each, oldest first."""
    if not actions:
        if told.diagnosis is not None and (told.no_action or told.cause == UNKNOWN):
            return [Step(_("no action"), "next")]
        return [Step(_("act"), "next"), Step(_("verify"), "next")]
    steps = []
    if earlier := actions[:-ATTEMPTS_MAX]:
        words = ngettext("%d attempt", "%d attempts", len(earlier)) % len(earlier)
        steps.append(Step(words, "done", earlier[0].applied_at or earlier[0].created_at))
    for action in actions[-ATTEMPTS_MAX:]:
        steps.extend(_steps_acted(action))
    return steps


def _steps_acted(action: Action) -> list[Step]:
    state = action.state
    what = ", ".join(f"{knob}={change['to']}" for knob, change in action.changes.items())
    if state in (State.REJECTED, State.EXPIRED, State.FAILED):
        return [Step(_("not acted"), "failed", action.ended_at, what)]
    if action.applied_at is None:
        return [Step(_("acting"), "now", action.created_at, what), Step(_("verify"), "next")]
    acted = Step(_("acted"), "done", action.applied_at, what)
    if state == State.VERIFIED:
        kept = Step(_("kept"), "done", action.ended_at)
        over = overridden_at(action)
        if over is None:
            return [acted, kept]
        knob, value, by = (action.overridden[key] for key in ("knob", "value", "by"))
        back = value == action.changes[knob]["from"]
        who = _("by %(by)s") % {"by": by} if by else ""
        what = f"{knob}={value} {who}".strip()
        return [acted, kept, Step(_("set back") if back else _("overridden"), "done", over, what)]
    if state == State.ROLLED_BACK:
        return [acted, Step(_("rolled back"), "failed", action.ended_at)]
    if state == State.ROLLBACK_FAILED:
        return [acted, Step(_("rollback failed"), "failed", action.ended_at)]
    if state == State.ROLLING_BACK:
        return [acted, Step(_("rolling back"), "now")]
    return [acted, Step(_("verifying"), "now")]


def _steps_to_come(actions: Sequence[Action], newest: Diagnosis | None) -> list[Step]:
    """What follows the last attempt: from when on the next may come, as was found since."""
    if actions and actions[-1].holds:
        return [Step(_("wait for a person"), "now")]
    ended = actions[-1].ended_at if actions else None
    if newest is None or ended is None:
        return []
    if newest.made_at > ended:
        at = newest.next_try_at
        return [Step(_("next try from"), "next", at)] if at else []
    if actions[-1].state == State.VERIFIED:
        return []
    return [Step(_("look again"), "next", looks_again_at(ended))]
