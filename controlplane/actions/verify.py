"""Did it help? A sequential test of the share of bad events, before against after.

Pure arithmetic, no Django. The share is compared, not a percentile: a percentile of a few hundred
requests is a handful of them. Two one-sided tests of two proportions, each at 5 % in total over all
looks. *Worse* spends them evenly (Bonferroni: 5 % ÷ looks a look, and at the last look what was not
spent), as harm has to end soon. *Better* keeps them for the last look, when most is known: a change
on trial helps already, so an early proof is worth little (as Haybittle, 1971, and Peto, 1976).
There one window may be left out too, so that a disturbance of 15 s does not hide what all others
show; it is told, and the choice of it is paid for. Requests of one window share one queue, so they
are not independent: the variance is scaled by the spread between windows (quasi-binomial, never
below 1) and the tail is Student's t with the windows' degrees of freedom, so that two windows
against two prove only what is plain to see. An incident is noticed on its way up; that climb is a
trend, not noise, so the spread of the side to be left is taken around its best non-decreasing fit.

Measured (1,500 seeded runs without effect, 500 with one; looks at 2, 3 and 4 windows of 100
requests after 2 to 4 before; the false positives again in
tests/controlplane/actions/test_verify.py). Without effect *better* comes in at most 0.7 % of runs
with independent requests, 2.7 % and 5.1 % when windows vary as in a bursty queue (beta,
intra-window correlation 0.02 and 0.1). Power with 2 windows before, and in brackets with every look
alike: 99 % (91) for 80 → 40 %, 89 (76) for 35 → 10 %, 49 (30) for 30 → 15 % (0.02); 94 (88) for 60
→ 5 %, 48 (37) for 35 → 10 % (0.1); 80 for 80 % → 50, 2, 2, 2 %; with 4 before 72 (54) for 30 → 15 %
(0.02). Small effects are not proved in 90 s, and what is not proved is undone. What it cannot tell:
a burst that ended by itself from a remedy. Hence the load has to be alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from controlplane.diagnosis.amounts import several
from slo.budget import Counts, bad_share_bar
from slo.indicator import REQUESTS, Unit

ALPHA = 0.05
# Of it, for *better*: the looks before the last together, the last, and the last but one window.
EARLY, LAST, BUT_ONE = 0.01, 0.03, 0.01
WINDOWS_MIN = 2
EVENTS_MIN = 50
# Near saturation a little less load is a lot less queue: an after-window with under three quarters
# of the arrivals proves nothing about the knob. The same the other way round for harm.
LOAD_SHARE_MIN = 0.75


class Verdict(StrEnum):
    BETTER = "better"
    NO_WORSE = "no_worse"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Sample:
    """Measured control windows, oldest first, of events that are `unit`; `arrivals` are requests
    received in them.

    Without a count of arrivals the events stand for them.
    """

    windows: tuple[Counts, ...]
    window_s: float
    arrivals: float | None = None
    unit: Unit = REQUESTS

    @property
    def counts(self) -> Counts:
        return sum(self.windows, Counts(0, 0))

    @property
    def share(self) -> float:
        """Bad share, 0 without events."""
        return self.counts.bad_share or 0.0

    @property
    def arriving(self) -> str:
        return self.unit.many if self.arrivals is None else REQUESTS.many

    @property
    def load(self) -> float:
        """Arrivals per second."""
        seconds = len(self.windows) * self.window_s
        arrived = self.counts.total if self.arrivals is None else self.arrivals
        return arrived / seconds if seconds else 0.0

    @property
    def enough(self) -> bool:
        return len(self.windows) >= WINDOWS_MIN and self.counts.total >= EVENTS_MIN


@dataclass(frozen=True)
class Guard:
    """Another objective of the same service, which the action must not break."""

    name: str
    target: float
    fast_burn: float
    before: Sample
    after: Sample

    @property
    def added_burn(self) -> float:
        return (self.after.share - self.before.share) / (1 - self.target)


@dataclass(frozen=True)
class Result:
    """`verdict` None: wait for the next window. p-values are not corrected for other looks.

    `harmed` are the guards that the sentence says got worse.
    """

    verdict: Verdict | None
    sentence: str
    p_better: float | None = None
    p_worse: float | None = None
    look: int = 0
    harmed: tuple[Guard, ...] = ()


def looks_max(*, ttl_s: float, window_s: float, settle_s: float) -> int:
    """How many looks fit: window 0 is skipped, look k needs k + 1 windows, all settled."""
    return max(1, int((ttl_s - settle_s) / window_s) - 1 - (WINDOWS_MIN - 1))


def verdict(
    before: Sample,
    after: Sample,
    *,
    budget: float,
    looks: int,
    last: bool,
    guards: Sequence[Guard] = (),
) -> Result:
    """Better, worse, inconclusive (only when `last`), or wait.

    `budget` is the objective's, `looks` how many will be taken at most. A guard that got worse and
    now spends more than its budget makes it worse when that would be an incident of its own, or
    costs its promise at least the burn (bad share ÷ budget) that this one was spared. A smaller
    price is told and paid: undoing 33 % of late first tokens for 1.4 % of slow ones helps nobody.
    """
    look = len(after.windows) - WINDOWS_MIN + 1
    looks = max(looks, look)  # one more where the last comes late
    if not before.enough or not after.enough:
        which, sample = ("before", before) if not before.enough else ("after", after)
        windows = several(len(sample.windows), "window", "windows")
        return _wait(
            last,
            f"too few {sample.unit.many} to judge by {which} the change: "
            f"{sample.counts.total:.0f} in {windows}, and {EVENTS_MIN} in {WINDOWS_MIN} are needed",
        )
    alpha, proof = _alphas(look, looks, last)
    p_better, p_worse = p_fell(before, after), p_fell(after, before)
    told, odd = _shares(before, after), ""
    if last and p_better >= proof:
        p_rest, window = p_fell_but_one(before, after)
        if p_rest < BUT_ONE:
            p_better, odd = p_rest, f"; but for one window, with {_share(window)}"
    better = p_better < proof
    if not better and after.share >= before.share:
        told = f"no better, {told}"
    elif not better:
        told = f"not proved to be better, {told}, which {_windows(before, after)} may do by chance"

    def result(kind: Verdict, p: float, more: str = "") -> Result:
        seen = f"(look {look} of {looks}, p = {p:.2g}{odd})"
        return Result(kind, f"{told} {seen}{more}", p_better, p_worse, look)

    saved_burn = (before.share - after.share) / budget
    harmed = tuple(g for g in guards if _harmed(g, alpha))
    price = "".join(
        f"; “{g.name}” got worse: {_shares(g.before, g.after)}, over its budget of "
        f"{share(1 - g.target)}"
        for g in harmed
    )
    if any(_broken(g, saved_burn) for g in harmed):
        return replace(result(Verdict.WORSE, p_better, price), harmed=harmed)
    if better and after.load >= LOAD_SHARE_MIN * before.load:
        return replace(result(Verdict.BETTER, p_better, price), harmed=harmed)
    if p_worse < alpha and before.load >= LOAD_SHARE_MIN * after.load:
        return result(Verdict.WORSE, p_worse)
    more = ""
    if better or p_worse < alpha:
        more = (
            f"; the load changed from {before.load:.1f} to {after.load:.1f} {after.arriving} "
            "per second"
        )
    found = result(Verdict.INCONCLUSIVE, min(p_better, p_worse), more)
    return found if last else replace(found, verdict=None)


def unharmed(promises: Sequence[Guard], *, looks: int, last: bool) -> Result:
    """For a change that has nothing to mend: worse as soon as a promise is broken by it.

    No worse (only when `last`) says that no promise with enough events was seen to break, at the
    same error of 5 % in all; without one of those it is inconclusive.
    """
    measured = [p for p in promises if p.before.enough and p.after.enough]
    look = max((len(p.after.windows) - WINDOWS_MIN + 1 for p in measured), default=0)
    alpha = ALPHA / looks
    broken = next((p for p in measured if _harmed(p, alpha)), None)
    if broken is not None:
        shares = _shares(broken.before, broken.after)
        p_worse = p_fell(broken.after, broken.before)
        told = f"“{broken.name}” got worse: {shares} (p = {p_worse:.2g})"
        return Result(Verdict.WORSE, told, p_worse=p_worse, look=look)
    if not last:
        return Result(None, "no promise is broken so far", look=look)
    if not measured:
        told = f"no objective counted {EVENTS_MIN} in {WINDOWS_MIN} windows on both sides"
        return Result(Verdict.INCONCLUSIVE, told)
    told = "; ".join(f"“{p.name}”: {_shares(p.before, p.after)}" for p in measured)
    return Result(Verdict.NO_WORSE, f"no objective was seen to get worse: {told}", look=look)


def served_again(
    promises: Sequence[Guard], *, looks: int, last: bool, nobody_waits: bool
) -> Result:
    """As `unharmed`, for the end of shedding, which must not last because too few come to prove it.

    Where nothing is measured on both sides, it is kept if no objective spends more than its budget
    or, with too few events, than makes an incident, and, with too few for all of them, if
    `nobody_waits` (seen, not supposed): who is not there is not kept waiting. Most of what came
    before was turned away, so a promise that has enough events since alone, and breaks, ends it
    at once.
    """
    result = unharmed(promises, looks=looks, last=last)
    if result.verdict is Verdict.WORSE:
        return result
    alone = [p for p in promises if p.after.enough and not p.before.enough]
    for promise in alone:
        if promise.after.share > max(_bar(promise), promise.before.share):
            told = f"“{promise.name}” is broken: {_share(promise.after)}"
            return Result(Verdict.WORSE, told, look=result.look)
    if result.verdict is not Verdict.INCONCLUSIVE:
        return result
    if not alone and not nobody_waits:
        return replace(result, sentence=f"{result.sentence}, and the queue is not seen to be empty")
    told = "; ".join(f"“{p.name}”: {_share(p.after)}" for p in promises if p.after.counts.total)
    told = told or "nothing was measured"
    if any(_overspent(p) for p in promises):
        return replace(result, sentence=f"too few to compare, and no good sign: {told}")
    return Result(Verdict.NO_WORSE, f"too few to compare, and no promise is broken: {told}")


def _overspent(promise: Guard) -> bool:
    limit = 1 - promise.target if promise.after.enough else _bar(promise)
    return promise.after.share > max(limit, promise.before.share)


def _bar(promise: Guard) -> float:
    return bad_share_bar(promise.target, promise.fast_burn)


def p_fell(before: Sample, after: Sample) -> float:
    """One-sided p-value of "the bad share did not fall" against "it fell"."""
    n1, n2 = before.counts.total, after.counts.total
    if not n1 or not n2:
        return 1.0
    pooled = (before.counts.bad + after.counts.bad) / (n1 + n2)
    variance = pooled * (1 - pooled) * (1 / n1 + 1 / n2)
    if variance <= 0:
        return 0.5
    spread, freedom = dispersion(before, after)
    return t_tail((before.share - after.share) / math.sqrt(variance * spread), freedom)


def p_fell_but_one(before: Sample, after: Sample) -> tuple[float, Sample]:
    """p_fell without the window after the change that shows least of it, and that window.

    Corrected for the choice among them (Bonferroni). 1 where too few would be left to judge by.
    """
    found = [(1.0, after)]
    for i, window in enumerate(after.windows):
        rest = replace(after, windows=after.windows[:i] + after.windows[i + 1 :])
        if rest.enough:
            p = min(1.0, len(after.windows) * p_fell(before, rest))
            found.append((p, replace(after, windows=(window,))))
    return min(found, key=lambda each: each[0])


def dispersion(before: Sample, after: Sample) -> tuple[float, float]:
    """Variance between windows over what independent requests would give, at least 1; and its df.

    Pearson's χ², of `after` around its share, of `before` around its non-decreasing fit: such a fit
    of k exchangeable windows has 1 + 1/2 + … + 1/k levels on average (Barlow et al., 1972).
    """
    climb = climbing(before.windows)
    levels = sum(1 / k for k in range(1, len(climb) + 1))
    flat = [after.share] * len(after.windows)
    freedom = len(climb) - levels + max(0, len(flat) - 1)
    chi2 = _chi2(before.windows, climb) + _chi2(after.windows, flat)
    return (max(1.0, chi2 / freedom), freedom) if freedom > 0 else (1.0, 1.0)


def climbing(windows: Sequence[Counts]) -> list[float]:
    """The non-decreasing bad shares nearest to the windows' (pool adjacent violators)."""
    blocks: list[tuple[Counts, int]] = []
    for window in windows:
        block, size = window, 1
        while blocks and (blocks[-1][0].bad_share or 0.0) >= (block.bad_share or 0.0):
            former, more = blocks.pop()
            block, size = former + block, size + more
        blocks.append((block, size))
    return [block.bad_share or 0.0 for block, size in blocks for _ in range(size)]


def _chi2(windows: Sequence[Counts], shares: Sequence[float]) -> float:
    """A share of 0 or 1 is taken half an event away from it, lest one event weigh without end."""
    return sum(
        (w.bad - w.total * p) ** 2 / (w.total * max(p * (1 - p), 0.5 / w.total))
        for w, p in zip(windows, shares, strict=True)
        if w.total
    )


def t_tail(t: float, freedom: float, *, slices: int = 100) -> float:
    """P(T > t) of Student's t, by Simpson's rule on its density in the angle atan(t/√df)."""
    angle = math.atan2(t, math.sqrt(freedom))
    start, width = angle, (math.pi / 2 - angle) / slices

    def density(a: float) -> float:
        # max: the cosine of the last point may round to just below 0
        return float(max(0.0, math.cos(a)) ** (freedom - 1))

    total = density(start) + density(math.pi / 2)
    total += sum((4 if i % 2 else 2) * density(start + i * width) for i in range(1, slices))
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    return min(1.0, math.exp(log_scale) / math.sqrt(math.pi) * total * width / 3)


def _alphas(look: int, looks: int, last: bool) -> tuple[float, float]:
    """What this look may err by for harm, and for *better*.

    The last one may come early (the queue took long to drain): it takes what the others left.
    """
    left = looks - look if last else 0
    early = EARLY / max(1, looks - 1)
    return ALPHA * (1 + left) / looks, LAST + early * left if last else early


def _harmed(guard: Guard, alpha: float) -> bool:
    """Measured on both sides, significantly worse, and now over its budget."""
    if not guard.before.enough or not guard.after.enough:
        return False
    return guard.after.share > 1 - guard.target and p_fell(guard.after, guard.before) < alpha


def _broken(guard: Guard, saved_burn: float) -> bool:
    """Its windows are bad (NORMS, Time) and were not, or it lost as much as the objective gained.

    One that was broken before is not broken anew: what it lost is weighed like any other price.
    """
    anew = guard.after.share > _bar(guard) >= guard.before.share
    return anew or guard.added_burn >= saved_burn


def _wait(last: bool, sentence: str) -> Result:
    return Result(Verdict.INCONCLUSIVE if last else None, sentence)


def _shares(before: Sample, after: Sample) -> str:
    old, new = before.counts, after.counts
    verb = "fell" if after.share < before.share else "rose"
    if after.share == before.share:
        verb = "stayed"
    return (
        f"the share of bad {after.unit.many} {verb} from {share(before.share)} of {old.total:,.0f} "
        f"to {share(after.share)} of {new.total:,.0f}"
    )


def share(bad: float) -> str:
    """A share in per cent, to three figures: 79%, 26.9%, 1.29%."""
    return f"{100 * bad:.3g}%"


def _windows(before: Sample, after: Sample) -> str:
    """What is compared: what one window holds is late together."""
    windows = several(len(before.windows), "window", "windows")
    return f"{windows} before and {len(after.windows)} after"


def _share(sample: Sample) -> str:
    return f"{share(sample.share)} of {several(sample.counts.total, *sample.unit, ',.0f')} bad"
