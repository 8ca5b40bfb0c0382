"""How each objective stands in the newest control windows: read, book, judge.

Windows are aligned to the epoch. One is judged once its data had time to arrive (one scrape and
1.5 s after its end). With every new window the last 8 are read again, and their rows amended;
after a gap that has ended, back to its start within the last 240, because a spool replays it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

from django.conf import settings
from django.db import transaction

from controlplane.accounts.models import Tenant
from slo.budget import Counts, burn_rate, window_is_bad
from slo.burn import PairState, pair_state, pairs_of
from slo.indicator import Indicator, SpecError, indicators
from slo.models import Objective, Reading
from slo.readings import MEASURED, Booked, Measured, readings_book, sums_at
from tracing.types import Grid, Reader, ShareSeries, Signal

logger = logging.getLogger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SETTLE_EXTRA_S = 1.5
STALE_AFTER_SCRAPES = 3
REJUDGE_WINDOWS = 8
CATCH_UP_WINDOWS_MAX = 240
SCOPES_PER_OBJECTIVE_MAX = 64
SPAN_SEEN_WITHIN = timedelta(hours=1)


@dataclass(frozen=True)
class Judgement:
    """One control window of one scope (an engine's name, or "" for the whole service).

    `bad_share` and `burn` are None unless the signal is ok. `bad`: at least 20 events and more
    than `budget.bad_share_bar` of them bad. `fresh`: judged for the first time, not amended.
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
    for objective in Objective.objects.filter(tenant=tenant, enabled=True).order_by("slug"):
        problem = ""
        try:
            judgements += _judge(objective, reader, now, engines)
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
    """How long after its end a window is judged: its last scrape was made, sent and stored."""
    return settings.TRIMTAB_SCRAPE_S + SETTLE_EXTRA_S


def _judge(
    objective: Objective, reader: Reader, now: datetime, engines: Sequence[str]
) -> list[Judgement]:
    window_s = settings.TRIMTAB_CONTROL_WINDOW_S
    end = _aligned(now - timedelta(seconds=settle_s()), window_s)
    newest = Reading.objects.filter(objective=objective, scope="").order_by("-window_end").first()
    if newest is not None and newest.window_end >= end:
        return []
    grid = _grid(objective, newest, end, window_s)
    indicator = indicators()[objective.indicator]
    shares = indicator.read(reader, service=objective.service, spec=objective.spec, grid=grid)
    counts = _counts(shares, grid, of_spans=bool(indicator.span(objective.spec)))
    carried = _scopes_alive(objective, newest)
    scopes = _scopes(counts, carried, engines)
    seen = {scope: _seen(reader, indicator, objective, scope, now) for scope in scopes}
    # An engine leaves the scopes only when it is missing, so they hold whatever was seen.
    known = [at for at in seen.values() if at is not None]
    seen[""] = max(known) if known else _seen(reader, indicator, objective, "", now)
    nothing: list[Counts | None] = [None] * grid.count
    measured = {
        scope: _measured(grid, counts.get(scope, nothing), at, now) for scope, at in seen.items()
    }
    with transaction.atomic():
        booked = {
            scope: readings_book(
                objective=objective, scope=scope, window_s=window_s, measured=windows
            )
            for scope, windows in measured.items()
        }
        pairs = pairs_at(objective, end, trusted=measured[""][-1].signal == Signal.OK)
    return [
        _judgement(objective, scope, window_s, one, pairs if one.measured.window_end == end else ())
        for scope, windows in booked.items()
        for one in windows
    ]


def _aligned(at: datetime, window_s: float) -> datetime:
    """The last window edge at or before a moment, exact: seconds in floats would drift apart."""
    window = timedelta(milliseconds=round(window_s * 1_000))
    return at - (at - EPOCH) % window


def _grid(objective: Objective, newest: Reading | None, end: datetime, window_s: float) -> Grid:
    window = timedelta(seconds=window_s)
    start = end - REJUDGE_WINDOWS * window
    if newest is None:
        return Grid(start, end, window_s)
    earliest = end - CATCH_UP_WINDOWS_MAX * window
    gap = _gap_ended(objective, earliest)
    start = max(min(start, newest.window_end, gap - window if gap else start), earliest)
    # Windows of another width were booked up to here; reading into them would count twice.
    other = (
        Reading.objects.filter(objective=objective, window_end__gt=earliest)
        .exclude(window_s=window_s)
        .order_by("-window_end")
        .first()
    )
    if other is not None:
        start = max(
            start, _aligned(other.window_end + window - timedelta(microseconds=1), window_s)
        )
    start = min(_aligned(start, window_s), end - window)
    return Grid(start, end, window_s)


def _gap_ended(objective: Objective, earliest: datetime) -> datetime | None:
    """End of the oldest stale window that later windows of its scope were measured after."""
    rows = Reading.objects.filter(objective=objective, window_end__gt=earliest)
    oldest: dict[str, datetime] = {}
    stale = rows.filter(signal=Signal.STALE).order_by("window_end")
    for scope, window_end in stale.values_list("scope", "window_end"):
        oldest.setdefault(scope, window_end)
    ended = [
        window_end
        for scope, window_end in oldest.items()
        if rows.filter(scope=scope, window_end__gt=window_end, signal__in=MEASURED).exists()
    ]
    return min(ended, default=None)


def _counts(
    shares: Sequence[ShareSeries], grid: Grid, *, of_spans: bool
) -> dict[str, list[Counts | None]]:
    """Counts per window of each engine and, summed, of scope "". None: nothing was measured.

    Spans cannot be told missing from absent window by window: no span is no event.
    """
    unmeasured = Counts(0, 0) if of_spans else None
    by_scope: dict[str, list[Counts | None]] = {"": [unmeasured] * grid.count}
    for share in shares:
        columns = list(zip(share.good, share.total, strict=True))
        assert len(columns) == grid.count, f"{len(columns)} windows read, {grid.count} asked for"
        for scope in {share.labels.get("instance", ""), ""}:
            windows = by_scope.setdefault(scope, [unmeasured] * grid.count)
            for index, (good, total) in enumerate(columns):
                if not math.isnan(total):
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


def _seen(
    reader: Reader, indicator: Indicator, objective: Objective, scope: str, now: datetime
) -> datetime | None:
    """When a scope ("": any engine) was last heard of; None: not within an hour."""
    if name := indicator.span(objective.spec):
        spans = reader.spans(
            now - SPAN_SEEN_WITHIN,
            now,
            service=objective.service,
            instance=scope or None,
            name=name,
            limit=1,
        )
        # A quiet exporter and a broken one look alike, so spans are never stale.
        return now if spans else None
    where = {"service": objective.service} | ({"instance": scope} if scope else {})
    newest: datetime | None = None
    for metric in indicator.families(objective.spec):
        at = reader.last_seen(metric, where=where)
        newest = max(newest or at, at) if at else newest
        # One scrape brings all families, so a fresh one answers for the others.
        if newest is not None and now - newest <= _stale_after():
            break
    return newest


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
    now_sums = sums_at(objective, "", end)

    @cache
    def back(seconds: float) -> Counts:
        return now_sums - sums_at(objective, "", end - timedelta(seconds=seconds))

    return tuple(
        pair_state(
            pair,
            target=objective.target,
            window_days=objective.window_days,
            long=back(pair.long_s),
            short=back(pair.short_s),
            history_s=history.total_seconds(),
            trusted=trusted,
        )
        for pair in pairs_of(objective.window_days)
    )


def _judgement(
    objective: Objective,
    scope: str,
    window_s: float,
    booked: Booked,
    pairs: tuple[PairState, ...],
) -> Judgement:
    one = booked.measured
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
        fresh=booked.fresh,
        pairs=pairs if scope == "" else (),
    )
