from __future__ import annotations

from typing import Any

import pytest

from controlplane.accounts.models import Tenant
from slo import services
from slo.fields import FieldError
from slo.models import Objective, Reading
from slo.services import objective_apply
from tests.memory_reader import MemoryReader
from tests.slo.fleet_of_samples import SETTLED, Engine, an_objective

pytestmark = pytest.mark.django_db


def test_applying_twice_updates_the_one_with_that_slug(tenant: Tenant) -> None:
    first = an_objective(tenant)
    second = an_objective(tenant, target=0.95, name="Looser")
    assert second.pk == first.pk
    assert Objective.objects.get().target == 0.95


def test_defaults_are_filled_in(tenant: Tenant) -> None:
    spec = {"slug": "ok", "service": "chat", "indicator": "success", "target": 0.999}
    objective = objective_apply(tenant=tenant, spec=spec)
    assert (objective.name, objective.window_days, objective.fast_burn) == ("ok", 30, 14.4)
    assert objective.spec["good_reasons"] == ["stop", "length"]


def test_readings_survive_a_new_target_but_not_a_new_threshold(tenant: Tenant) -> None:
    an_objective(tenant)
    reader = MemoryReader()
    end = Engine(reader).serve(10, 0)
    services.objectives_judge(tenant=tenant, reader=reader, now=end + SETTLED)
    an_objective(tenant, target=0.95)
    assert Reading.objects.exists()
    an_objective(tenant, spec={"threshold_ms": 250})
    assert not Reading.objects.exists()


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"target": 1}, "target", "target=1: allowed: 0.5 to 0.99999"),
        ({"target": 99}, "target", "target=99: allowed"),
        ({"target": "0.99"}, "target", "target='0.99': allowed"),
        ({"target": None}, "target", "target=None: allowed"),
        ({"slug": "No Spaces"}, "slug", "slug='No Spaces': allowed: small letters"),
        ({"service": ""}, "service", "service='': allowed: a text of 1 to 100 characters"),
        ({"service": "a\0b"}, "service", "no control characters"),
        ({"spec": {"metric": "a\n", "threshold_ms": 5}}, "spec.metric", "printable characters"),
        ({"window_days": 91}, "window_days", "window_days=91: allowed: 1 to 90"),
        ({"window_days": 7.5}, "window_days", "window_days=7.5: allowed: whole days"),
        ({"fast_burn": 0.5}, "fast_burn", "fast_burn=0.5: allowed: 1 to 1000"),
        ({"enabled": "yes"}, "enabled", "enabled='yes': allowed: true, false"),
        ({"indicator": "vibes"}, "indicator", "indicator='vibes': allowed: latency, success"),
        ({"spec": {"threshold_ms": -1}}, "spec.threshold_ms", "spec.threshold_ms=-1: allowed"),
        ({"spec": []}, "spec", r"spec=\[\]: allowed: an object"),
        ({"taget": 0.9}, "taget", "taget=0.9: allowed: no such field, only slug, name"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
    tenant: Tenant, changes: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(FieldError, match=words) as caught:
        an_objective(tenant, **changes)
    assert caught.value.param == param
    assert not Objective.objects.exists()


def test_a_tenant_has_a_limit_of_objectives(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "OBJECTIVES_PER_TENANT_MAX", 1)
    an_objective(tenant)
    with pytest.raises(FieldError, match="slug='two': allowed: 1 objectives"):
        an_objective(tenant, slug="two")
