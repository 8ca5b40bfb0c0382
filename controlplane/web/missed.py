"""Which promises one request broke, as far as its spans tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.staging import objective_facts
from slo.models import Objective
from tracing.types import Span

LATENCY = "gen_ai.latency."


@dataclass(frozen=True)
class Missed:
    """`took_s` is None where the request failed instead of being late."""

    objective: Objective
    took_s: float | None = None
    allowed_s: float | None = None


def promised(tenant: Tenant) -> list[Objective]:
    """What requests may miss, by name."""
    return list(Objective.objects.filter(tenant=tenant, enabled=True).order_by("name"))


def missed(
    promises: Sequence[Objective], root: Span, spans: Sequence[Span], *, failed: bool
) -> list[Missed]:
    """Those of the root's service that its request missed, as far as `spans` of it tell.

    Objectives of single tokens are left out: spans tell only how long all of them took.
    """
    found = []
    for objective in promises:
        if objective.service != root.service:
            continue
        known = objective_facts(objective)
        took_s, allowed_s = _took_s(objective, root, spans), known.threshold_s
        if known.measures == "success" and failed:
            found.append(Missed(objective))
        elif took_s is not None and allowed_s is not None and took_s > allowed_s:
            found.append(Missed(objective, took_s, allowed_s))
    return found


def _took_s(objective: Objective, root: Span, spans: Sequence[Span]) -> float | None:
    """What the objective times of this request; the longest, where several spans are timed."""
    spec = objective.spec
    if spec.get("source") == "spans":
        timed = [_measure(span, spec.get("measure", "")) for span in spans
                 if span.name == spec.get("span")]  # fmt: skip
        return max((seconds for seconds in timed if seconds is not None), default=None)
    measures = {"ttft": f"{LATENCY}time_to_first_token", "e2e": "duration"}
    measure = measures.get(objective_facts(objective).measures)
    return _measure(root, measure) if measure else None


def _measure(span: Span, measure: str) -> float | None:
    if measure == "duration":
        return span.duration_ns / 1e9
    return seconds(span.attributes.get(measure))


def seconds(text: str | None) -> float | None:
    """An attribute that holds seconds; None where it holds none."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
