"""The book of readings: running sums, so that any window's events are one subtraction.

Every row carries the sums of its scope up to its own window. Events in (a, b] are the sums at the
last row up to b less those at the last row up to a: two index look-ups, whatever the window's
length. Late data amend one row and shift the sums of it and all later rows in one UPDATE.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.db.models import F, QuerySet

from slo.budget import Counts
from slo.models import Objective, Reading
from tracing.types import Signal

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MEASURED = (Signal.OK, Signal.NO_TRAFFIC)


@dataclass(frozen=True)
class Measured:
    """What was read of one window; counts None where nothing was measured."""

    window_end: datetime
    counts: Counts | None
    signal: Signal


@dataclass(frozen=True)
class Booked:
    """A window whose row was written now; fresh: for the first time, or measured for the first."""

    measured: Measured
    fresh: bool


def readings_book(
    *, objective: Objective, scope: str, window_s: float, measured: Sequence[Measured]
) -> list[Booked]:
    """Writes windows, oldest first, all or nothing; returns those that changed anything.

    Booking the same measurements again changes nothing. A window once measured stays measured:
    data that can no longer be read do not undo it.
    """
    if not measured:
        return []
    with transaction.atomic():
        rows = _rows(objective, scope)
        known = {
            row.window_end: row
            for row in rows.filter(
                window_end__gte=measured[0].window_end, window_end__lte=measured[-1].window_end
            )
        }
        newest = rows.order_by("-window_end").first()
        booked: list[Booked] = []
        to_append: list[Measured] = []
        for one in measured:
            row = known.get(one.window_end)
            if row is not None:
                fresh = row.signal not in MEASURED and one.signal in MEASURED
                if _amend(rows, row, one, signal_changes=fresh):
                    booked.append(Booked(one, fresh=fresh))
            elif newest is None or one.window_end > newest.window_end:
                booked.append(Booked(one, fresh=True))
                to_append.append(one)
            elif one.counts is not None:
                booked.append(Booked(one, fresh=True))
                _insert(objective, scope, window_s, one)
        _append(objective, scope, window_s, to_append)
    return booked


def counts_between(objective: Objective, scope: str, start: datetime, end: datetime) -> Counts:
    """Events of the windows that ended in (start, end]; zero where no reading reaches."""
    return sums_at(objective, scope, end) - sums_at(objective, scope, start)


def sums_at(objective: Objective, scope: str, at: datetime) -> Counts:
    """Running sums up to the last window that ended at or before `at`."""
    rows = _rows(objective, scope)
    last = rows.filter(window_end__lte=at).order_by("-window_end").first()
    if last is not None:
        return Counts(last.good_sum, last.total_sum)
    first = rows.order_by("window_end").first()
    # Pruning takes the oldest rows, so the first one left need not start from zero.
    return base_of(first) if first is not None else Counts(0, 0)


def sums_at_each(
    objective: Objective, scope: str, moments: Collection[datetime]
) -> dict[datetime, Counts]:
    """`sums_at` of several moments: two look-ups, and one more for each that fell into a hole."""
    rows = _rows(objective, scope)
    first = rows.order_by("window_end").first()
    if first is None:
        return dict.fromkeys(moments, Counts(0, 0))
    # Where windows follow each other, the last one up to a moment ended at the edge before it.
    edges = {at: edge_before(at, first.window_s) for at in moments}
    later = {edge for edge in edges.values() if edge >= first.window_end}
    known = {
        row.window_end: Counts(row.good_sum, row.total_sum)
        for row in rows.filter(window_end__in=later)
    }
    base = base_of(first)
    return {
        at: base if at < first.window_end else known.get(edge) or sums_at(objective, scope, at)
        for at, edge in edges.items()
    }


def sums_measured(
    asked: Collection[tuple[Objective, str, datetime]], window_s: float
) -> dict[tuple[Objective, str, datetime], Counts]:
    """`sums_at` of moments of many objectives and scopes in one look-up, without those before which
    the last window was not measured."""
    edges = {each: edge_before(each[2], window_s) for each in asked}
    if not edges:
        return {}
    rows = Reading.objects.filter(
        objective__in={objective for objective, _scope, _at in asked},
        scope__in={scope for _objective, scope, _at in asked},
        window_end__in=set(edges.values()),
    )
    known = {
        (row.objective_id, row.scope, row.window_end): Counts(row.good_sum, row.total_sum)
        for row in rows
    }
    found = {each: known.get((each[0].pk, each[1], edge)) for each, edge in edges.items()}
    return {each: counts for each, counts in found.items() if counts is not None}


def window_of(window_s: float) -> timedelta:
    """Exact, in whole milliseconds: seconds in floats would drift apart."""
    return timedelta(milliseconds=round(window_s * 1_000))


def edge_before(at: datetime, window_s: float) -> datetime:
    """The last window edge at or before a moment."""
    return at - (at - EPOCH) % window_of(window_s)


def base_of(row: Reading) -> Counts:
    """Running sums just before a row."""
    return Counts(row.good_sum - row.good, row.total_sum - row.total)


def _rows(objective: Objective, scope: str) -> QuerySet[Reading]:
    return Reading.objects.filter(objective=objective, scope=scope)


def _amend(rows: QuerySet[Reading], row: Reading, one: Measured, *, signal_changes: bool) -> bool:
    if one.counts is None:
        return False
    growth = one.counts - Counts(row.good, row.total)
    if growth == Counts(0, 0) and not signal_changes:
        return False
    signal = one.signal if one.signal in MEASURED else row.signal
    rows.filter(pk=row.pk).update(good=one.counts.good, total=one.counts.total, signal=signal)
    _shift(rows, row.window_end, growth)
    return True


def _shift(rows: QuerySet[Reading], since: datetime, growth: Counts) -> None:
    rows.filter(window_end__gte=since).update(
        good_sum=F("good_sum") + growth.good, total_sum=F("total_sum") + growth.total
    )


def _insert(objective: Objective, scope: str, window_s: float, one: Measured) -> None:
    """A window older than the newest known: its row takes the sums before it, then all shift."""
    counts = one.counts or Counts(0, 0)
    base = sums_at(objective, scope, one.window_end)
    _row(objective, scope, window_s, one, base).save(force_insert=True)
    _shift(_rows(objective, scope), one.window_end, counts)


def _append(
    objective: Objective, scope: str, window_s: float, measured: Sequence[Measured]
) -> None:
    if not measured:
        return
    sums = sums_at(objective, scope, measured[-1].window_end)
    fresh = []
    for one in measured:
        sums = sums + (one.counts or Counts(0, 0))
        fresh.append(_row(objective, scope, window_s, one, sums))
    Reading.objects.bulk_create(fresh)


def _row(objective: Objective, scope: str, window_s: float, one: Measured, sums: Counts) -> Reading:
    counts = one.counts or Counts(0, 0)
    return Reading(
        objective=objective,
        scope=scope,
        window_end=one.window_end,
        window_s=window_s,
        good=counts.good,
        total=counts.total,
        good_sum=sums.good,
        total_sum=sums.total,
        signal=one.signal,
    )
