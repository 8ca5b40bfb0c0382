"""/fleet/ and /fleet/<node>/: who is out there, how it is set, and by whom."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.http import Http404, HttpResponse
from django.utils import timezone
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Command, Engine, Node
from controlplane.fleet.selectors import (
    commands_answered,
    engine_state,
    engines_of,
    node_named,
    node_state,
    nodes_of,
)
from controlplane.web.access import TenantRequest, page, send
from controlplane.web.fleet import Cell, fleet_cells
from controlplane.web.knobs import Configuration, configuration
from controlplane.web.measures import MEASURES, Readings
from controlplane.web.pages.overview import otlp_url
from controlplane.web.story import story_lines

COMMANDS_SHOWN = 10
# Worst first; the favicon shows the worst.
PAGE_STATES = {
    "lost": "bad", "unreachable": "bad", "late": "warn", "stopped": "none", "ok": "ok",
}  # fmt: skip


@dataclass(frozen=True)
class NodeRow:
    """A node in the list."""

    node: Node
    state: str
    engines: tuple[EngineRow, ...]

    @property
    def stopped_by_hand(self) -> bool:
        return self.node.kill_switch

    @property
    def has_gpu(self) -> bool:
        return bool(self.node.gpus)


@dataclass(frozen=True)
class EngineRow:
    engine: Engine
    state: str
    set: Configuration
    commands: tuple[Command, ...]


class Fleet:
    """What the page shows, read when a template first asks."""

    def __init__(self, tenant: Tenant, now: datetime, measure: str = "") -> None:
        self.tenant = tenant
        self.now = now
        self.measure = measure
        rows: dict[UUID, list[EngineRow]] = defaultdict(list)
        for row in engine_rows(engines_of(tenant), now):
            rows[row.engine.node_id].append(row)
        self.nodes = [node_row(node, rows[node.pk], now) for node in nodes_of(tenant)]

    @property
    def cells(self) -> list[Cell]:
        lines, readings = story_lines(self.tenant, self.now), None
        if self.measure:
            readings = Readings(self.tenant, MEASURES[self.measure], self.now)
        return fleet_cells(self.tenant, lines, self.now, readings)

    @property
    def measures(self) -> list[tuple[str, Promise]]:
        """What the cells may be coloured by: by GPU only where there is one."""
        offered = ((slug, each.label) for slug, each in MEASURES.items() if slug != "gpu")
        gpu = [("gpu", MEASURES["gpu"].label)] if self.gpus else []
        return [("", gettext_lazy("state")), *offered, *gpu]

    @property
    def engines(self) -> int:
        return sum(len(row.engines) for row in self.nodes)

    @property
    def gpus(self) -> int:
        return sum(len(row.node.gpus) for row in self.nodes)

    @property
    def page_state(self) -> str:
        return worst([row.state for row in self.nodes])


@page
def fleet(request: TenantRequest) -> HttpResponse:
    """Raises Http404 for a `?measure=` that is not offered."""
    measure = request.GET.get("measure", "")
    if measure and measure not in MEASURES:
        raise Http404(f"measure={measure[:60]!r}, allowed: {', '.join(MEASURES)}")
    context = {
        "now": Fleet(request.tenant, timezone.now(), measure),
        "otlp_url": otlp_url(),
        "web_url": settings.TRIMTAB_PUBLIC_URL,
    }
    return send(request, "fleet.html", context, parts=("all",))


@page
def node(request: TenantRequest, name: str) -> HttpResponse:
    """Raises Http404 for a node this tenant does not have."""
    found = node_named(request.tenant, name)
    if found is None:
        raise Http404(f"node {name!r} is not one of {request.tenant}")
    now = timezone.now()
    engines = engine_rows([e for e in engines_of(request.tenant) if e.node_id == found.pk], now)
    row = node_row(found, engines, now)
    states = [row.state, *(each.state for each in engines)]
    context = {"row": row, "node": found, "now": now, "page_state": worst(states)}
    return send(request, "node.html", context, parts=("all",))


def node_row(node: Node, engines: list[EngineRow], now: datetime) -> NodeRow:
    return NodeRow(node, node_state(node, now), tuple(engines))


def engine_rows(engines: list[Engine], now: datetime) -> list[EngineRow]:
    """One query for the commands of all of them."""
    told = commands_answered(engines)
    rows = []
    for engine in engines:
        commands = told.get(engine.pk, [])
        newest = tuple(commands[-COMMANDS_SHOWN:][::-1])
        state = engine_state(engine, now)
        rows.append(EngineRow(engine, state, configuration(engine, commands), newest))
    return rows


def worst(states: list[str]) -> str:
    return next((shown for state, shown in PAGE_STATES.items() if state in states), "none")
