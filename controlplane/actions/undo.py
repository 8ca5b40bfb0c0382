"""The way back: a change that is withdrawn, not proved, or undone by its agent alone.

    dispatched … verifying ─▶ rolling_back ─▶ rolled_back
                                    └───────▶ rollback_failed   a person has to look

Whatever the reason, the agent is asked to undo, or has done so because no commit came in time.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext_noop as _

from controlplane.actions.facts import AGENT, AUTOPILOT, Facts
from controlplane.actions.models import NEXT, Action, State, Verdict
from controlplane.actions.words import Words
from controlplane.fleet.selectors import commands_of
from controlplane.fleet.services import command_create
from gpu_agent.protocol import CommandKind, CommandState

SILENCE_MAX = timedelta(minutes=10)  # of an agent that is asked to commit or to revert


class CannotUndo(Exception):
    """The action is past the point where it could be withdrawn; `words` say why."""

    def __init__(self, words: str) -> None:
        super().__init__(str(words))
        self.words = words


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
    return revert(facts, why, actor, verdict=Verdict.INCONCLUSIVE, outcome=outcome)


def rolling_back(facts: Facts) -> bool:
    """What the agent says of its own timer on the apply command, and of being asked to."""
    own, asked = facts.word(CommandKind.APPLY), facts.word(CommandKind.REVERT)
    reason = facts.reason(CommandKind.REVERT)
    if own == CommandState.REVERTED and facts.action.verdict == Verdict.EXPIRED:
        # Nobody had judged it: what the agent says is all there is to tell.
        sentence = _undone_words(facts)
        outcome = facts.action.outcome | {"sentence": sentence}
        return facts.move(State.ROLLED_BACK, sentence, AGENT, outcome=outcome)
    if CommandState.REVERTED in (own, asked):
        return facts.move(State.ROLLED_BACK, reason or "the former values were read back", AGENT)
    if asked == CommandState.FAILED:
        return _stuck(facts, reason, AGENT)
    if asked == CommandState.REJECTED:
        if own == CommandState.APPLIED or facts.action.applied_at or facts.unsettled:
            return _stuck(facts, reason, AGENT)
        return facts.move(State.ROLLED_BACK, f"nothing had been applied: {reason}", AGENT)
    command = facts.commands.get(CommandKind.REVERT)
    silent = facts.given_up(command.deadline) if command is not None else ""
    return bool(silent) and _stuck(facts, silent, AUTOPILOT)


def _stuck(facts: Facts, why: str, actor: str) -> bool:
    """It could not be undone: what holds the autopilot off the engine until a person has looked."""
    told = "; ".join(filter(None, (facts.action.outcome.get("sentence"), why)))
    outcome = facts.action.outcome | {"sentence": told}
    return facts.move(State.ROLLBACK_FAILED, why, actor, outcome=outcome)


def revert(facts: Facts, why: str, actor: str = AUTOPILOT, **columns: Any) -> bool:
    """Asks the agent to undo, in the same transaction as the state that says so."""
    columns.setdefault("verdict", Verdict.EXPIRED)
    columns.setdefault("outcome", facts.action.outcome | {"sentence": why})
    with transaction.atomic():
        if not facts.move(State.ROLLING_BACK, why, actor, **columns):
            return False
        end_trial(facts, CommandKind.REVERT)
    return True


def end_trial(facts: Facts, kind: CommandKind) -> None:
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


def undone_by_agent(facts: Facts) -> bool:
    """The agent's own timer was quicker than a commit."""
    return facts.move(State.ROLLING_BACK, _undone_words(facts), AGENT, verdict=Verdict.EXPIRED)


def _undone_words(facts: Facts) -> str:
    at = clock(facts.said_at(facts.commands[CommandKind.APPLY]))
    why = facts.reason(CommandKind.APPLY)
    because = ", as no commit came in time" if why.startswith("no commit") else f": {why}"
    return f"the agent undid it by itself at {at}{because}"


def clock(at: datetime) -> str:
    return f"{timezone.localtime(at):%H:%M:%S}"


def left_by_agent(facts: Facts) -> bool:
    """The agent left alone what someone else had changed meanwhile: its timer ran out on it, or it
    cannot tell whether its own change was ever made."""
    why = facts.reason(CommandKind.APPLY)
    with transaction.atomic():
        going_back = facts.move(State.ROLLING_BACK, why, AGENT, verdict=Verdict.EXPIRED)
        return going_back and _stuck(facts, why, AGENT)
