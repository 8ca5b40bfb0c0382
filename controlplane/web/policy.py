"""Policies in words: which scope, what it says, what holds for an engine and who says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from controlplane.accounts.models import Tenant
from controlplane.actions.knob import Knob, knobs
from controlplane.actions.models import Policy
from controlplane.actions.policies import policy_values
from controlplane.actions.policy import COLUMNS, Rules, freeze_words, node_stop
from controlplane.actions.words import translated
from controlplane.fleet.models import Engine
from controlplane.web.templatetags.ui import duration, number, setting, state_word
from slo.models import Objective

DAY_WORDS: dict[str, Promise] = {
    "mon": gettext_lazy("Mon"),
    "tue": gettext_lazy("Tue"),
    "wed": gettext_lazy("Wed"),
    "thu": gettext_lazy("Thu"),
    "fri": gettext_lazy("Fri"),
    "sat": gettext_lazy("Sat"),
    "sun": gettext_lazy("Sun"),
}
LABELS: dict[str, Promise] = {
    "mode": gettext_lazy("Mode"),
    "cool_down_harmful_s": gettext_lazy("Cool-down, harmful"),
    "cool_down_unproven_s": gettext_lazy("Cool-down, unproven"),
    "steps_max": gettext_lazy("Largest step"),
    "barrier": gettext_lazy("Barrier knobs"),
    "failures_per_hour_max": gettext_lazy("Failures per hour"),
    "quiet_hours": gettext_lazy("Quiet hours"),
}


@dataclass(frozen=True)
class Scope:
    """What a policy is about: the tenant (both empty), a service, or an engine."""

    service: str = ""
    engine: str = ""

    def __str__(self) -> str:
        if self.engine:
            return _("engine %s") % self.engine
        return _("service %s") % self.service if self.service else _("the tenant")

    @property
    def query(self) -> str:
        """The end of an address that names it."""
        named = {"service": self.service, "engine": self.engine}
        given = {key: name for key, name in named.items() if name}
        return f"?{urlencode(given)}" if given else ""

    @property
    def names(self) -> dict[str, str]:
        return {"service": self.service, "engine": self.engine}


@dataclass(frozen=True)
class Term:
    """One term: `knob` where it bounds one, else `label`; `scope` says it, None: the default."""

    label: str
    words: str
    knob: str = ""
    scope: Scope | None = None
    says: str = ""


def scopes_of(tenant: Tenant, engines: list[Engine]) -> list[Scope]:
    """The tenant, its services, and the engines with a policy of their own, widest first."""
    written = [Scope(row.service, row.engine) for row in Policy.objects.filter(tenant=tenant)]
    promised = Objective.objects.filter(tenant=tenant).values_list("service", flat=True)
    services = {engine.service for engine in engines} | set(promised)
    services |= {scope.service for scope in written}
    return [
        Scope(),
        *(Scope(service=name) for name in sorted(services - {""})),
        *sorted((scope for scope in written if scope.engine), key=str),
    ]


def own_terms(policy: Policy | None) -> list[Term]:
    """What the policy itself says; nothing where it says what the wider scope does."""
    if policy is None:
        return []
    values = policy_values(policy)
    said = [
        Term(str(LABELS[name]), WORDS[name](values[name]))
        for name in COLUMNS
        if values[name] is not None and values[name] != ""
    ]
    bounds = policy.bounds.items()
    return said + [Term("", _bound_words(bound), knob=knob) for knob, bound in bounds]


def terms_in_force(rules: Rules, engine: Engine) -> list[Term]:
    """Every term that holds for the engine, knobs last, each with the scope that says it."""
    terms = [
        Term(str(LABELS[name]), WORDS[name](getattr(rules, name)), **_origin(rules, name, engine))
        for name in COLUMNS
    ]
    for slug, knob in sorted(knobs().items()):
        if slug in engine.knobs or slug in rules.bounds:
            words = _range_words(knob, rules, engine.knobs.get(slug, {}))
            origin = _origin(rules, f"bounds.{slug}", engine)
            terms.append(Term("", words, knob=slug, **origin))
    return terms


def origin_words(rules: Rules, name: str, engine: Engine) -> str:
    """Who says this term, in the language of the page."""
    origin = _origin(rules, name, engine)
    return str(origin["scope"] or origin["says"])


def freeze_said(policy: Policy, now: datetime) -> str:
    """As freeze_words, in the language of the page; "" when no freeze is in force."""
    return translated(freeze_words(policy, now))


def stopped_words(engine: Engine, rules: Rules, now: datetime) -> str:
    """Why nobody may change anything on the engine now; "" when they may."""
    if frozen := next((said for f in rules.freezes if (said := freeze_said(f, now))), ""):
        return frozen
    if node_stop(engine):
        return _("the stop file of node %s exists") % engine.node.name
    return ""


def held_words(engine: Engine, rules: Rules, now: datetime, *, failed: str) -> str:
    """Why nothing is changed by itself on the engine now; "" when it may be. `failed`: what could
    not be undone there."""
    if stopped := stopped_words(engine, rules, now):
        return stopped
    if failed:
        return translated(failed)
    if quiet := rules.quiet(now):
        return _("quiet hours until %s") % quiet.removeprefix("quiet hours until ")
    return ""


def _origin(rules: Rules, name: str, engine: Engine) -> dict[str, Any]:
    said = rules.origin.get(name, "")
    scopes = (Scope(engine=engine.name), Scope(service=engine.service), Scope())
    for scope in scopes:
        if said == str(Policy(**scope.names)):
            return {"scope": scope, "says": ""}
    usual = _("knob and engine") if name.startswith("bounds.") else _("the default")
    return {"scope": None, "says": said or usual}


def _range_words(knob: Knob, rules: Rules, reported: Mapping[str, Any]) -> str:
    if knob.choices:
        own = rules.bounds.get(knob.slug, {}).get("choices")
        return ", ".join(knob.options(reported.get("choices"), own)) or _("none")
    low, high = rules.knob_bounds(knob, reported)
    return _("%(low)s to %(high)s") % {"low": number(low), "high": number(high)}


def _bound_words(bound: Mapping[str, Any]) -> str:
    if "choices" in bound:
        return ", ".join(bound["choices"]) or _("none")
    low, high = bound.get("minimum"), bound.get("maximum")
    if low is None:
        return _("at most %s") % number(high)
    if high is None:
        return _("at least %s") % number(low)
    return _("%(low)s to %(high)s") % {"low": number(low), "high": number(high)}


def _quiet_words(hours: Mapping[str, Any] | None) -> str:
    if not hours:
        return _("none")
    days = [str(DAY_WORDS[day]) for day in hours.get("days") or ()]
    times = f"{hours['from']}–{hours['until']}"
    return " ".join(filter(None, (times, hours["time_zone"], ", ".join(days))))


WORDS: dict[str, Callable[[Any], str]] = {
    "mode": state_word,
    "cool_down_harmful_s": lambda value: duration(float(value)),
    "cool_down_unproven_s": lambda value: duration(float(value)),
    "steps_max": lambda value: ngettext("%d ladder step", "%d ladder steps", value) % value,
    "barrier": lambda value: _("as hot ones") if value else _("a person decides"),
    "failures_per_hour_max": lambda value: _("from %s on a person decides") % setting(value),
    "quiet_hours": _quiet_words,
}
