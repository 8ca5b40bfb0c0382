"""Which control windows of a trial count."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.actions.models import Action, Priority
from controlplane.actions.trial import ARRIVALS, _by_goodput, _guards, _samples, judge
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine
from slo.models import Objective, Reading
from tests.memory_reader import MemoryReader
from tests.slo.fleet_of_samples import START, WINDOW, a_tenant, an_objective
from tracing.types import Signal


def read_ten_windows(objective: Objective) -> None:
    """The n-th has n bad of 100."""
    for n in range(1, 11):
        Reading.objects.create(
            objective=objective, scope="engine-0", window_end=START + n * WINDOW,
            window_s=WINDOW.total_seconds(), good=100 - n, total=100, signal=Signal.OK,
        )  # fmt: skip


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("after_an_edge_s", "skipped"),
    [
        (2, 1),  # as orders come: the window of the change is most of one
        (6, 2),  # what is left of it is not
    ],
)
def test_one_window_is_skipped_and_not_nearly_two(after_an_edge_s: float, skipped: int) -> None:
    objective = an_objective(a_tenant("acme"))
    read_ten_windows(objective)
    applied_at = START + 4 * WINDOW + timedelta(seconds=after_an_edge_s)
    action = Action(engine=Engine(name="engine-0", service="chat"), applied_at=applied_at, ttl_s=90)
    before, after = _samples(action, objective, MemoryReader(), applied_at + WINDOW)
    assert [w.bad for w in before.windows] == [1, 2, 3, 4]
    assert [w.bad for w in after.windows] == list(range(5 + skipped, 11))


@pytest.mark.django_db
def test_a_verdict_names_the_price_other_promises_paid() -> None:
    tenant = a_tenant("acme")
    gaps = {"metric": "vllm:inter_token_latency_seconds", "threshold_ms": 50}
    mended, paid = an_objective(tenant), an_objective(tenant, slug="tpot", name="TPOT", spec=gaps)
    for n in range(1, 11):
        for objective, before, after in ((mended, 60, 0), (paid, 0, 7)):
            Reading.objects.create(
                objective=objective, scope="engine-0", window_end=START + n * WINDOW,
                window_s=WINDOW.total_seconds(), total=100, signal=Signal.OK,
                good=100 - (before if n <= 4 else after),
            )  # fmt: skip
    applied_at = START + 4 * WINDOW + timedelta(seconds=2)
    incident = Incident(tenant=tenant, objective=mended, scope="engine-0", bad_since=START)
    action = Action(
        tenant=tenant, engine=Engine(name="engine-0", service="chat"), incident=incident,
        applied_at=applied_at, ttl_s=90,
    )  # fmt: skip
    judged = judge(action, reader=MemoryReader(), now=applied_at + timedelta(seconds=90))
    assert judged.verdict == "better", judged.sentence
    assert judged.sentence.startswith("the share of bad requests fell")
    assert "“TPOT” got worse: the share of bad gaps between tokens rose" in judged.sentence
    assert judged.outcome["unit"] == mended.unit
    assert judged.sentence.endswith(", over its budget of 1%")
    lost = {"objective": "TPOT", "before": 0.0, "after": 0.07, "budget": pytest.approx(0.01)}
    assert judged.outcome["price"] == [lost]


@pytest.mark.django_db
def test_shedding_is_judged_by_goodput() -> None:
    """Of 250 who come in a window 100 are let in: the others are neither good nor left out."""
    tenant = a_tenant("acme")
    objective = an_objective(tenant)
    read_ten_windows(objective)
    an_objective(tenant, slug="answered", indicator="success", spec={}, name="Requests answered")
    reader = MemoryReader()
    for n in range(11):
        at = {"instance": "engine-0", "service": "chat"}
        reader.add(ARRIVALS, START + n * WINDOW, 250.0 * n, at)
    applied_at = START + 4 * WINDOW + timedelta(seconds=2)
    action = Action(
        tenant=tenant, engine=Engine(name="engine-0", service="chat"), applied_at=applied_at,
        ttl_s=90, priority=Priority.SAFETY,
    )  # fmt: skip
    assert _by_goodput(action, objective)
    before, after = _samples(action, objective, reader, applied_at + WINDOW, goodput=True)
    assert [w.bad for w in before.windows] == [151, 152, 153, 154]
    assert after.counts.total == 250 * 5
    guards = _guards(action, reader, applied_at, but=objective, answered=False)
    assert guards == [], "a promise to answer all cannot judge who turns some away"
    unseen, _ = _samples(action, objective, MemoryReader(), applied_at + WINDOW, goodput=True)
    assert unseen.windows == (), "what was not measured proves nothing"

    action.priority = Priority.REPAIR
    assert not _by_goodput(action, objective)
