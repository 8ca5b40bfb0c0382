"""Objectives in every state, budgets from full to overdrawn, and charts with all they can show."""

from __future__ import annotations

import math
from typing import Any

from controlplane.web.charts import Line, Question, chart
from controlplane.web.pages.objectives import ObjectiveRow
from controlplane.web.samples.incidents import NOW, objective, story_lines
from slo.budget import Counts
from slo.selectors import Standing, State
from tracing.types import Signal

WINDOW_S = 15


def objective_rows() -> list[ObjectiveRow]:
    """Met, burning, breached, acted upon, without traffic, stale, never measured."""
    lines = story_lines()
    return [
        ObjectiveRow(_standing("First token within 500 ms", State.BREACHED, -0.31, 38.2), lines[1]),
        ObjectiveRow(_standing("Each token within 50 ms", State.BURNING, 0.08, 17.4), lines[0]),
        ObjectiveRow(_standing("Requests answered", State.MET, 0.93, 0.2), None),
        ObjectiveRow(
            _standing("Batch within an hour", State.MET, 0.71, None, Signal.NO_TRAFFIC), None
        ),
        ObjectiveRow(
            _standing("Embedding within 80 ms", State.MET, 0.55, None, Signal.STALE), None
        ),
        ObjectiveRow(
            _standing("Whole answer within 10 s", State.NO_DATA, None, None, Signal.MISSING), None
        ),
    ]


def _standing(
    name: str, state: State, left: float | None, burn: float | None, signal: Signal = Signal.OK
) -> Standing:
    one = objective(name)
    return Standing(
        objective=one,
        state=state,
        counts=Counts(980, 1000),
        budget_left=left,
        burn_1h=burn,
        attained=None if left is None else 1 - one.budget * (1 - left),
        signal=signal,
        stale_s=360 if signal == Signal.STALE else None,
        fast_burn_now=state == State.BURNING,
        last_reading=None,
        pairs=(),
    )


def budgets() -> list[tuple[float | None, str]]:
    """Budget left, and the state that colours the rule."""
    return [
        (1.0, "met"),
        (0.5, "met"),
        (0.08, "burning"),
        (0.0, "burning"),
        (-0.31, "breached"),
        (-4.0, "breached"),
        (None, "no_data"),
    ]


def questions() -> list[Question]:
    return [
        Question("latency", "Latency", "How long does the first token take?"),
        Question("load", "Load", "How many requests run, and how many wait?"),
        Question("empty", "Missed", "What share of requests missed this objective?"),
    ]


def series() -> dict[str, Any]:
    """What a chart fetches: a rise, an action, its effect, and two minutes without data."""
    count = 120
    x = [NOW.timestamp() - WINDOW_S * (count - 1 - i) for i in range(count)]

    def bad(i: int) -> float:
        return 1 / (1 + math.exp((70 - i) / 2)) / (1 + math.exp((i - 96) / 2))

    def line(label: str, scale: tuple[float, float], style: str = "") -> Line:
        values = [
            scale[0] + scale[1] * bad(i) + scale[0] * 0.06 * math.sin(i) for i in range(count)
        ]
        return Line(
            label, [None if 24 <= i < 32 else round(v, 3) for i, v in enumerate(values)], style
        )

    cap = Line("cap", [8.0 if i < 92 else 32.0 for i in range(count)], "dash", stepped=True)
    return {
        "objective": "",
        "minutes": 30,
        "step_s": WINDOW_S,
        "x": x,
        "charts": {
            "latency": chart(
                "s", [line("p99", (0.31, 1.6)), line("p50", (0.12, 0.7))], 0.5, "objective"
            ),
            "load": chart("", [line("running", (6.5, 1.5)), line("waiting", (0.6, 30)), cap]),
            "empty": chart("%", [Line("missed", [None] * count)]),
        },
        "marks": [
            {"kind": "incident", "at": x[74], "label": "incident on engine-0", "href": ""},
            {"kind": "action", "at": x[92], "label": "max_num_seqs 8 → 32", "href": ""},
        ],
    }
