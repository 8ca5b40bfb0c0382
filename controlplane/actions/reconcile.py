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

from django.db import transaction
from django.utils.translation import gettext_noop as _

from controlplane.accounts.models import Tenant
from controlplane.actions import verify
from controlplane.actions.grant import value_refusal
from controlplane.actions.knob import knobs
from controlplane.actions.ledger import note, transition
from controlplane.actions.models import NEXT, UNDER_WAY, Action, Priority, State, Verdict
from controlplane.actions.policy import rules_of, waits_for_person
from controlplane.actions.trial import judge
from controlplane.actions.words import Words
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.services import diagnosis_confirm
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
TTL_TIMES_MAX = 2  # of TRIMTAB_ACTION_TTL_S, where a queue has to drain before anything is seen
DISPATCH_WITHIN = timedelta(seconds=30)
KEPT = (verify.Verdict.BETTER, verify.Verdict.NO_WORSE)


class CannotUndo(Exception):
    """The action is past the point where it could be withdrawn; `words` say why."""

    def __init__(self, words: str) -> None:
        super().__init__(str(words))
        self.words = words


@dataclass(frozen=True)
class Facts:
    """What is known of an action now. `apply`, `commit`, `revert`: its commands, if made."""

    action: Action
    commands: dict[str, Command]
    reader: Reader | None
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
    for _step in State:  # a bound: no path visits a state twice
        step = STEPS.get(action.state)
        commands = dict(commands_of(action.pk))
        if step is None or not step(Facts(action, commands, reader, now)):
            break
        moved = True
    return moved


def withdraw(action: Action, why: str, *, by: str, actor: str, now: datetime) -> bool:
    """Ends an action before it was judged: rejected, or undone from wherever it has come to.

    `by`: "person", "superseded" or "frozen". False when someone else moved it meanwhile. Raises
    CannotUndo when its confirmation is on its way, or it is being undone or has ended already.
    """
    facts = Facts(action, dict(commands_of(action.pk)), None, now)
    outcome = action.outcome | {"sentence": why, "withdrawn": by}
    if action.state in (State.PROPOSED, State.APPROVED):
        return facts.move(State.REJECTED, why, actor, outcome=outcome)
    if State.ROLLING_BACK not in NEXT.get(action.state, ()):
        raise CannotUndo(
            Words(_("%(action)s is %(state)s"), action=str(action), state=State(action.state).label)
        )
    if CommandKind.COMMIT in facts.commands:
        told = _("%(action)s was just confirmed; it can be taken back once it is kept")
        raise CannotUndo(Words(told, action=str(action)))
    return _revert(facts, why, actor, verdict=Verdict.INCONCLUSIVE, outcome=outcome)


def _proposed(facts: Facts) -> bool:
    """A proposal that waits for a person stands as long as it makes sense."""
    action, now = facts.action, facts.now
    if frozen := _frozen(action, now):
        return facts.end(State.REJECTED, frozen)
    by_person = action.priority == Priority.PERSON
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
    if not facts.action.trial:
        return facts.move(State.VERIFYING, "kept without a trial, as asked")
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
        word = action.get_verdict_display() or "as asked"
        if action.incident is not None and action.verdict == Verdict.BETTER:
            diagnosis_confirm(
                incident=action.incident, cause=action.cause, acted_at=action.created_at
            )
        return facts.move(State.VERIFIED, f"{word}, and confirmed by the agent", AGENT)
    if commit in (CommandState.REJECTED, CommandState.FAILED):
        why = f"the agent did not confirm it: {facts.reason(CommandKind.COMMIT)}"
        return _revert(facts, why, verdict=Verdict.EXPIRED)
    assert action.applied_at is not None
    silent = facts.given_up(action.applied_at + timedelta(seconds=action.ttl_s) + SILENCE_MAX)
    if silent:
        return _revert(facts, f"it was not confirmed: {silent}", verdict=Verdict.EXPIRED)
    return False


def _look(facts: Facts) -> bool:
    """Judges the trial; better is committed, anything else undone. True when it moved.

    A change with no incident behind it, a person's or the end of shedding, has nothing to mend: no
    worse is enough to keep it.
    """
    action = facts.action
    if frozen := _frozen(action, facts.now):
        return withdraw(action, frozen, by="frozen", actor=AUTOPILOT, now=facts.now)
    if not action.trial:
        return _keep(facts, "", {"sentence": "as asked, without being judged"})
    assert facts.reader is not None
    result = judge(action, reader=facts.reader, now=facts.now)
    if result.verdict is None:
        return False
    if result.verdict not in KEPT:
        return _revert(
            facts, result.sentence, verdict=Verdict(result.verdict), outcome=result.outcome
        )
    return _keep(facts, Verdict(result.verdict), result.outcome)


def _keep(facts: Facts, verdict: str, outcome: dict[str, Any]) -> bool:
    """Asks the agent to confirm. The state stays: it is verified when the agent has."""
    with transaction.atomic():
        if note(facts.action, verdict=verdict, outcome=outcome):
            _end_trial(facts, CommandKind.COMMIT)
    return False


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


def _revert(facts: Facts, why: str, actor: str = AUTOPILOT, **columns: Any) -> bool:
    """Asks the agent to undo, in the same transaction as the state that says so."""
    columns.setdefault("verdict", Verdict.EXPIRED)
    columns.setdefault("outcome", facts.action.outcome | {"sentence": why})
    with transaction.atomic():
        if not facts.move(State.ROLLING_BACK, why, actor, **columns):
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
