"""Readings written window by window and judged, as the loop does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db.models import Sum

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.services import incident_update
from slo.budget import Counts, window_is_bad
from slo.burn import PAIRS, PairState
from slo.models import Objective, Reading
from slo.services import Judgement
from tests.controlplane.diagnosis.scenes import TTFT
from tracing.types import Signal

START = datetime(2026, 3, 1, tzinfo=UTC)
WINDOW_S = 15.0
SEVERITIES = {pair.name: pair.severity for pair in PAIRS}


class Story:
    """Writes readings window by window and passes the judgement on, as the loop does."""

    def __init__(self, *, target: float = 0.95, fast_burn: float = 6.0) -> None:
        self.tenant = Tenant.objects.create(slug="acme", name="Acme")
        self.objective = Objective.objects.create(
            tenant=self.tenant,
            slug="ttft",
            name="TTFT within 500 ms",
            service="chat",
            indicator="latency",
            spec=TTFT.spec,
            target=target,
            fast_burn=fast_burn,
        )
        self.window = 0

    def now(self, window: int | None = None) -> datetime:
        at = self.window if window is None else window
        return START + timedelta(seconds=WINDOW_S * at + 6.5)

    def judge(
        self,
        bad: float,
        total: float = 100,
        *,
        signal: Signal = Signal.OK,
        scope: str = "engine-0",
        same_window: bool = False,
        firing: bool = False,
        pair: str = "1h/5m",
        killed: bool = False,
        now: datetime | None = None,
    ) -> Incident | None:
        self.window += not same_window
        end = START + timedelta(seconds=WINDOW_S * self.window)
        rows = Reading.objects.filter(objective=self.objective, scope=scope, window_end__lt=end)
        sums = rows.aggregate(good=Sum("good", default=0), total=Sum("total", default=0))
        Reading.objects.update_or_create(
            objective=self.objective,
            scope=scope,
            window_end=end,
            defaults={
                "good_sum": sums["good"] + total - bad,
                "total_sum": sums["total"] + total,
                "window_s": WINDOW_S,
                "good": total - bad,
                "total": total,
                "signal": signal,
            },
        )
        if killed:
            return None
        o = self.objective
        judgement = Judgement(
            objective=o,
            scope=scope,
            window_end=end,
            window_s=WINDOW_S,
            good=total - bad,
            total=total,
            signal=signal,
            bad_share=bad / total if total else None,
            burn=bad / total / o.budget if total else None,
            bad=signal == Signal.OK
            and window_is_bad(Counts(total - bad, total), o.target, o.fast_burn),
            fresh=True,
            pairs=(PairState(pair, SEVERITIES[pair], 3600, 300, 14.4, 20, 20, firing),)
            if scope == ""
            else (),
        )
        return incident_update(judgement=judgement, now=now or self.now())


def opened() -> tuple[Story, Incident]:
    """Two bad windows in a row, and the incident they open."""
    story = Story()
    story.judge(80)
    incident = story.judge(80)
    assert incident is not None
    return story, incident
