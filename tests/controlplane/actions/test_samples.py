"""Which control windows of a trial count."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.actions.models import Action
from controlplane.actions.trial import _samples
from controlplane.fleet.models import Engine
from slo.models import Reading
from tests.memory_reader import MemoryReader
from tests.slo.fleet_of_samples import START, WINDOW, a_tenant, an_objective
from tracing.types import Signal


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
    for n in range(1, 11):
        Reading.objects.create(
            objective=objective, scope="engine-0", window_end=START + n * WINDOW,
            window_s=WINDOW.total_seconds(), good=100 - n, total=100, signal=Signal.OK,
        )  # fmt: skip
    applied_at = START + 4 * WINDOW + timedelta(seconds=after_an_edge_s)
    action = Action(engine=Engine(name="engine-0", service="chat"), applied_at=applied_at, ttl_s=90)
    before, after = _samples(action, objective, MemoryReader(), applied_at + WINDOW)
    assert [w.bad for w in before.windows] == [1, 2, 3, 4]
    assert [w.bad for w in after.windows] == list(range(5 + skipped, 11))
