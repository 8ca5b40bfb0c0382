"""Writes of policies and freezes: checked column by column, and told to the audit log."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from datetime import datetime, time
from functools import cache
from typing import Any
from zoneinfo import available_timezones

from django.db import transaction
from django.utils.translation import gettext_noop as _

from controlplane.accounts import audit
from controlplane.accounts.models import Tenant
from controlplane.actions.grant import COOL_DOWN_S_MAX
from controlplane.actions.knob import STEPS_MAX, Knob, knobs
from controlplane.actions.models import IN_FLIGHT, Action, Policy, Priority, State
from controlplane.actions.policy import DAYS, MODES, freeze_words
from controlplane.actions.undo import CannotUndo, withdraw
from controlplane.actions.words import Words, shown

log = logging.getLogger(__name__)

POLICIES_PER_TENANT_MAX = 1_000
FAILURES_PER_HOUR_MAX = 100
NAME_CHARS_MAX = 100
REASON_CHARS_MAX = 200
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d")


class PolicyError(ValueError):
    """What of a policy cannot be taken: the field, the value and what is allowed; in English,
    and as `words` for other languages."""

    def __init__(self, param: str, got: object, allowed: str) -> None:
        told = _("%(param)s: got %(got)s, allowed: %(allowed)s")
        self.words = Words(told, param=param, got=shown(got), allowed=allowed)
        super().__init__(str(self.words))
        self.param = param


def policy_set(
    *, tenant: Tenant, actor: str, now: datetime, values: Mapping[str, Any],
    service: str = "", engine: str = "",
) -> Policy:  # fmt: skip
    """Makes or replaces the policy of a scope; what `values` leaves out is as the wider scope says.

    A freeze of the scope stays as it is. Raises PolicyError.
    """
    unknown = sorted(set(values) - set(CHECKS))
    if unknown:
        raise PolicyError(
            unknown[0],
            values[unknown[0]],
            Words(_("only %(names)s"), names=", ".join(sorted(CHECKS))),
        )
    checked = {name: check(name, values.get(name)) for name, check in CHECKS.items()}
    with transaction.atomic():
        policy = _of_scope(tenant, service, engine)
        before = policy_values(policy)
        for name, value in checked.items():
            setattr(policy, name, value)
        policy.save()
        after = policy_values(policy)
        changed = {k: [before[k], after[k]] for k in after if before[k] != after[k]}
        _record(policy, actor, "set", {"changed": changed}, now)
    return policy


def policy_delete(*, policy: Policy, actor: str, now: datetime) -> None:
    """The scope is as the wider one has it from now on. Raises PolicyError while it is frozen.

    Again: changes nothing.
    """
    with transaction.atomic():
        stored = _stored(policy)
        if stored is None:
            return
        if words := freeze_words(stored, now):
            allowed = Words(_("deleting after the freeze is lifted"))
            raise PolicyError("freeze", str(words), allowed)
        _record(stored, actor, "deleted", policy_values(stored), now)
        stored.delete()


def freeze(
    *, tenant: Tenant, actor: str, now: datetime, reason: str, until: datetime | None = None,
    service: str = "", engine: str = "",
) -> Policy:  # fmt: skip
    """From now on nothing is changed in the scope, and what is on trial there is undone.

    Going back stays open: undoing what is on trial, and rolling back what was kept. Raises
    PolicyError without a reason, or with an end that has passed.
    """
    reason = reason.strip()
    if not 0 < len(reason) <= REASON_CHARS_MAX:
        raise PolicyError("reason", reason, _characters(1, REASON_CHARS_MAX))
    if until is not None and until <= now:
        allowed = Words(_("a time after %(now)s"), now=now.isoformat())
        raise PolicyError("until", until.isoformat(), allowed)
    with transaction.atomic():
        policy = _of_scope(tenant, service, engine)
        policy.frozen_at, policy.frozen_by = now, actor
        policy.freeze_until, policy.freeze_reason = until, reason
        policy.save()
        _record(policy, actor, "frozen", {"reason": reason, "until": until}, now)
    for action in _in_flight(policy):
        try:
            _stop(action, policy, actor, now)
        except CannotUndo:
            continue  # it has been proved and is being kept, or is being undone already
        except Exception:  # one action in trouble does not stop the others; the loop tries again
            log.exception("action %s: could not be withdrawn", action.pk)
    return policy


def _stop(action: Action, policy: Policy, actor: str, now: datetime) -> None:
    """Withdraws the action, wherever it moves meanwhile; each state is met once at most."""
    for _step in State:
        if withdraw(action, freeze_words(policy, now), by="frozen", actor=actor, now=now):
            return
        action = Action.objects.select_related("engine", "tenant").get(pk=action.pk)


def unfreeze(*, policy: Policy, actor: str, now: datetime) -> Policy:
    """Lifts a freeze. Again: changes nothing."""
    with transaction.atomic():
        stored = _stored(policy)
        if stored is None or stored.frozen_at is None:
            return stored or policy
        _record(stored, actor, "unfrozen", {"was": freeze_words(stored, now)}, now)
        stored.frozen_at = stored.freeze_until = None
        stored.freeze_reason = stored.frozen_by = ""
        stored.save()
    return stored


def policy_values(policy: Policy) -> dict[str, Any]:
    """What the policy itself says, column by column; None or empty: as the wider scope has it."""
    return {name: getattr(policy, name) for name in CHECKS}


def _of_scope(tenant: Tenant, service: str, engine: str) -> Policy:
    if service and engine:
        raise PolicyError("service", service, Words(_("a service or an engine, not both")))
    for param, name in (("service", service), ("engine", engine)):
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise PolicyError(param, name[:NAME_CHARS_MAX], _characters(0, NAME_CHARS_MAX))
    # The lock on the tenant: two who make the first policy of a scope make one.
    Tenant.objects.select_for_update().get(pk=tenant.pk)
    mine = Policy.objects.filter(tenant=tenant)
    policy = mine.filter(service=service, engine=engine).first()
    if policy is None and mine.count() >= POLICIES_PER_TENANT_MAX:
        allowed = Words(_("%(count)d policies per tenant"), count=POLICIES_PER_TENANT_MAX)
        raise PolicyError("service", service, allowed)
    return policy or Policy(tenant=tenant, service=service, engine=engine)


def _stored(policy: Policy) -> Policy | None:
    """The policy as it is now, not as it was when somebody looked; None once deleted. What changes
    policies waits for the end of the transaction, as it takes the same lock."""
    Tenant.objects.select_for_update().get(pk=policy.tenant_id)
    return Policy.objects.filter(pk=policy.pk).first()


def _characters(low: int, high: int) -> Words:
    return Words(_("%(low)d to %(high)d characters"), low=low, high=high)


def _in_flight(policy: Policy) -> list[Action]:
    rows = Action.objects.filter(tenant=policy.tenant_id, state__in=IN_FLIGHT)
    rows = rows.exclude(undoes__isnull=False, priority=Priority.PERSON)
    if policy.engine:
        rows = rows.filter(engine__name=policy.engine)
    elif policy.service:
        rows = rows.filter(engine__service=policy.service)
    return list(rows.select_related("engine", "tenant"))


def _record(
    policy: Policy, actor: str, verb: str, detail: Mapping[str, Any], now: datetime
) -> None:
    audit.record(
        tenant=policy.tenant, actor=actor, verb=verb, noun="policy", subject=str(policy),
        detail=detail, at=now,
    )  # fmt: skip


# -- one check a column: the value to store, or PolicyError -------------------------------------


def _mode(param: str, value: Any) -> str:
    if value in (None, ""):
        return ""
    if value not in MODES:
        raise PolicyError(param, value, ", ".join(MODES))
    return str(value)


def _whole(low: int, high: int) -> Callable[[str, Any], int | None]:
    def check(param: str, value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            allowed = Words(_("a whole number from %(low)d to %(high)d"), low=low, high=high)
            raise PolicyError(param, value, allowed)
        return value

    return check


def _flag(param: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise PolicyError(param, value, "true, false or null")


def _bounds(param: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PolicyError(param, value, 'an object, as {"max_num_seqs": {"maximum": 64}}')
    for slug, bound in value.items():
        knob = knobs().get(slug)
        if knob is None:
            raise PolicyError(f"{param}.{slug}", bound, f"knobs: {', '.join(sorted(knobs()))}")
        _bound(f"{param}.{slug}", bound, knob)
    return value


def _bound(param: str, bound: Any, knob: Knob) -> None:
    allowed = {"choices"} if knob.choices else {"minimum", "maximum"}
    if not isinstance(bound, dict) or not bound or set(bound) - allowed:
        raise PolicyError(param, bound, f"an object of {', '.join(sorted(allowed))}")
    if knob.choices:
        chosen = bound["choices"]
        fits = isinstance(chosen, list) and 1 <= len(chosen) <= len(knob.choices)
        if not fits or any(choice not in knob.choices for choice in chosen):
            raise PolicyError(f"{param}.choices", chosen, f"some of {', '.join(knob.choices)}")
        return
    for side, limit in bound.items():
        _whole(knob.minimum, knob.maximum)(f"{param}.{side}", limit)
        if limit is None:
            raise PolicyError(f"{param}.{side}", limit, "a whole number, or leave it out")
    if bound.get("minimum", knob.minimum) > bound.get("maximum", knob.maximum):
        raise PolicyError(f"{param}.minimum", bound, "at most the maximum")


def _quiet_hours(param: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    shape = '{"from": "22:00", "until": "07:00", "days": ["mon"], "time_zone": "Europe/Berlin"}'
    known = {"from", "until", "days", "time_zone"}
    if not isinstance(value, dict) or set(value) - known or not {"from", "until"} <= set(value):
        raise PolicyError(param, value, f"an object as {shape}; days may be left out")
    for side in ("from", "until"):
        if not isinstance(value[side], str) or not _TIME.fullmatch(value[side]):
            raise PolicyError(f"{param}.{side}", value[side], "a time of day, 00:00 to 23:59")
    if time.fromisoformat(value["from"]) == time.fromisoformat(value["until"]):
        raise PolicyError(f"{param}.until", value["until"], "another time than from")
    days = value.get("days", [])
    fits = isinstance(days, list) and len(days) <= len(DAYS)
    if not fits or any(day not in DAYS for day in days):
        raise PolicyError(f"{param}.days", days, f"a list of {', '.join(DAYS)}; empty: every day")
    zone = value.get("time_zone", "UTC")
    if not isinstance(zone, str) or zone not in time_zones():
        raise PolicyError(f"{param}.time_zone", zone, "an IANA name, as Europe/Berlin")
    return {"from": value["from"], "until": value["until"], "days": days, "time_zone": zone}


@cache
def time_zones() -> frozenset[str]:
    return frozenset(available_timezones())


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "mode": _mode,
    "cool_down_harmful_s": _whole(0, COOL_DOWN_S_MAX),
    "cool_down_unproven_s": _whole(0, COOL_DOWN_S_MAX),
    "steps_max": _whole(1, STEPS_MAX),
    "barrier": _flag,
    "failures_per_hour_max": _whole(1, FAILURES_PER_HOUR_MAX),
    "quiet_hours": _quiet_hours,
    "bounds": _bounds,
}
