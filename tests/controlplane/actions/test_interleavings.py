"""An action in every kind of trouble: kills, lost, late, repeated messages, a hand on the knob.

The control plane's statements, the agent's real guard and journal, and the network between them are
interleaved at random (seeded); then the trouble stops and what must hold is checked:

- never two actions in flight on one engine, never two trials open on it;
- every action ends, along NEXT and without a gap in its ledger;
- commit only on *better*; what was applied ends verified or undone, and the engine runs so;
- nothing runs unconfirmed longer than its TTL.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from controlplane.accounts.models import Tenant
from controlplane.actions.models import ENDED, IN_FLIGHT, NEXT, Action, State, Verdict
from controlplane.actions.services import action_propose, actions_reconcile
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.fleet.models import Command, Engine
from slo.models import Objective, Reading
from tests.controlplane.node import SimulatedNode
from tests.controlplane.plant import START, Plant
from tracing.types import Signal

pytestmark = pytest.mark.django_db
WINDOW_S = 15.0


class Killed(BaseException):
    """Not an Exception: nothing of ours may catch it, as nothing catches kill -9."""


@contextmanager
def killed_after(statements: int) -> Iterator[None]:
    """The process dies before its n-th statement: open transactions roll back."""
    left = statements

    def count(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        nonlocal left
        if not sql.startswith("ROLLBACK"):  # which is what the death of a process does
            left -= 1
        if left < 0 and not sql.startswith("ROLLBACK"):
            raise Killed
        return execute(sql, *arguments)

    with connection.execute_wrapper(count):
        yield


class World:
    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.tenant = Tenant.objects.create(slug=f"t{seed}", name="T")
        self.objective = Objective.objects.create(
            tenant=self.tenant, slug="ttft", name="TTFT", service="chat", indicator="latency",
            spec={"source": "spans", "span": "llm_request", "measure": "took", "threshold_ms": 500},
            target=0.95,
        )  # fmt: skip
        self.plant = Plant()
        self.now = START + timedelta(minutes=10)
        self.node = SimulatedNode(self.tenant, self.plant, folder, self.now)
        self.node.poll()
        self.engine = Engine.objects.get(tenant=self.tenant)
        self.incident = Incident.objects.create(
            tenant=self.tenant, objective=self.objective, scope="engine-0", trigger="fast burn",
            bad_since=self.now - timedelta(seconds=60), opened_at=self.now,
        )  # fmt: skip
        self.late_requests: list[Any] = []
        self.before_share = 0.8
        self.after_share = self.random.choice([0.02, 0.5, 0.9])
        self.silent = self.random.random() < 0.2
        self.hand = False
        self.history: list[tuple[datetime, int]] = []
        self.read_until = self.now - timedelta(seconds=75)
        self._read()

    def diagnosis(self) -> Diagnosis:
        return Diagnosis.objects.create(
            incident=self.incident, made_at=self.now, cause="running_cap_too_small", score=1,
            because="31 requests wait", remedy=[{"knob": "max_num_seqs", "to": 30, "why": "w"}],
            window_start=self.now, window_end=self.now,
        )  # fmt: skip

    def tick(self, seconds: float) -> None:
        self.history.append((self.now, self.plant.values["max_num_seqs"]))
        self.now += timedelta(seconds=seconds)
        self.node.now = self.now
        self._read()

    def _read(self) -> None:
        """Windows are judged as time goes by; bad ones until the change, then as the seed says."""
        while self.read_until + timedelta(seconds=WINDOW_S + 6.5) <= self.now:
            self.read_until += timedelta(seconds=WINDOW_S)
            before = [value for at, value in self.history if at <= self.read_until]
            changed = bool(before) and before[-1] != 8
            share = self.after_share if changed else self.before_share
            silent = self.silent and changed
            Reading.objects.create(
                objective=self.objective, scope="engine-0", window_end=self.read_until,
                window_s=WINDOW_S, total=0 if silent else 100,
                good=0 if silent else 100 - round(100 * share),
                signal=Signal.MISSING if silent else Signal.OK,
            )  # fmt: skip

    def reconcile(self) -> None:
        actions_reconcile(tenant=self.tenant, reader=self.plant.store, now=self.now)

    def propose(self) -> None:
        self.engine.refresh_from_db()
        action_propose(
            incident=self.incident, diagnosis=self.diagnosis(), engine=self.engine, now=self.now
        )

    # -- what may happen, in any order ------------------------------------------------------

    def reconcile_killed(self) -> None:
        try:
            with killed_after(self.random.randrange(1, 60)):
                self.reconcile()
        except Killed:
            pass

    def propose_killed(self) -> None:
        try:
            with killed_after(self.random.randrange(1, 20)):
                self.propose()
        except Killed:
            pass

    def sync(self) -> None:
        request = self.node.request()
        self.node.take(request, self.node.send(request))

    def sync_reply_lost(self) -> None:
        self.node.send(self.node.request())

    def sync_request_late(self) -> None:
        self.late_requests.append(self.node.request())

    def late_request_arrives(self) -> None:
        if self.late_requests:
            request = self.random.choice(self.late_requests)
            self.node.send(request)

    def agent_works(self) -> None:
        self.node.guard.step()

    def agent_killed(self) -> None:
        self.node.restart()

    def answer_lost(self) -> None:
        self.node.adapter.lose_next_answer = True

    def engine_away(self) -> None:
        self.node.adapter.down = not self.node.adapter.down

    def person_turns_the_knob(self) -> None:
        if self.random.random() < 0.1:
            self.plant.apply({"max_num_seqs": 12}, by="person")
            self.hand = True

    def time_passes(self) -> None:
        self.tick(self.random.choice([0.5, 2, 2, 5, 15, 40]))

    # -- what must hold ---------------------------------------------------------------------

    def check_always(self) -> None:
        in_flight = Action.objects.filter(engine=self.engine, state__in=IN_FLIGHT).count()
        assert in_flight <= 1
        assert len(self.node.journal.open_trials("engine-0")) <= 1
        for trial in self.node.journal.open_trials("engine-0"):
            assert trial.revert_wall is not None
            most = self.now.timestamp() + trial.command.ttl_s
            assert trial.revert_wall <= most, "armed for longer than its TTL"
        for action in Action.objects.filter(engine=self.engine):
            check_ledger(action)

    def settle(self) -> None:
        """The trouble stops; everything that is under way comes to its end."""
        self.node.adapter.down = False
        self.node.adapter.lose_next_answer = False
        for _ in range(150):
            self.tick(2)
            self.node.poll()
            self.reconcile()
            self.check_always()
            if not Action.objects.filter(state__in=IN_FLIGHT, engine=self.engine).exists():
                break

    def check_end(self) -> None:
        assert not self.node.journal.open_trials("engine-0")
        last = None
        for action in Action.objects.filter(engine=self.engine).order_by("created_at"):
            assert action.state in ENDED, f"still {action.state}"
            check_ledger(action)
            check_commands(action)
            if action.state == State.VERIFIED:
                last = action
        if not self.hand:
            wanted = last.changes["max_num_seqs"]["to"] if last else 8
            assert self.plant.values["max_num_seqs"] == wanted
            assert not Action.objects.filter(
                engine=self.engine, state=State.ROLLBACK_FAILED
            ).exists()


def check_ledger(action: Action) -> None:
    at = ""
    for step in action.transitions.all():
        assert step.from_state == at, "a gap in the ledger"
        assert at == "" or step.to_state in NEXT[at], f"{at} → {step.to_state}"
        at = step.to_state
    assert at == action.state
    assert (action.ended_at is not None) == (action.state in ENDED)


def check_commands(action: Action) -> None:
    commands = {c.kind: c for c in Command.objects.filter(action_id=action.pk)}
    if "commit" in commands:
        better = action.verdict == Verdict.BETTER
        assert better or action.verdict == Verdict.EXPIRED, "commit without better"
    if action.state == State.VERIFIED:
        assert action.verdict == Verdict.BETTER
        assert commands["commit"].result_state == "committed"
    if action.state == State.ROLLED_BACK and action.applied_at:
        words = {c.result_state for c in commands.values()}
        assert "reverted" in words
    if action.state in (State.ROLLED_BACK, State.ROLLBACK_FAILED):
        assert action.verdict in (Verdict.WORSE, Verdict.INCONCLUSIVE, Verdict.EXPIRED)
        assert action.outcome["sentence"]


TROUBLE = [
    World.reconcile, World.reconcile, World.reconcile_killed, World.reconcile_killed,
    World.propose, World.propose_killed,
    World.sync, World.sync, World.sync, World.sync_reply_lost, World.sync_request_late,
    World.late_request_arrives, World.agent_works, World.agent_works, World.agent_works,
    World.agent_killed, World.answer_lost, World.engine_away, World.person_turns_the_knob,
    World.time_passes, World.time_passes, World.time_passes,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_action_ends_and_the_engine_runs_what_the_ledger_says(
    seed: int, tmp_path: Path
) -> None:
    world = World(tmp_path, seed)
    for _ in range(90):
        world.random.choice(TROUBLE)(world)
        world.check_always()
    world.settle()
    world.check_end()


@pytest.mark.parametrize(("after", "ends"), [(0.02, State.VERIFIED), (0.8, State.ROLLED_BACK)])
def test_a_kill_before_any_statement_changes_nothing_in_the_end(
    after: float, ends: str, tmp_path: Path
) -> None:
    """Exhaustive: the pass is killed before its 1st, 2nd, 3rd… statement, over and over."""
    world = World(tmp_path, 1)
    world.after_share, world.silent = after, False
    world.propose()
    statement = 0
    for _ in range(3000):
        statement = statement % 70 + 1
        try:
            with killed_after(statement):
                world.reconcile()
        except Killed:
            pass
        if statement % 10 == 0:
            world.node.poll()
            world.tick(1.2)
            world.check_always()
        if Action.objects.get().state in ENDED:
            break
    world.check_end()
    assert Action.objects.get().state == ends
