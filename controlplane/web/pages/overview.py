"""/: the story lines, the objectives, worst first, their charts, and the fleet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpResponse
from django.utils import timezone

from controlplane.accounts.models import Tenant, Token
from controlplane.actions.models import Action
from controlplane.actions.orders import verbs_open
from controlplane.actions.policy import freezes_of, undo_failed_words
from controlplane.actions.selectors import undos_failed
from controlplane.actions.words import translated
from controlplane.fleet.models import Engine
from controlplane.web.access import TenantRequest, minutes_of, page, send
from controlplane.web.charts import RANGES, Question, questions
from controlplane.web.fleet import Cell, cells_counted, fleet_cells
from controlplane.web.pages.objectives import ObjectiveRow, objective_rows, page_state
from controlplane.web.policy import freeze_said
from controlplane.web.story import StoryLine, story_lines
from slo.models import Objective
from slo.selectors import State
from tracing import query

MINUTES_DEFAULT = 15


@dataclass(frozen=True)
class Stop:
    """A change that could not be undone, in words. `why` is "" where its story line says it."""

    action: Action
    words: str
    why: str
    verbs: tuple[str, ...]


class Overview:
    """What the page shows, each thing read when a template first asks: a part costs only itself."""

    def __init__(self, tenant: Tenant, now: datetime) -> None:
        self.tenant = tenant
        self.now = now

    @cached_property
    def lines(self) -> list[StoryLine]:
        return story_lines(self.tenant, self.now)

    @cached_property
    def freezes(self) -> list[str]:
        """What is frozen now, and why."""
        return [freeze_said(policy, self.now) for policy in freezes_of(self.tenant, self.now)]

    @cached_property
    def stops(self) -> list[Stop]:
        """Changes that could not be undone and nobody has looked at."""
        told = {line.action.pk for line in self.lines if line.action is not None}
        return [
            Stop(
                action=action,
                words=translated(undo_failed_words(action)),
                why="" if action.pk in told else action.outcome.get("sentence", ""),
                verbs=verbs_open(action),
            )
            for action in undos_failed(self.tenant)
        ]

    @cached_property
    def rows(self) -> list[ObjectiveRow]:
        return objective_rows(self.tenant, self.now, self.lines)

    @cached_property
    def cells(self) -> list[Cell]:
        return fleet_cells(self.tenant, self.lines, self.now)

    @property
    def cells_counted(self) -> str:
        return cells_counted(self.cells)

    @cached_property
    def first_run(self) -> FirstRun | None:
        return first_run(self.tenant, self.now)

    @property
    def open_count(self) -> int:
        return sum(line.state != "ok" for line in self.lines)

    @property
    def acting_count(self) -> int:
        return sum(line.state == "act" for line in self.lines)

    @property
    def spent_count(self) -> int:
        """Objectives whose whole budget is spent, whether it burns now or not."""
        return sum(row.standing.state == State.BREACHED for row in self.rows)

    @property
    def smallest(self) -> ObjectiveRow | None:
        """The objective with the least budget left, None while none has data."""
        return next((row for row in self.rows if row.standing.budget_left is not None), None)

    @property
    def all_met(self) -> bool:
        met = all(row.standing.state in (State.MET, State.NO_DATA) for row in self.rows)
        return met and not self.stops

    @property
    def state(self) -> str:
        """For the favicon: acting, else bad while a person is wanted, else the worst objective."""
        if self.acting_count:
            return "act"
        return "bad" if self.open_count or self.stops else page_state(self.rows)

    @cached_property
    def shown(self) -> Objective | None:
        """The objective whose charts stand on the page: of the first story, else the worst."""
        if self.lines:
            return self.lines[0].incident.objective
        return self.rows[0].standing.objective if self.rows else None

    @property
    def charts(self) -> list[Question]:
        return questions(self.shown) if self.shown else []


@page
def overview(request: TenantRequest) -> HttpResponse:
    context = {
        "now": Overview(request.tenant, timezone.now()),
        "minutes": minutes_of(request, MINUTES_DEFAULT),
        "ranges": RANGES,
    }
    return send(request, "overview.html", context, parts=("story", "objectives", "fleet", "first"))


@dataclass(frozen=True)
class FirstRun:
    """What is connected so far; the page shows the steps until an engine reports and
    something is promised."""

    tokens: bool
    agent: bool
    telemetry: bool
    objective: bool
    otlp_url: str
    web_url: str
    grpc_address: str = ""

    @property
    def started(self) -> bool:
        return self.agent or self.telemetry or self.objective


def first_run(tenant: Tenant, now: datetime) -> FirstRun | None:
    """None once engines report and something is promised: from then on there is better to show."""
    has_engine = Engine.objects.filter(tenant=tenant).exists()
    has_objective = Objective.objects.filter(tenant=tenant).exists()
    if has_engine and has_objective:
        return None
    reader = query.reader(str(tenant.pk))
    spans = reader.spans(now - timedelta(hours=1), now, limit=1)
    kinds = set(Token.objects.filter(tenant=tenant, revoked_at=None).values_list("kind", flat=True))
    return FirstRun(
        tokens={Token.Kind.INGEST, Token.Kind.AGENT} <= kinds,
        agent=has_engine,
        telemetry=bool(spans),
        objective=has_objective,
        otlp_url=otlp_url(),
        web_url=settings.TRIMTAB_PUBLIC_URL,
        grpc_address=grpc_address(),
    )


def otlp_url() -> str:
    """Where telemetry is sent, as seen from outside."""
    host = urlsplit(settings.TRIMTAB_PUBLIC_URL)
    return f"{host.scheme}://{host.hostname}:{settings.TRIMTAB_OTLP_PORT}"


def grpc_address() -> str:
    """The same for OTLP/gRPC, as exporters take it; "" where that door is shut."""
    if not settings.TRIMTAB_OTLP_GRPC_PORT:
        return ""
    return f"{urlsplit(settings.TRIMTAB_PUBLIC_URL).hostname}:{settings.TRIMTAB_OTLP_GRPC_PORT}"
