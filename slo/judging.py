"""How each objective stands in the newest control windows: read, book, judge.

Windows are aligned to the epoch, and agents read their engines just before each edge. A window is
judged once each engine that is not stale was heard of at its end, and at the latest once its data
had time to arrive (one scrape and 1.5 s). With every new window the last 8 are read again, and
their rows amended.
What was missed within the last 8 h is made up for, at most 240 windows a pass: a control plane that
slept reads on from where it stopped, and a gap that has ended is read again, because a spool
replays it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Max, Min, Q

from controlplane.accounts.models import Tenant
from slo.budget import Counts, burn_rate, window_is_bad
from slo.burn import PairState, pair_state, pairs_of
from slo.indicator import SpecError, indicators
from slo.models import Objective, Reading
from slo.readings import (
    EPOCH,
    MEASURED,
    Booked,
    Measured,
    edge_before,
    readings_book,
    sums_at_each,
    window_of,
)
from slo.watched import Watched
from tracing.types import Grid, Reader, ShareSeries, Signal

logger = logging.getLogger(__name__)

SETTLE_EXTRA_S = 1.5
# In scrapes: a sample from so shortly before a window's end is its last. Agents take it no earlier
# than `gpu_agent.collector.EARLY_MAX`.
LAST_OF_WINDOW = 0.15
STALE_AFTER_SCRAPES = 3
REJUDGE_WINDOWS = 8
CATCH_UP_WINDOWS_MAX = 240
# As long as an agent's spool keeps what it could not send.
CATCH_UP_WITHIN = timedelta(hours=8)
SCOPES_PER_OBJECTIVE_MAX = 64
EVENTS_MAX = 1e12  # of one window; running sums of such stay exact over a budget window


@dataclass(frozen=True)
class Judgement:
    """One control window of one scope (an engine's name, or "" for the whole service).

    `bad_share` and `burn` are None unless the signal is ok. `bad`: at least 20 events and more
    than `budget.bad_share_bar` of them bad. `fresh`: one of the newest 8 windows, judged or
    measured for the first time, not amended.
    `pairs` is filled for the newest window of scope "" only.
    """

    objective: Objective
    scope: str
    window_end: datetime
    window_s: float
    good: float
    total: float
    signal: Signal
    bad_share: float | None
    burn: float | None
    bad: bool
    fresh: bool
    pairs: tuple[PairState, ...] = ()

    @property
    def window_start(self) -> datetime:
        return self.window_end - timedelta(seconds=self.window_s)


def objectives_judge(
    *, tenant: Tenant, reader: Reader, now: datetime, engines: Sequence[str] = ()
) -> list[Judgement]:
    """Judges every enabled objective; returns the windows first judged or amended in this pass.

    Oldest first, engines before the whole service. `engines` are names that get a scope of their
    own first when a service shows more than 64. An objective that cannot be read is logged (and
    its `problem` set when its spec is why) and does not stop the others.
    """
    judgements: list[Judgement] = []
    objectives = list(Objective.objects.filter(tenant=tenant, enabled=True).order_by("slug"))
    watched = {
        service: Watched(service, [o for o in objectives if o.service == service], reader, now)
        for service in {objective.service for objective in objectives}
    }
    for objective in objectives:
        problem = ""
        try:
            judgements += _judge(objective, watched[objective.service], now, engines)
        except SpecError as error:
            problem = str(error)[:300]
            logger.warning("objective %s cannot be judged: %s", objective.slug, error)
        except Exception:
            logger.exception("objective %s was not judged", objective.slug)
            continue
        if problem != objective.problem:
            Objective.objects.filter(pk=objective.pk).update(problem=problem)
    return sorted(judgements, key=lambda j: (j.window_end, j.scope == "", j.scope))


def settle_s() -> float:
    """How long after its end a window is judged at the latest: a scrape, sent and stored."""
    return settings.TRIMTAB_SCRAPE_S + SETTLE_EXTRA_S


def _judge(
    objective: Objective, watched: Watched, now: datetime, engines: Sequence[str]
) -> list[Judgement]:
    window_s = settings.TRIMTAB_CONTROL_WINDOW_S
    newest = _newest(objective)
    if newest is not None and newest.window_end > now:
        _future_forget(objective, now)
        newest = _newest(objective)
    end = edge_before(now, window_s)
    if newest is not None and newest.window_end >= end:
        return []
    carried = _scopes_alive(objective, newest)
    seen = watched.last_seen(objective)
    if not _all_heard(objective, seen, carried - {""}, end, now):
        end = edge_before(now - timedelta(seconds=settle_s()), window_s)
        if newest is not None and newest.window_end >= end:
            return []
    judgements: list[Judgement] = []
    for grid in _grids(objective, newest, end, window_s):
        reader = watched.reader_of(objective, grid)
        judgements += _grid_judge(objective, reader, grid, end, now, seen, carried, engines)
    return judgements


def _all_heard(
    objective: Objective,
    seen: Mapping[str, datetime],
    engines: set[str],
    end: datetime,
    now: datetime,
) -> bool:
    """Whether the last sample up to `end` came of each engine, or one from after it. Then all are
    here, as an agent sends in order; after a cut the newest goes first, and the rest amends.
    One that is stale is not waited for: it left, or is cut off. Never so of spans, which come when
    a request ends, or not at all, nor of engines beyond those that are judged one by one.
    """
    indicator = indicators()[objective.indicator]
    if len(engines) >= SCOPES_PER_OBJECTIVE_MAX or indicator.span(objective.spec):
        return False
    heard = [seen[name] for name in engines & seen.keys() if now - seen[name] <= _stale_after()]
    last = timedelta(seconds=LAST_OF_WINDOW * settings.TRIMTAB_SCRAPE_S)
    return bool(heard) and min(heard) >= end - last


def _newest(objective: Objective) -> Reading | None:
    return Reading.objects.filter(objective=objective, scope="").order_by("-window_end").first()


def _future_forget(objective: Objective, now: datetime) -> None:
    """A clock that ran ahead booked windows that have not ended; they will be judged in time."""
    count, _ = Reading.objects.filter(objective=objective, window_end__gt=now).delete()
    logger.warning(
        "objective %s: dropped %d readings of windows after now: the clock was set back",
        objective.slug,
        count,
    )


def _grid_judge(
    objective: Objective,
    reader: Reader,
    grid: Grid,
    end: datetime,
    now: datetime,
    seen: Mapping[str, datetime],
    carried: set[str],
    engines: Sequence[str],
) -> list[Judgement]:
    """Reads, books and judges the windows of a grid; `end` is that of the newest window."""
    indicator = indicators()[objective.indicator]
    shares = indicator.read(reader, service=objective.service, spec=objective.spec, grid=grid)
    counts = _counts(shares, grid, of_spans=bool(indicator.span(objective.spec)))
    scopes = {scope: seen.get(scope) for scope in _scopes(counts, carried, engines)}
    scopes[""] = max(seen.values(), default=None)
    nothing: list[Counts | None] = [None] * grid.count
    measured = {
        scope: _measured(grid, counts.get(scope, nothing), at, now) for scope, at in scopes.items()
    }
    with transaction.atomic():
        booked = {
            scope: readings_book(
                objective=objective, scope=scope, window_s=grid.step_s, measured=windows
            )
            for scope, windows in measured.items()
        }
        pairs: tuple[PairState, ...] = ()
        if grid.end == end:
            pairs = pairs_at(objective, end, trusted=measured[""][-1].signal == Signal.OK)
    return [
        _judgement(objective, scope, grid.step_s, one, end, pairs)
        for scope, windows in booked.items()
        for one in windows
    ]


def _grids(
    objective: Objective, newest: Reading | None, end: datetime, window_s: float
) -> list[Grid]:
    """What to read: windows not yet judged, the 8 before `end` with them, and part of a gap."""
    window = window_of(window_s)
    if newest is None:
        return [Grid(end - REJUDGE_WINDOWS * window, end, window_s)]
    earliest = _earliest(objective, end, window_s)
    if earliest >= end:
        return []
    start = max(newest.window_end, earliest)
    stop = min(end, start + CATCH_UP_WINDOWS_MAX * window)
    start = max(min(start, stop - REJUDGE_WINDOWS * window), earliest)
    gap = _gap(objective, earliest, start, window_s)
    # The new ones last: what they bring is told once, so nothing may be left to do after them.
    return [*([gap] if gap else []), Grid(start, stop, window_s)]


def _earliest(objective: Objective, end: datetime, window_s: float) -> datetime:
    """Where the oldest window worth reading starts. Windows of another width were booked up to
    some edge; reading into them would count twice."""
    earliest = edge_before(end - CATCH_UP_WITHIN, window_s)
    rows = Reading.objects.filter(objective=objective, window_end__gt=earliest)
    other = rows.exclude(window_s=window_s).order_by("-window_end").first()
    if other is None:
        return earliest
    almost_one = window_of(window_s) - timedelta(microseconds=1)
    return edge_before(other.window_end + almost_one, window_s)


def _gap(objective: Objective, earliest: datetime, until: datetime, window_s: float) -> Grid | None:
    """At most 240 windows in which something is unmeasured that was measured before and after.

    A long gap is read part by part, another one with each new window, until it is filled or too
    old. The window after each part goes with it: it was booked what the gap counted.
    """
    window = window_of(window_s)
    rows = Reading.objects.filter(objective=objective, window_end__gt=earliest)
    heard = rows.filter(signal__in=MEASURED)
    is_measured = Q(signal__in=MEASURED)
    unheard: set[datetime] = set()
    for scope, first, last, count in (
        rows.order_by()
        .values_list("scope")
        .annotate(
            first=Min("window_end", filter=is_measured),
            last=Max("window_end", filter=is_measured),
            count=Count("id", filter=is_measured),
        )
    ):
        windows = 0 if last is None else (last - first) // window + 1
        if count < windows:
            known = set(heard.filter(scope=scope).values_list("window_end", flat=True))
            unheard |= {first + i * window for i in range(windows)} - known
    parts: list[list[datetime]] = []
    for at in sorted(at for at in unheard if at <= until):
        if not parts or at - parts[-1][0] >= CATCH_UP_WINDOWS_MAX * window:
            parts.append([])
        parts[-1].append(at)
    if not parts:
        return None
    part = parts[(until - EPOCH) // window % len(parts)]
    return Grid(part[0] - window, part[-1] + window, window_s)


def _counts(
    shares: Sequence[ShareSeries], grid: Grid, *, of_spans: bool
) -> dict[str, list[Counts | None]]:
    """Counts per window of each engine and, summed, of scope "". None: nothing was measured.

    Spans cannot be told missing from absent window by window: no span is no event. What cannot be
    a count (below 0, NaN, more than EVENTS_MAX) is none: one such window would spoil the running
    sums of the whole budget window.
    """
    unmeasured = Counts(0, 0) if of_spans else None
    by_scope: dict[str, list[Counts | None]] = {"": [unmeasured] * grid.count}
    for share in shares:
        columns = list(zip(share.good, share.total, strict=True))
        assert len(columns) == grid.count, f"{len(columns)} windows read, {grid.count} asked for"
        for scope in {share.labels.get("instance", ""), ""}:
            windows = by_scope.setdefault(scope, [unmeasured] * grid.count)
            for index, (good, total) in enumerate(columns):
                if 0 <= good <= EVENTS_MAX and 0 <= total <= EVENTS_MAX:
                    windows[index] = (windows[index] or Counts(0, 0)) + Counts(good, total)
    return by_scope


def _scopes_alive(objective: Objective, newest: Reading | None) -> set[str]:
    """Scopes that go on being judged though nothing is heard: not yet missing for an hour."""
    if newest is None:
        return set()
    last = Reading.objects.filter(objective=objective, window_end=newest.window_end)
    return set(last.exclude(signal=Signal.MISSING).values_list("scope", flat=True))


def _scopes(counts: Mapping[str, object], carried: set[str], engines: Sequence[str]) -> list[str]:
    names = (counts.keys() | carried) - {""}
    first = sorted(names, key=lambda name: (name not in engines, name not in carried, name))
    if len(first) > SCOPES_PER_OBJECTIVE_MAX:
        logger.warning("%d engines seen, %d judged", len(first), SCOPES_PER_OBJECTIVE_MAX)
    return first[:SCOPES_PER_OBJECTIVE_MAX]


def _measured(
    grid: Grid, counts: Sequence[Counts | None], seen: datetime | None, now: datetime
) -> list[Measured]:
    return [
        Measured(end, one, _signal(one, end, seen, now))
        for end, one in zip(grid.ends(), counts, strict=True)
    ]


def _signal(
    counts: Counts | None, window_end: datetime, seen: datetime | None, now: datetime
) -> Signal:
    """missing: not heard of for an hour; stale: the samples stop before the window's end, three
    scrapes ago or more; no_traffic: measured, and nothing happened."""
    if counts is None:
        return Signal.MISSING if seen is None else Signal.STALE
    if seen is not None and seen < window_end and now - seen > _stale_after():
        return Signal.STALE
    if counts.total > 0:
        return Signal.OK
    return Signal.MISSING if seen is None else Signal.NO_TRAFFIC


def _stale_after() -> timedelta:
    return timedelta(seconds=STALE_AFTER_SCRAPES * settings.TRIMTAB_SCRAPE_S)


def pairs_at(objective: Objective, end: datetime, *, trusted: bool) -> tuple[PairState, ...]:
    """Every burn pair of the objective over the windows that end at `end`."""
    first = Reading.objects.filter(objective=objective, scope="").order_by("window_end").first()
    if first is None:
        return ()
    history = end - first.window_end + timedelta(seconds=first.window_s)
    pairs = pairs_of(objective.window_days)
    lengths_s = {seconds for pair in pairs for seconds in (pair.long_s, pair.short_s)}
    starts = {seconds: end - timedelta(seconds=seconds) for seconds in lengths_s}
    sums = sums_at_each(objective, "", [end, *starts.values()])
    counts = {seconds: sums[end] - sums[start] for seconds, start in starts.items()}
    return tuple(
        pair_state(
            pair,
            target=objective.target,
            window_days=objective.window_days,
            long=counts[pair.long_s],
            short=counts[pair.short_s],
            history_s=history.total_seconds(),
            trusted=trusted,
        )
        for pair in pairs
    )


def _judgement(
    objective: Objective,
    scope: str,
    window_s: float,
    booked: Booked,
    end: datetime,
    pairs: tuple[PairState, ...],
) -> Judgement:
    one = booked.measured
    recent = one.window_end > end - REJUDGE_WINDOWS * window_of(window_s)
    counts = one.counts or Counts(0, 0)
    ok = one.signal == Signal.OK
    return Judgement(
        objective=objective,
        scope=scope,
        window_end=one.window_end,
        window_s=window_s,
        good=counts.good,
        total=counts.total,
        signal=one.signal,
        bad_share=counts.bad_share if ok else None,
        burn=burn_rate(counts, objective.target) if ok else None,
        bad=ok and window_is_bad(counts, objective.target, objective.fast_burn),
        fresh=booked.fresh and recent,
        pairs=pairs if scope == "" and one.window_end == end else (),
    )
