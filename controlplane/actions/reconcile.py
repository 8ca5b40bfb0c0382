"""One step of an action, by its state, from facts alone.

    proposed ─▶ approved ─▶ dispatched ─▶ acknowledged ─▶ applied ─▶ verifying ─▶ verified
        │           │            └──────────────┴────────────┴───────────┴─▶ rolling_back
        └─ expired ─┘                                                             └▶ rolled_back

Each step reads rows, decides, and writes the transition and the command it needs in one database
transaction. Nothing is remembered between passes. The agent's word on the apply command counts
above everything: it may undo a trial by itself (no commit in time), and then says so there. What
leads back is in undo.py.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_noop as _

from controlplane.accounts.models import Tenant
from controlplane.actions import verify
from controlplane.actions.facts import AGENT, AUTOPILOT, Facts
from controlplane.actions.grant import value_refusal
from controlplane.actions.knob import knobs
from controlplane.actions.ledger import note
from controlplane.actions.models import UNDER_WAY, Action, Priority, State, Verdict
from controlplane.actions.policy import rules_of, undo_failed, waits_for_person
from controlplane.actions.trial import judge
from controlplane.actions.undo import (
    SILENCE_MAX,
    clock,
    end_trial,
    left_by_agent,
    revert,
    rolling_back,
    undone_by_agent,
    withdraw,
)
from controlplane.actions.words import Words
from controlplane.diagnosis.explaining import diagnosis_confirm
from controlplane.diagnosis.models import Incident
from controlplane.fleet.selectors import commands_of, engine_state
from controlplane.fleet.services import command_create
from gpu_agent.protocol import CommandKind, CommandState
from tracing.types import Reader

ANSWER_WITHIN = timedelta(seconds=15)  # after the deadline, for a result that is on its way
TTL_TIMES_MAX = 2  # of TRIMTAB_ACTION_TTL_S, where a queue has to drain before anything is seen
DISPATCH_WITHIN = timedelta(seconds=30)
KEPT = (verify.Verdict.BETTER, verify.Verdict.NO_WORSE)


def reconcile(action: Action, *, reader: Reader, now: datetime) -> bool:
    """Drives one action until the facts carry it no further; whether it moved."""
    moved = False
    for _step in State:  # a bound: no path visits a state twice
        step = STEPS.get(action.state)
        commands = dict(commands_of(action.pk))
        if step is None or not step(Facts(action, commands, reader, now)):
            break
        moved = True
    return moved


def _proposed(facts: Facts) -> bool:
    """A proposal that waits for a person stands as long as it makes sense."""
    action, now = facts.action, facts.now
    if frozen := _frozen(action, now):
        return facts.end(State.REJECTED, frozen)
    by_person = action.priority == Priority.PERSON
    if not by_person and (held := undo_failed(action.engine)):
        return facts.end(State.REJECTED, held)
    waits = not by_person and waits_for_person(action, rules_of(action.engine), now)
    if by_person or (action.supersedes_id and not waits):
        return _proposed_instead(facts)
    if waits:
        overtaken = overtaken_by(action)
        return bool(overtaken) and facts.end(State.REJECTED, overtaken)
    if now > action.deadline:
        return facts.end(State.EXPIRED, "it was not approved in time")
    if _under_way(action):
        return False
    return facts.move(State.APPROVED, "within its bounds; the policy is auto")


def _proposed_instead(facts: Facts) -> bool:
    """Goes once the engine is free and runs again what the change was meant to start from."""
    action, now = facts.action, facts.now
    former, engine = _under_way(action), action.engine
    engine.refresh_from_db()
    ready = former is None and engine.config_version is not None
    if ready and all(engine.values.get(k) == c["from"] for k, c in action.changes.items()):
        return facts.move(
            State.APPROVED,
            "the engine is free for it",
            expected_config_version=engine.config_version,
            deadline=now + DISPATCH_WITHIN,
        )
    if now <= action.deadline:
        return False
    why = f"{former} was still being undone" if former else "the engine runs other values than then"
    return facts.end(State.EXPIRED, why)


def _under_way(action: Action) -> Action | None:
    others = Action.objects.filter(engine=action.engine_id, state__in=UNDER_WAY)
    return others.exclude(pk=action.pk).first()


def _frozen(action: Action, now: datetime) -> str:
    """Why the action must not go on; a person's way back to what was is always open."""
    going_back = action.undoes_id is not None and action.priority == Priority.PERSON
    return "" if going_back else rules_of(action.engine).frozen(now)


def overtaken_by(action: Action) -> str:
    """What has made a standing proposal pointless; empty when nothing has."""
    incident = action.incident
    over = incident is None or incident.state == Incident.State.CLOSED
    if over and action.undoes_id is None:
        return Words(_("the incident is over without it"))
    return _changed_meanwhile(action)


def _changed_meanwhile(action: Action) -> str:
    action.engine.refresh_from_db()
    version = action.engine.config_version
    if version == action.expected_config_version:
        return ""
    told = _(
        "someone changed the engine's configuration meanwhile (version %(version)s, not %(wanted)s)"
    )
    return Words(told, version=version, wanted=action.expected_config_version)


def out_of_bounds(action: Action) -> str:
    """Why the policy of now forbids the values; "" when not. A way back is always open."""
    if action.undoes_id is not None:
        return ""
    engine, rules = action.engine, rules_of(action.engine)
    refusals = (
        value_refusal(knobs().get(slug), slug, change["to"], engine, rules)
        for slug, change in action.changes.items()
    )
    return next(filter(None, refusals), "")


def _approved(facts: Facts) -> bool:
    action = facts.action
    if facts.now > action.deadline:
        return facts.end(State.EXPIRED, "the engine could not be reached in time")
    if engine_state(action.engine, facts.now) != "ok":
        return False
    with transaction.atomic():
        # Whoever freezes or narrows a policy holds this too: it counts from its first moment on.
        Tenant.objects.select_for_update().get(pk=action.tenant_id)
        overtaken = (
            _changed_meanwhile(action) or _frozen(action, facts.now) or out_of_bounds(action)
        )
        if overtaken:
            return facts.end(State.REJECTED, overtaken)
        if not facts.move(State.DISPATCHED, "apply command written for the agent"):
            return False
        command_create(
            engine=action.engine,
            action_id=action.pk,
            kind=CommandKind.APPLY,
            values={knob: change["to"] for knob, change in action.changes.items()},
            undo={knob: change["from"] for knob, change in action.changes.items()},
            expected_config_version=action.expected_config_version,
            ttl_s=action.ttl_s,
            deadline=action.deadline,
        )
    return True


def _dispatched(facts: Facts) -> bool:
    """Dispatched or acknowledged: the agent has the word, or has lost it."""
    word, reason = facts.word(CommandKind.APPLY), facts.reason(CommandKind.APPLY)
    action, command = facts.action, facts.commands.get(CommandKind.APPLY)
    assert command is not None, f"action {action.pk} is {action.state} without an apply command"
    if word == CommandState.APPLIED:
        before = action.transitions.latest("id").at  # its clock may be behind ours
        at = max(before, facts.said_at(command))
        why = reason or "read back as asked for"
        return facts.move(State.APPLIED, why, AGENT, at=at, applied_at=at)
    if word == CommandState.REJECTED:
        late = reason.startswith("expired")
        return facts.end(State.EXPIRED if late else State.FAILED, reason, AGENT)
    if facts.unsettled:
        return left_by_agent(facts)
    if word == CommandState.FAILED:
        return facts.end(State.FAILED, reason, AGENT)
    if word == CommandState.REVERTED:
        return undone_by_agent(facts)
    if facts.now > action.deadline + ANSWER_WITHIN:
        if not command.offers:
            return facts.end(State.EXPIRED, "the agent did not fetch it in time")
        return revert(facts, "no answer from the agent: undone, in case it was applied")
    if word and action.state == State.DISPATCHED:
        return facts.move(State.ACKNOWLEDGED, f"the agent says {word}", AGENT)
    return False


def _applied(facts: Facts) -> bool:
    if not facts.action.trial:
        return facts.move(State.VERIFYING, "kept without a trial, as asked")
    return facts.move(State.VERIFYING, "waiting for two control windows after the change")


def _verifying(facts: Facts) -> bool:
    action = facts.action
    apply, commit = facts.word(CommandKind.APPLY), facts.word(CommandKind.COMMIT)
    if apply == CommandState.REVERTED:
        return undone_by_agent(facts)
    if apply == CommandState.FAILED:
        return left_by_agent(facts)
    if CommandKind.COMMIT not in facts.commands:
        return _look(facts)
    if commit == CommandState.COMMITTED:
        word = action.get_verdict_display() or "as asked"
        if action.incident is not None and action.verdict == Verdict.BETTER:
            diagnosis_confirm(
                incident=action.incident, cause=action.cause, acted_at=action.created_at
            )
        return facts.move(State.VERIFIED, f"{word}, and confirmed by the agent", AGENT)
    if commit in (CommandState.REJECTED, CommandState.FAILED):
        why = f"the agent did not confirm it: {facts.reason(CommandKind.COMMIT)}"
        return revert(facts, why, verdict=Verdict.EXPIRED)
    assert action.applied_at is not None
    silent = facts.given_up(action.applied_at + timedelta(seconds=action.ttl_s) + SILENCE_MAX)
    if silent:
        return revert(facts, f"it was not confirmed: {silent}", verdict=Verdict.EXPIRED)
    return False


def _look(facts: Facts) -> bool:
    """Judges the trial; better is committed, anything else undone. True when it moved.

    A change with no incident behind it, a person's or the end of shedding, has nothing to mend: no
    worse is enough to keep it.
    """
    action = facts.action
    if frozen := _frozen(action, facts.now):
        return withdraw(action, frozen, by="frozen", actor=AUTOPILOT, now=facts.now)
    assert action.applied_at is not None
    over_at = action.applied_at + timedelta(seconds=action.ttl_s)
    if facts.now >= over_at:
        told = f"it was not judged before its time was over at {clock(over_at)}"
        return revert(facts, f"{told}: its agent undoes it")
    if not action.trial:
        why = action.why if action.undoes_id else "as asked, without being judged"
        return _keep(facts, "", {"sentence": why})
    assert facts.reader is not None
    result = judge(action, reader=facts.reader, now=facts.now)
    if result.verdict is None:
        return False
    if result.verdict not in KEPT:
        return revert(
            facts, result.sentence, verdict=Verdict(result.verdict), outcome=result.outcome
        )
    return _keep(facts, Verdict(result.verdict), result.outcome)


def _keep(facts: Facts, verdict: str, outcome: dict[str, Any]) -> bool:
    """Asks the agent to confirm. The state stays: it is verified when the agent has."""
    with transaction.atomic():
        if note(facts.action, verdict=verdict, outcome=outcome):
            end_trial(facts, CommandKind.COMMIT)
    return False


STEPS: dict[str, Callable[[Facts], bool]] = {
    State.PROPOSED: _proposed,
    State.APPROVED: _approved,
    State.DISPATCHED: _dispatched,
    State.ACKNOWLEDGED: _dispatched,
    State.APPLIED: _applied,
    State.VERIFYING: _verifying,
    State.ROLLING_BACK: rolling_back,
}
