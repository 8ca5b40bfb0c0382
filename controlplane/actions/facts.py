"""What is known of an action now: its row, what its agent said of its commands, and the time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controlplane.actions.ledger import transition
from controlplane.actions.models import Action
from controlplane.fleet.models import Command
from controlplane.fleet.selectors import engine_state
from gpu_agent.protocol import CommandKind, CommandState
from tracing.types import Reader

AUTOPILOT = "autopilot"
AGENT = "agent"


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

    @property
    def unsettled(self) -> bool:
        """Whether the agent could not apply the change and the engine does not run what it did
        before: somebody else was there meanwhile, and what of it was made nobody can say."""
        if self.word(CommandKind.APPLY) != CommandState.FAILED:
            return False
        values = self.commands[CommandKind.APPLY].result.get("values", {})
        return any(values.get(k) != c["from"] for k, c in self.action.changes.items())

    def said_at(self, command: Command) -> datetime:
        """When the agent said so, as far as its clock can be believed."""
        return min(self.now, max(command.result_at or self.now, self.action.created_at))

    def move(
        self,
        to: str,
        reason: str,
        actor: str = AUTOPILOT,
        at: datetime | None = None,
        **columns: Any,
    ) -> bool:
        """`at`: when it happened, where that was before `now`."""
        at = at or self.now
        return transition(self.action, to, actor=actor, reason=reason, at=at, **columns)

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
