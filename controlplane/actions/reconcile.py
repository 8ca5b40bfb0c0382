"""One step of an action, by its state, from facts alone.

    proposed ─▶ approved ─▶ dispatched ─▶ acknowledged ─▶ applied ─▶ verifying ─▶ verified
        │           │            └──────────────┴────────────┴───────────┴─▶ rolling_back
        └─ expired ─┘                                                             └▶ rolled_back

Each step reads rows, decides, and writes the transition and the command it needs in one database
transaction. Nothing is remembered between passes. The agent's word on the apply command counts
above everything: it may undo a trial by itself (no commit in time), and then says so there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from controlplane.actions import verify
from controlplane.actions.ledger import note, transition
from controlplane.actions.models import Action, State, Verdict
from controlplane.actions.trial import judge
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Command
from controlplane.fleet.selectors import commands_of, engine_state
from controlplane.fleet.services import command_create
from gpu_agent.protocol import CommandKind, CommandState
from tracing.types import Reader

log = logging.getLogger(__name__)

AUTOPILOT = "autopilot"
AGENT = "agent"
ANSWER_WITHIN = timedelta(seconds=15)  # after the deadline, for a result that is on its way
SILENCE_MAX = timedelta(minutes=10)  # of an agent that is asked to commit or to revert
FAILURES_MAX = 3
FAILURES_WITHIN = timedelta(hours=1)
FAILED_STATES = (State.FAILED, State.ROLLED_BACK, State.ROLLBACK_FAILED)


@dataclass(frozen=True)
class Facts:
    """What is known of an action now. `apply`, `commit`, `revert`: its commands, if made."""

    action: Action
    commands: dict[str, Command]
    reader: Reader
    now: datetime

    def word(self, kind: CommandKind) -> str:
        """The agent's last word on a command; "" when it said nothing or there is no command."""
        command = self.commands.get(kind)
        return command.result_state if command else ""

    def reason(self, kind: CommandKind) -> str:
        command = self.commands.get(kind)
        return str(command.result.get("reason", "")) if command else ""

    def move(self, to: str, reason: str, actor: str = AUTOPILOT, **columns: Any) -> bool:
        return transition(self.action, to, actor=actor, reason=reason, at=self.now, **columns)

    def end(self, to: str, why: str, actor: str = AUTOPILOT) -> bool:
        """Ends an action that changed nothing; why is what the story tells of it."""
        return self.move(to, why, actor, outcome=self.action.outcome | {"sentence": why})

    def given_up(self, since: datetime) -> str:
        """Why nothing is waited for any longer after `since`; empty while an answer may come.

        An engine that is away gets as long again as its agent may take to undo it alone.
        """
        engine = self.action.engine
        if self.now > since and engine_state(engine, self.now) == "ok":
            return "the agent does not answer"
        if self.now > since + timedelta(seconds=self.action.ttl_s):
            return f"{engine.name} is gone, and its agent undoes alone what was not confirmed"
        return ""


def reconcile(action: Action, *, reader: Reader, now: datetime) -> bool:
    """Drives one action until the facts carry it no further; whether it moved."""
    moved = False
    for _ in State:  # a bound: no path visits a state twice
        step = STEPS.get(action.state)
        commands = dict(commands_of(action.pk))
        if step is None or not step(Facts(action, commands, reader, now)):
            break
        moved = True
    return moved


def autopilot_refuses(action: Action, now: datetime) -> str:
    """Why the action waits for a person; "" when it does not."""
    if not settings.TRIMTAB_AUTOPILOT:
        return "TRIMTAB_AUTOPILOT is 0: observing only"
    failures = Action.objects.filter(
        engine=action.engine, state__in=FAILED_STATES, ended_at__gte=now - FAILURES_WITHIN
    ).count()
    if failures >= FAILURES_MAX:
        return f"{failures} actions on this engine failed or were undone within an hour"
    return ""


def _proposed(facts: Facts) -> bool:
    """A proposal that waits for a person stands as long as it makes sense."""
    if autopilot_refuses(facts.action, facts.now):
        overtaken = _overtaken(facts.action)
        return bool(overtaken) and facts.end(State.REJECTED, overtaken)
    if facts.now > facts.action.deadline:
        return facts.end(State.EXPIRED, "it was not approved in time")
    return facts.move(State.APPROVED, "within its bounds; autopilot is on")


def _overtaken(action: Action) -> str:
    """What has made a standing proposal pointless; empty when nothing has."""
    incident = action.incident
    if incident is None or incident.state == Incident.State.CLOSED:
        return "the incident is over without it"
    return _changed_meanwhile(action)


def _changed_meanwhile(action: Action) -> str:
    action.engine.refresh_from_db()
    version = action.engine.config_version
    if version == action.expected_config_version:
        return ""
    return (
        "someone changed the engine's configuration meanwhile "
        f"(version {version}, not {action.expected_config_version})"
    )


def _approved(facts: Facts) -> bool:
    action = facts.action
    if facts.now > action.deadline:
        return facts.end(State.EXPIRED, "the engine could not be reached in time")
    if changed := _changed_meanwhile(action):
        return facts.end(State.REJECTED, changed)
    if engine_state(action.engine, facts.now) != "ok":
        return False
    with transaction.atomic():
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
        applied_at = min(facts.now, max(command.result_at or facts.now, action.created_at))
        return facts.move(
            State.APPLIED, reason or "read back as asked for", AGENT, applied_at=applied_at
        )
    if word == CommandState.REJECTED:
        late = reason.startswith("expired")
        return facts.end(State.EXPIRED if late else State.FAILED, reason, AGENT)
    if word == CommandState.FAILED:
        return facts.end(State.FAILED, reason, AGENT)
    if word == CommandState.REVERTED:
        return _undone_by_agent(facts)
    if facts.now > action.deadline + ANSWER_WITHIN:
        if not command.offers:
            return facts.end(State.EXPIRED, "the agent did not fetch it in time")
        return _revert(facts, "no answer from the agent: undone, in case it was applied")
    if word and action.state == State.DISPATCHED:
        return facts.move(State.ACKNOWLEDGED, f"the agent says {word}", AGENT)
    return False


def _applied(facts: Facts) -> bool:
    return facts.move(State.VERIFYING, "waiting for two control windows after the change")


def _verifying(facts: Facts) -> bool:
    action = facts.action
    apply, commit = facts.word(CommandKind.APPLY), facts.word(CommandKind.COMMIT)
    if apply == CommandState.REVERTED:
        return _undone_by_agent(facts)
    if apply == CommandState.FAILED:
        return _left_by_agent(facts)
    if CommandKind.COMMIT not in facts.commands:
        return _look(facts)
    if commit == CommandState.COMMITTED:
        return facts.move(State.VERIFIED, "better, and confirmed by the agent", AGENT)
    if commit in (CommandState.REJECTED, CommandState.FAILED):
        why = f"the agent did not confirm it: {facts.reason(CommandKind.COMMIT)}"
        return _revert(facts, why, verdict=Verdict.EXPIRED)
    assert action.applied_at is not None
    silent = facts.given_up(action.applied_at + timedelta(seconds=action.ttl_s) + SILENCE_MAX)
    if silent:
        return _revert(facts, f"it was not confirmed: {silent}", verdict=Verdict.EXPIRED)
    return False


def _look(facts: Facts) -> bool:
    """Judges the trial; better is committed, anything else undone. True when it moved."""
    action = facts.action
    result = judge(action, reader=facts.reader, now=facts.now)
    if result.verdict is None:
        return False
    if result.verdict is not verify.Verdict.BETTER:
        return _revert(
            facts, result.sentence, verdict=Verdict(result.verdict), outcome=result.outcome
        )
    assert action.applied_at is not None
    with transaction.atomic():
        if not note(action, verdict=Verdict.BETTER, outcome=result.outcome):
            return False
        _end_trial(facts, CommandKind.COMMIT)
    return False  # the state stays: it is verified when the agent has confirmed


def _rolling_back(facts: Facts) -> bool:
    apply, revert = facts.word(CommandKind.APPLY), facts.word(CommandKind.REVERT)
    reason = facts.reason(CommandKind.REVERT)
    if revert == CommandState.REVERTED or apply == CommandState.REVERTED:
        return facts.move(State.ROLLED_BACK, reason or "the former values were read back", AGENT)
    if revert == CommandState.FAILED:
        return facts.move(State.ROLLBACK_FAILED, reason, AGENT)
    if revert == CommandState.REJECTED:
        if apply == CommandState.APPLIED or facts.action.applied_at:
            return facts.move(State.ROLLBACK_FAILED, reason, AGENT)
        return facts.move(State.ROLLED_BACK, f"nothing had been applied: {reason}", AGENT)
    asked = facts.commands.get(CommandKind.REVERT)
    silent = facts.given_up(asked.deadline) if asked is not None else ""
    if silent:
        told = f"{facts.action.outcome.get('sentence', '')}; {silent}"
        outcome = facts.action.outcome | {"sentence": told}
        return facts.move(State.ROLLBACK_FAILED, silent, outcome=outcome)
    return False


def _revert(facts: Facts, why: str, **columns: Any) -> bool:
    """Asks the agent to undo, in the same transaction as the state that says so."""
    columns.setdefault("verdict", Verdict.EXPIRED)
    columns.setdefault("outcome", facts.action.outcome | {"sentence": why})
    with transaction.atomic():
        if not facts.move(State.ROLLING_BACK, why, **columns):
            return False
        _end_trial(facts, CommandKind.REVERT)
    return True


def _end_trial(facts: Facts, kind: CommandKind) -> None:
    action = facts.action
    if kind is CommandKind.COMMIT:
        assert action.applied_at is not None
        deadline = action.applied_at + timedelta(seconds=action.ttl_s)
    else:  # going back late is better than not going back
        deadline = facts.now + SILENCE_MAX
    command_create(
        engine=action.engine,
        action_id=action.pk,
        kind=kind,
        values={},
        undo={},
        expected_config_version=None,
        ttl_s=action.ttl_s,
        deadline=deadline,
        target_command_id=facts.commands[CommandKind.APPLY].pk,
    )


def _undone_by_agent(facts: Facts) -> bool:
    """The agent's own timer was quicker than a commit."""
    why = facts.reason(CommandKind.APPLY) or "no commit came in time"
    sentence = f"the agent undid it by itself: {why}"
    return facts.move(
        State.ROLLING_BACK,
        sentence,
        AGENT,
        verdict=Verdict.EXPIRED,
        outcome=facts.action.outcome | {"sentence": sentence},
    )


def _left_by_agent(facts: Facts) -> bool:
    """The timer ran out, and the agent left alone what someone else had changed meanwhile."""
    why = facts.reason(CommandKind.APPLY)
    with transaction.atomic():
        return facts.move(
            State.ROLLING_BACK,
            why,
            AGENT,
            verdict=Verdict.EXPIRED,
            outcome=facts.action.outcome | {"sentence": why},
        ) and facts.move(State.ROLLBACK_FAILED, why, AGENT)


STEPS: dict[str, Callable[[Facts], bool]] = {
    State.PROPOSED: _proposed,
    State.APPROVED: _approved,
    State.DISPATCHED: _dispatched,
    State.ACKNOWLEDGED: _dispatched,
    State.APPLIED: _applied,
    State.VERIFYING: _verifying,
    State.ROLLING_BACK: _rolling_back,
}
