"""A trace as rows: each span with its place in time, and the gaps nobody accounted for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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


def waterfall(spans: Sequence[Span]) -> Waterfall:
    """The rows of a trace in order of time, children below their parent, gaps among siblings named.

    A span whose parent is not in the trace counts as a root; the longest root leads. At most
    ROWS_MAX rows. Raises ValueError for a trace without spans.
    """
    if not spans:
        raise ValueError("a waterfall needs at least one span")
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.duration_ns, s.span_id)):
        # A span that names itself as its parent would never be reached.
        orphan = span.parent_span_id not in known or span.parent_span_id == span.span_id
        children["" if orphan else span.parent_span_id].append(span)
    roots = children[""] or [min(spans, key=lambda s: s.start_ns)]
    root = max(roots, key=lambda s: s.duration_ns)
    start = min(span.start_ns for span in spans)
    whole = max(1, max(span.end_ns for span in spans) - start)
    rows: list[Row] = []
    for top in roots:
        for row in _walk(top, children, 0, start, whole):
            if len(rows) < ROWS_MAX:
                rows.append(row)
    parts: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.depth == 1:
            parts[row.kind] += row.duration_s
    return Waterfall(root, whole / 1e9, tuple(rows), dict(parts), len(spans))


def _walk(
    span: Span, children: Mapping[str, list[Span]], depth: int, start: int, whole: int
) -> Iterator[Row]:
    kind = "root" if depth == 0 else span.name
    yield _row(span.name, kind, depth, span.start_ns, span.end_ns, start, whole, span)
    below = children.get(span.span_id, ())
    covered = span.start_ns
    for child in below:
        yield from _gap(covered, child.start_ns, depth + 1, start, whole)
        yield from _walk(child, children, min(depth + 1, DEPTH_MAX), start, whole)
        covered = max(covered, child.end_ns)
    if below:
        yield from _gap(covered, span.end_ns, depth + 1, start, whole)


def _gap(since: int, until: int, depth: int, start: int, whole: int) -> Iterator[Row]:
    if until - since > GAP_MIN * whole:
        yield _row("", "gap", min(depth, DEPTH_MAX), since, until, start, whole, None)


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
