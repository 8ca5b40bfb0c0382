"""The fleet as cells: one per engine and one per GPU, each with a state in word and colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Engine, Node
from controlplane.fleet.selectors import engine_state, engines_of, node_state, nodes_of
from controlplane.web.measures import Filling, Readings
from controlplane.web.story import StoryLine


@dataclass(frozen=True)
class Cell:
    """`state` is one of templatetags.ui.STATES; `facts` are shown when the cell is opened.

    `filling` colours the cell by a measure instead of the state; `unmeasured` when there is none.
    """

    key: str
    name: str
    state: str
    word: str
    note: str
    facts: tuple[tuple[str, Any], ...]
    node: str = ""
    filling: Filling | None = None
    unmeasured: bool = False


# Further off than this, telemetry lands in a neighbouring scrape: worth saying on the cell.
CLOCK_SKEW_SHOWN_S = 2.0


def fleet_cells(
    tenant: Tenant, lines: list[StoryLine], now: datetime, readings: Readings | None = None
) -> list[Cell]:
    """Engines by name, then GPUs by node, coloured by `readings` where there are some; one query
    each for engines and nodes."""
    cells = []
    for engine in engines_of(tenant):
        cell = _engine_cell(engine, lines, now)
        filling = readings.of_engine(engine) if readings else None
        cells.append(_filled(cell, readings, filling))
    for node in nodes_of(tenant):
        for gpu in node.gpus:
            if isinstance(gpu, dict):
                cell = _gpu_cell(node, gpu, now)
                filling = readings.of_gpu(node, gpu) if readings else None
                cells.append(_filled(cell, readings, filling))
    return cells


def cells_counted(cells: Sequence[Cell]) -> str:
    """“1 engine”, “2 engines, 4 GPUs”."""
    gpus = sum(cell.key.startswith("gpu-") for cell in cells)
    engines = len(cells) - gpus
    said = (
        ngettext("%(n)s engine", "%(n)s engines", engines) % {"n": engines} if engines else "",
        ngettext("%(n)s GPU", "%(n)s GPUs", gpus) % {"n": gpus} if gpus else "",
    )
    return _(", ").join(filter(None, said))


def _filled(cell: Cell, readings: Readings | None, filling: Filling | None) -> Cell:
    return replace(cell, filling=filling, unmeasured=readings is not None and filling is None)


def _engine_cell(engine: Engine, lines: list[StoryLine], now: datetime) -> Cell:
    state: str = engine_state(engine, now)
    word = ""
    if state == "ok":
        mine = [line for line in lines if _concerns(line, engine)]
        if any(line.state == "act" for line in mine):
            state, word = "acting", _("acting")
        elif any(line.state == "bad" for line in mine):
            state, word = "burning", _("missing an objective")
    facts = [(knob, value) for knob, value in sorted(engine.values.items())]
    return Cell(
        key=f"engine-{engine.pk}",
        name=engine.name,
        state=state,
        word=word,
        note=" · ".join(
            filter(
                None,
                (
                    engine.service,
                    engine.model or engine.adapter,
                    _clock(engine.node),
                    _("kill switch on") if engine.node.kill_switch else "",
                ),
            )
        ),
        facts=(
            (_("service"), engine.service),
            (_("node"), engine.node.name),
            (_("clock of the node"), _("%+.1f s") % engine.node.clock_skew_s),
            (_("adapter"), engine.adapter),
            (_("address"), engine.url),
            (_("configuration"), engine.config_version),
            *facts,
            *(((_("error"), engine.error),) if engine.error else ()),
        ),
        node=engine.node.name,
    )


def _clock(node: Node) -> str:
    """Says when the node's clock is off; empty when it is not."""
    if abs(node.clock_skew_s) < CLOCK_SKEW_SHOWN_S:
        return ""
    off_s = abs(node.clock_skew_s)
    if node.clock_skew_s > 0:
        return _("clock %.0f s ahead") % off_s
    return _("clock %.0f s behind") % off_s


def _concerns(line: StoryLine, engine: Engine) -> bool:
    if line.action is not None and line.state == "act":
        return line.action.engine_id == engine.pk
    incident = line.incident
    return incident.scope == engine.name or (
        not incident.scope and incident.objective.service == engine.service
    )


def _gpu_cell(node: Node, gpu: dict[str, Any], now: datetime) -> Cell:
    index = gpu.get("index", gpu.get("gpu", "?"))
    return Cell(
        key=f"gpu-{node.pk}-{index}",
        name=_("%(node)s, GPU %(index)s") % {"node": node.name, "index": index},
        state=node_state(node, now),
        word="",
        note=" · ".join(filter(None, (str(gpu.get("name", "")), _clock(node)))),
        facts=tuple((str(key), value) for key, value in sorted(gpu.items())),
        node=node.name,
    )
