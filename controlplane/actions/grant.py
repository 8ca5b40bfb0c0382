"""Which of a cause's wishes may be granted, and with which value: ladder, bounds and cool-downs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext_noop as _

from controlplane.actions.knob import Knob, knobs
from controlplane.actions.models import Action, Priority, State
from controlplane.actions.policy import FAILED_STATES, Rules, unproven
from controlplane.actions.words import Words, shown
from controlplane.diagnosis.models import Diagnosis
from controlplane.fleet.models import Engine

COOL_DOWN_S_MAX = 86_400
SWAPPABLE = ("hot", "barrier")


@dataclass(frozen=True)
class Granted:
    """A knob, the value to set, which of the named causes wished for it, and what is expected."""

    knob: Knob
    value: int | str
    cause: str
    why: str
    predicted: dict[str, Any]


def choose(
    diagnosis: Diagnosis, engine: Engine, rules: Rules, now: datetime, *, shedding: bool = False
) -> Granted | str:
    """The first wish that can be granted, or why none can; with `shedding` only those that shed."""
    reasons: list[str] = []
    since = now - timedelta(seconds=COOL_DOWN_S_MAX)
    recent = list(Action.objects.filter(engine=engine, ended_at__gte=since))
    for wish in diagnosis.remedy:
        knob = knobs().get(wish["knob"])
        if knob is None:
            reasons.append(f"no knob {wish['knob']!r}")
            continue
        if shedding and not knob.sheds:
            continue
        granted = grant(knob, wish, engine, rules)
        if isinstance(granted, Refused):
            reasons.append(granted)
        elif cooling := _cooling(knob, granted, engine, recent, rules, now):
            reasons.append(cooling)
        else:
            cause = wish.get("cause", diagnosis.cause)
            predicted = predict(diagnosis, wish, engine, granted)
            return Granted(knob, granted, cause, wish["why"], predicted)
    told, waits = "; ".join(reasons), [why.until for why in reasons if isinstance(why, Waits)]
    return Waits(told, min(waits)) if waits else told


def value_refusal(knob: Knob | None, slug: str, value: object, engine: Engine, rules: Rules) -> str:
    """Why a person may not set this value; "" when they may.

    A person is bound by what the engine takes and by the policy's bounds, not by the ladder.
    """
    current, reported = engine.values.get(slug), engine.knobs.get(slug)
    if current is None or reported is None:
        told = _("%(knob)s: %(engine)s has no such knob; it has: %(knobs)s")
        return Words(told, knob=slug, engine=engine.name, knobs=", ".join(sorted(engine.knobs)))
    if knob is None:
        told = _("%(knob)s: not a knob Trimtab turns; it turns: %(knobs)s")
        return Words(told, knob=slug, knobs=", ".join(sorted(knobs())))
    if refusal := _unfit(knob, reported, engine):
        return Words(_("%(knob)s: %(why)s"), knob=slug, why=refusal)
    if knob.choices:
        options = _options(knob, reported, rules)
        if value not in options:
            told = _("%(knob)s: got %(got)s, allowed: %(allowed)s")
            return Words(told, knob=slug, got=shown(value), allowed=", ".join(options))
        return ""
    low, high = rules.knob_bounds(knob, reported)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        told = _("%(knob)s: got %(got)s, allowed: a whole number from %(low)s to %(high)s")
        return Words(told, knob=slug, got=shown(value), low=f"{low:g}", high=f"{high:g}")
    return ""


def predict(
    diagnosis: Diagnosis, wish: Mapping[str, Any], engine: Engine, value: int | str
) -> dict[str, Any]:
    """What is expected of the change, to be shown beside what was measured.

    `covered` is the share of the wish the value goes; the whole way, the objective is expected to
    be kept: at most `bad_share_max` of the requests bad, None where part of the way promises no
    share. `facts` are the diagnosis' numbers.
    """
    wanted, current = wish["to"], engine.values[wish["knob"]]
    covered = 1.0
    if isinstance(value, int) and isinstance(wanted, int | float):
        short = value < wanted if value > current else value > wanted
        if short and wanted != current:
            covered = round((value - current) / (wanted - current), 3)
    told = wish["why"]
    if covered < 1:
        wish_for = _whole(wanted, up=wanted > current)
        told += f"; that asks for {wish_for}, and {value} is as far as one change goes"
    budget = round(1 - diagnosis.incident.objective.target, 6)
    return {
        "sentence": told,
        "wanted": wanted,
        "covered": covered,
        "bad_share_max": budget if covered == 1 else None,
        "facts": {
            name: fact
            for name, fact in diagnosis.facts.items()
            if isinstance(fact, int | float) and not isinstance(fact, bool)
        },
    }


def _whole(wanted: float, *, up: bool) -> int:
    """Rounded away from what is set: a wish for 32.4 running requests is one for 33."""
    return math.ceil(wanted) if up else math.floor(wanted)


class Refused(str):
    """The words of a refusal, apart from a choice, which is text too."""

    __slots__ = ()


class Waits(str):
    """Why a change has to wait, and until when."""

    __slots__ = ("until",)
    until: datetime

    def __new__(cls, words: str, until: datetime) -> Waits:
        self = super().__new__(cls, words)
        self.until = until
        return self


def grant(knob: Knob, wish: Mapping[str, Any], engine: Engine, rules: Rules) -> int | str | Refused:
    """The value to set, or why the wish is refused."""
    current, reported = engine.values.get(knob.slug), engine.knobs.get(knob.slug)
    if current is None or reported is None:
        return Refused(f"{engine.name} has no {knob.slug}")
    if refusal := _unfit(knob, reported, engine):
        return Refused(refusal)
    if knob.choices:
        return _granted_choice(knob, wish["to"], current, _options(knob, reported, rules))
    if not isinstance(current, int | float) or not isinstance(wish["to"], int | float):
        return Refused(f"{knob.slug} is {current}, and {wish['to']} is no number")
    low, high = rules.knob_bounds(knob, reported)
    if wish.get("exact"):
        return _back_to(knob, wish["to"], current, low, high)
    up = wish["to"] > current
    if wish.get("limit") is not None:
        low, high = (low, min(high, wish["limit"])) if up else (max(low, wish["limit"]), high)
    target = knob.step(current, wish["to"], bounds=(low, high), steps_max=rules.steps_max)
    if target is None:
        way = "above" if up else "below"
        return Refused(
            f"{knob.slug} is {current}, and there is no step {way} it within {low:g} to {high:g}"
        )
    if wish.get("whole") and (target < wish["to"] if up else target > wish["to"]):
        return Refused(
            f"{knob.slug} is {current}, and {target} is as far as one change goes within {low:g} "
            f"to {high:g}; it takes {_whole(wish['to'], up=up)}, and part of the way would do harm"
        )
    return target


def _back_to(knob: Knob, want: float, current: float, low: float, high: float) -> int | Refused:
    """A value that was in force before: no step into the unknown, so only the bounds bind it."""
    if want == current or want != int(want) or not low <= want <= high:
        return Refused(
            f"{knob.slug} is {current}, and {want:g} is not to be gone back to within "
            f"{low:g} to {high:g}"
        )
    return int(want)


def _unfit(knob: Knob, reported: Mapping[str, Any], engine: Engine) -> str:
    if reported.get("supported") is False:
        told = _("%(engine)s cannot change %(knob)s: %(reason)s")
        reason = reported.get("reason") or Words(_("not supported there"))
        return Words(told, engine=engine.name, knob=knob.slug, reason=reason)
    if reported.get("apply_class", knob.apply_class) not in SWAPPABLE:
        told = _("%(knob)s cannot be changed while %(engine)s serves")
        return Words(told, knob=knob.slug, engine=engine.name)
    return ""


def _options(knob: Knob, reported: Mapping[str, Any], rules: Rules) -> tuple[str, ...]:
    return knob.options(reported.get("choices"), rules.bounds.get(knob.slug, {}).get("choices"))


def _granted_choice(
    knob: Knob, want: object, current: object, options: Sequence[str]
) -> str | Refused:
    if want == current:
        return Refused(f"{knob.slug} is {current} already")
    if want not in options:
        allowed = ", ".join(options) or "nothing"
        return Refused(f"{knob.slug} is {current}, and {want} is not allowed, only: {allowed}")
    return str(want)


def _cooling(
    knob: Knob,
    value: int | str,
    engine: Engine,
    recent: Sequence[Action],
    rules: Rules,
    now: datetime,
) -> Waits | None:
    """Why the change has to wait for what was tried or moved lately; None when it has not."""
    current = engine.values[knob.slug]
    for action in recent:
        change = action.changes.get(knob.slug)
        if change is None:
            continue
        assert action.ended_at is not None
        ago = now - action.ended_at
        same_way = _same_way(change, current, value)
        wait = rules.cool_down(action)
        too_short = unproven(action) and _farther(change, value)
        if same_way and action.state in FAILED_STATES and ago < wait and not too_short:
            return _waits(f"{knob.slug} was just tried this way and not kept", action, wait)
        if same_way and _turned_down(action) and ago < wait:
            return _waits(f"{knob.slug} was turned down by a person", action, wait)
        settled = timedelta(seconds=rules.cool_down_harmful_s)
        if not same_way and action.state == State.VERIFIED and ago < settled:
            if knob.sheds and action.undoes_id is not None and action.priority == Priority.TUNING:
                continue  # serving again is cheap to try because it never holds shedding up
            return _waits(f"{knob.slug} was just moved the other way", action, settled)
    return None


def _waits(why: str, tried: Action, wait: timedelta) -> Waits:
    assert tried.ended_at is not None
    until = tried.ended_at + wait
    minutes = wait.total_seconds() / 60
    return Waits(f"{why}; waiting {minutes:g} min, until {until:%H:%M:%S}", until)


def _turned_down(action: Action) -> bool:
    return action.state == State.REJECTED and action.outcome.get("withdrawn") == "person"


def _same_way(change: Mapping[str, Any], current: Any, value: Any) -> bool:
    numbers = (change["from"], change["to"], current, value)
    if all(isinstance(n, int | float) for n in numbers):
        return bool((change["to"] > change["from"]) == (value > current))
    return bool(change["to"] == value)


def _farther(change: Mapping[str, Any], value: Any) -> bool:
    """Whether `value` goes the same way beyond what the change tried."""
    if not all(isinstance(n, int | float) for n in (change["from"], change["to"], value)):
        return False
    return bool(value > change["to"] if change["to"] > change["from"] else value < change["to"])
