"""A node in simulated time: the real guard and journal of the agent around a plant's knobs.

Only the network is made of plain calls, so that a test can lose, repeat and delay what it carries.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from controlplane.accounts.models import Tenant
from controlplane.fleet import services as fleet
from gpu_agent.clock import Clock, utc_text
from gpu_agent.engine_adapter import Conflict, EngineAdapter, EngineState, Unreachable, Values
from gpu_agent.guard import Guard
from gpu_agent.journal import Journal
from gpu_agent.protocol import EngineReport, SyncReply, SyncRequest
from tests.controlplane.plant import Plant


class PlantAdapter(EngineAdapter):
    slug = "plant"
    label = "queueing model"

    def __init__(self, plant: Plant) -> None:
        super().__init__(url="http://plant")
        self.plant = plant
        self.down = False
        self.lose_next_answer = False

    def read(self) -> EngineState:
        if self.down:
            raise Unreachable("plant is down")
        plant = self.plant
        return EngineState(
            plant.config_version, dict(plant.values), "plant", plant.knobs(), plant.changed_by
        )

    def apply(self, values: Values, *, expected_version: int, by: str) -> EngineState:
        if self.down:
            raise Unreachable("plant is down")
        if expected_version != self.plant.config_version:
            raise Conflict(f"plant is at {self.plant.config_version}")
        self.plant.apply(dict(values), by)
        if self.lose_next_answer:
            self.lose_next_answer = False
            raise Unreachable("the answer was lost")
        return self.read()


class SimulatedClock(Clock):
    def __init__(self, node: SimulatedNode) -> None:
        self.boot_id = "boot"
        self.node = node

    def wall_s(self) -> float:
        return self.node.now.timestamp()

    def boottime_s(self) -> float:
        return self.node.now.timestamp()


class SimulatedNode:
    """`now` is set by the test."""

    def __init__(self, tenant: Tenant, plant: Plant, folder: Path, now: datetime) -> None:
        self.tenant, self.plant, self.folder, self.now = tenant, plant, folder, now
        self.adapter = PlantAdapter(plant)
        self.restart()

    def restart(self) -> None:
        """As after kill -9: only the journal is left."""
        if hasattr(self, "journal"):
            self.journal.close()
        self.journal = Journal(self.folder / "journal.sqlite3")
        # The test's disk does not lose power.
        self.journal._db.execute("PRAGMA synchronous=OFF")
        self.guard = Guard(
            self.plant.name,
            self.adapter,
            self.journal,
            stop_file=self.folder / "stop",
            clock=SimulatedClock(self),
        )
        self.guard.step()

    def request(self) -> SyncRequest:
        return SyncRequest(
            agent_id="agent-0",
            boot_id="boot",
            node="node-0",
            agent_version="test",
            sent_at=utc_text(self.now.timestamp()),
            engines=[self._report()],
            results=self.journal.results(100),
            kill_switch=(self.folder / "stop").exists(),
        )

    def send(self, request: SyncRequest) -> SyncReply:
        return fleet.sync(tenant=self.tenant, request=request, now=self.now)

    def take(self, request: SyncRequest, reply: SyncReply) -> None:
        accepted = set(reply.accepted_results)
        self.journal.accepted([r for r in request.results if r.command_id in accepted])
        for command in reply.commands:
            self.journal.receive(command)

    def poll(self) -> None:
        """One undisturbed round: what is known out, commands in, carried out, results out."""
        for _ in range(2):
            request = self.request()
            self.take(request, self.send(request))
            self.guard.step()

    def _report(self) -> EngineReport:
        state = self.guard.state
        known: dict[str, Any] = {}
        if state is not None:
            known = {
                "config_version": state.config_version,
                "values": dict(state.values),
                "knobs": {k: dict(v) for k, v in state.knobs.items()},
                "changed_by": state.changed_by,
            }
        return EngineReport(
            name=self.plant.name,
            service=self.plant.service,
            adapter="plant",
            url="http://plant",
            reachable=not self.guard.error,
            error=self.guard.error,
            **known,
        )


def utc(t: float) -> datetime:
    return datetime.fromtimestamp(t, UTC)
