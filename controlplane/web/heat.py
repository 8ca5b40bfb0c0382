"""The heat map of latencies: when requests ended, how long they took, how many failed. Geometry.

Rows are the steps 1, 2, 5, 10, … from 1 ms to 100 s, only those between the fastest and the
slowest request; columns are windows of time. A cell is as dark as its count is large, by magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tracing.types import HeatCell, TraceSearch

BOUNDS_S = (*(m * 10.0**e for e in range(-3, 2) for m in (1, 2, 5)), 100.0)
COLUMNS = 60
STEP_S_MIN = 1
ROW_HEIGHT = 15
ROWS_MIN = 6
LEVELS = 5
TICKS = 5


@dataclass(frozen=True)
class Cell:
    """`left` and `width` are shares of the width, `top` and `height` units of the drawing; `failed`
    is the height of its failed part. Times and durations are the cell's own, for its words."""

    left: float
    width: float
    top: float
    level: int
    failed: float
    count: int
    failures: int
    since: datetime
    until: datetime
    over_s: float
    upto_s: float | None

    @property
    def failed_top(self) -> float:
        return self.top + ROW_HEIGHT - self.failed

    @property
    def min_ms(self) -> str | None:
        """As the address has it; None where there is no bound."""
        return f"{self.over_s * 1000:g}" if self.over_s else None

    @property
    def max_ms(self) -> str | None:
        return None if self.upto_s is None else f"{self.upto_s * 1000:g}"


@dataclass(frozen=True)
class Heat:
    """`labels` are (top, seconds) of the lines between rows; `ticks` times from left to right;
    `edges_ms` the bounds of the rows, see `_edges`."""

    cells: tuple[Cell, ...]
    labels: tuple[tuple[float, float], ...]
    ticks: tuple[datetime, ...]
    height: int
    count: int
    failures: int
    since: datetime
    until: datetime
    edges_ms: str
    row_height: int = ROW_HEIGHT


def whole_windows(search: TraceSearch) -> tuple[TraceSearch, float]:
    """The same search over whole windows, so that a cell's link asks for whole seconds, and the
    length of a window in seconds."""
    seconds = (search.end - search.start).total_seconds()
    step_s = max(STEP_S_MIN, math.ceil(seconds / COLUMNS))
    end_s = math.ceil(search.end.timestamp() / step_s) * step_s
    end = datetime.fromtimestamp(end_s, search.end.tzinfo)
    count = math.ceil((end - search.start).total_seconds() / step_s)
    return replace(search, start=end - timedelta(seconds=step_s * count), end=end), float(step_s)


def heat(search: TraceSearch, step_s: float, found: Sequence[HeatCell]) -> Heat | None:
    """None when there was no request; `search` and `step_s` as `whole_windows` gave them."""
    if not found:
        return None
    rows = [cell.row for cell in found]
    low, high = min(rows), max(rows)
    missing = ROWS_MIN - (high - low + 1)
    low = max(0, low - max(0, math.ceil(missing / 2)))
    high = min(len(BOUNDS_S), max(high, low + ROWS_MIN - 1))
    columns = round((search.end - search.start).total_seconds() / step_s)
    most = max(cell.count for cell in found)

    def top(row: int) -> float:
        return float((high - row) * ROW_HEIGHT)

    def drawn(cell: HeatCell) -> Cell:
        since = search.start + timedelta(seconds=step_s * cell.column)
        share = math.log1p(cell.count) / math.log1p(most)
        return Cell(
            left=cell.column / columns,
            width=1 / columns,
            top=top(cell.row),
            level=max(1, math.ceil(LEVELS * share)),
            failed=max(4.0, ROW_HEIGHT * cell.failed / cell.count) if cell.failed else 0.0,
            count=cell.count,
            failures=cell.failed,
            since=since,
            until=since + timedelta(seconds=step_s),
            over_s=BOUNDS_S[cell.row - 1] if cell.row else 0.0,
            upto_s=BOUNDS_S[cell.row] if cell.row < len(BOUNDS_S) else None,
        )

    whole = search.end - search.start
    return Heat(
        cells=tuple(drawn(cell) for cell in found),
        labels=tuple((top(row), BOUNDS_S[row]) for row in range(low, high)),
        ticks=tuple(search.start + whole * i / (TICKS - 1) for i in range(TICKS)),
        height=(high - low + 1) * ROW_HEIGHT,
        count=sum(cell.count for cell in found),
        failures=sum(cell.failed for cell in found),
        since=search.start,
        until=search.end,
        edges_ms=_edges(low, high),
    )


def _edges(low: int, high: int) -> str:
    """Of rows `low` to `high` in ms, top first, parted by spaces; "-" above the last bound."""

    def edge(row: int) -> str:
        if row < 0:
            return "0"
        return f"{BOUNDS_S[row] * 1000:g}" if row < len(BOUNDS_S) else "-"

    return " ".join(edge(row) for row in range(high, low - 2, -1))
