"""Whether what was kept still stands: until somebody sets its knob to another value."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.accounts.models import Tenant
from controlplane.actions.ledger import note
from controlplane.actions.models import UNDER_WAY, Action, State
from controlplane.fleet.models import Command, Engine


def overridden_note(tenant: Tenant, now: datetime) -> None:
    """Writes down of each kept change what was set over it since, and by whom. Once overridden it
    does not stand again, whatever value comes back.

    While another change is on trial nobody knows yet what will stand.
    """
    kept = Action.objects.filter(tenant=tenant, state=State.VERIFIED, overridden={})
    on_trial = Action.objects.filter(tenant=tenant, state__in=UNDER_WAY).values("engine")
    for action in kept.exclude(engine__in=on_trial).select_related("engine"):
        engine = action.engine
        for knob, change in action.changes.items():
            if engine.values.get(knob, change["to"]) != change["to"]:
                note(action, overridden=_by_whom(engine, knob, now))
                break


def overridden_at(action: Action) -> datetime | None:
    at = action.overridden.get("at")
    return datetime.fromisoformat(at) if at else None


def overridden_words(action: Action) -> str:
    """What was set over a kept change, when and by whom; "" while it stands."""
    at, over = overridden_at(action), action.overridden
    if at is None:
        return ""
    back = over["value"] == action.changes[over["knob"]]["from"]
    same_day = action.ended_at is not None and at.date() == action.ended_at.date()
    words = _("set back to %(value)s at %(at)s") if back else _("set to %(value)s at %(at)s")
    told = words % {
        "value": over["value"],
        "at": f"{timezone.localtime(at):{'%H:%M:%S' if same_day else '%Y-%m-%d %H:%M:%S'}}",
    }
    if len(action.changes) > 1:
        told = f"{over['knob']} {told}"
    return _("%(told)s by %(by)s") % {"told": told, "by": over["by"]} if over["by"] else told


def _by_whom(engine: Engine, knob: str, now: datetime) -> dict[str, object]:
    noted = engine.set_by.get(knob, {})
    by = str(noted.get("by", ""))
    return {
        "knob": knob,
        "value": engine.values[knob],
        "by": _actor(by) or by,
        "at": str(noted.get("at") or now.isoformat()),
    }


def _actor(by: str) -> str:
    """Whose change it was that an agent of ours made, or took back; "" for anybody else."""
    program, _space, command_id = by.rpartition(" ")
    if not program.startswith("trimtab-agent"):
        return ""
    try:
        command = Command.objects.filter(pk=UUID(command_id)).first()
    except ValueError:
        return ""
    action = Action.objects.filter(pk=command.action_id).first() if command else None
    return action.actor if action else ""
