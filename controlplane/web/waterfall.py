"""A trace as rows: each span with its place in time, and the gaps nobody accounted for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tracing.types import Span

ROWS_MAX = 500
DEPTH_MAX = 3
# Shares of the whole trace: a gap below it is noise, a bar below it would not be seen.
GAP_MIN = 0.01
WIDTH_MIN = 0.002
STATUS_ERROR = 2


@dataclass(frozen=True)
class Row:
    """`left` and `width` are shares of the trace, 0 to 1. A gap has no span."""

    name: str
    kind: str
    depth: int
    left: float
    width: float
    start_s: float
    duration_s: float
    span: Span | None = None


@dataclass(frozen=True)
class Waterfall:
    """`parts` adds up time by kind of span below the root: queue, prefill, decode, gap."""

    root: Span
    duration_s: float
    rows: tuple[Row, ...]
    parts: Mapping[str, float]
    spans: int

    @property
    def failed(self) -> bool:
        return self.root.status_code == STATUS_ERROR

    def ticks(self) -> list[tuple[float, float]]:
        """Grid lines: (share of the width, seconds)."""
        return [(i / 4, self.duration_s * i / 4) for i in range(5)]


@dataclass(frozen=True)
class _Between:
    """Time in which no child of a span ran, in nanoseconds; it may be empty."""

    since: int
    until: int


def waterfall(spans: Sequence[Span]) -> Waterfall:
    """The rows of a trace in order of time, children below their parent, gaps among siblings named.

    A span whose parent is not in the trace counts as a root, as does the first of spans that are
    each other's parents; the longest root leads. At most ROWS_MAX rows. Raises ValueError for a
    trace without spans.
    """
    if not spans:
        raise ValueError("a waterfall needs at least one span")
    known = {span.span_id for span in spans}
    in_time = sorted(spans, key=lambda s: (s.start_ns, -s.duration_ns, s.span_id))
    children: dict[str, list[Span]] = defaultdict(list)
    for span in in_time:
        children[span.parent_span_id if span.parent_span_id in known else ""].append(span)
    root = max(children[""] or in_time[:1], key=lambda s: s.duration_ns)
    start = min(span.start_ns for span in spans)
    whole = max(1, max(span.end_ns for span in spans) - start)
    # What no root leads to is drawn too, after the roots: each span once, wherever it is met first.
    tops = (*children[""], *in_time)
    rows = tuple(islice(_walk(tops, children, start, whole), ROWS_MAX))
    parts: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.depth == 1:
            parts[row.kind] += row.duration_s
    return Waterfall(root, whole / 1e9, rows, dict(parts), len(spans))


def _walk(
    tops: Sequence[Span], children: Mapping[str, Sequence[Span]], start: int, whole: int
) -> Iterator[Row]:
    """Rows depth first, over a stack of our own: a trace may be as deep as it has spans."""
    seen: set[str] = set()
    stack: list[tuple[Span | _Between, int]] = [(top, 0) for top in reversed(tops)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, _Between):
            if item.until - item.since > GAP_MIN * whole:
                yield _row("", "gap", depth, item.since, item.until, start, whole, None)
        elif item.span_id not in seen:
            seen.add(item.span_id)
            kind = "root" if depth == 0 else item.name
            yield _row(item.name, kind, depth, item.start_ns, item.end_ns, start, whole, item)
            below = _below(item, children.get(item.span_id, ()))
            stack += [(part, min(depth + 1, DEPTH_MAX)) for part in reversed(below)]


def _below(span: Span, children: Sequence[Span]) -> list[Span | _Between]:
    """The children of a span with the time before, between and after them."""
    found: list[Span | _Between] = []
    covered = span.start_ns
    for child in children:
        found += [_Between(covered, child.start_ns), child]
        covered = max(covered, child.end_ns)
    return [*found, _Between(covered, span.end_ns)] if children else []


def _row(
    name: str,
    kind: str,
    depth: int,
    since: int,
    until: int,
    start: int,
    whole: int,
    span: Span | None,
) -> Row:
    left = (since - start) / whole
    width = max((until - since) / whole, WIDTH_MIN)
    return Row(
        name=name,
        kind=kind,
        depth=depth,
        left=min(left, 1 - width),
        width=width,
        start_s=(since - start) / 1e9,
        duration_s=(until - since) / 1e9,
        span=span,
    )
