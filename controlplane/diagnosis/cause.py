"""The contract of a cause: a named explanation, judged on evidence for and against.

A cause is one module in causes/ with a module-level `CAUSE`, and a runbook docs/causes/<slug>.md.
It is a pure function of a Scene: no Django, no clock, no state. It always answers: a refuted cause
returns a low score with the facts that speak against it, so the page can list it as a rival.

Sentences are written in English when the explanation is made and kept as they were, like a log
line; labels are marked for translation and translated when shown.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

from controlplane.diagnosis.amounts import ms, several
from controlplane.diagnosis.attribution import PREFILL_TIME, attributed
from controlplane.diagnosis.capacity import BUSY, WAITING, capacity_per_s, working
from controlplane.diagnosis.demand import (
    GREW_MIN,
    KV_BLOCKS,
    KV_USED,
    REJECTED,
    SHED,
    arrivals,
    arrivals_now,
    demand_grew,
    held_grew,
    lengths,
    pool_grew,
)
from controlplane.diagnosis.facts import (
    BEYOND_MIN,
    CAP,
    POOL_SHRANK_MAX,
    PREEMPTIONS,
    QUEUE_TIME,
    Fact,
    beyond_fact,
    ceiling_per_s,
    counts_requests,
    follows_from_slowness,
    measured,
    queue_fact,
    queue_follows,
    score,
    slower_fact,
    traffic_fact,
    waits_fact,
)
from controlplane.diagnosis.finding import INFEASIBLE, Finding, Wish
from controlplane.diagnosis.relief import (
    SHED_KNOB,
    counts_shed,
    drain_s,
    engines_more,
    kept_per_s,
    shed_wishes,
)
from controlplane.diagnosis.scene import (
    METRIC_OF,
    RUNNING,
    STEPS_PER_WINDOW,
    WORD_OF,
    Change,
    Histogram,
    Point,
    Scene,
    Track,
    mean,
    percentile,
)
from controlplane.diagnosis.step_time import (
    EAGER_GREW_MAX,
    FORWARD_CPU,
    GPU_CLOCK,
    GRAPH_STEPS,
    STEP_TIME,
    StepTime,
    cpu_share,
    eager_share,
    graph_lost,
    step_time,
)
from slo.plugins import plugins

# All a cause needs comes from here: a plug-in imports its contract and nothing else of ours.
__all__ = [
    "BEYOND_MIN",
    "BUSY",
    "CAP",
    "EAGER_GREW_MAX",
    "FORWARD_CPU",
    "GPU_CLOCK",
    "GRAPH_STEPS",
    "GREW_MIN",
    "INFEASIBLE",
    "KV_BLOCKS",
    "KV_USED",
    "METRIC_OF",
    "POOL_SHRANK_MAX",
    "PREEMPTIONS",
    "PREFILL_TIME",
    "QUEUE_TIME",
    "REJECTED",
    "RUNNING",
    "SCORE_MIN",
    "SHED",
    "SHED_BY_PRIORITY",
    "SHED_KNOB",
    "STEPS_PER_WINDOW",
    "STEP_TIME",
    "UNKNOWN",
    "WAITING",
    "WORD_OF",
    "Cause",
    "Change",
    "Fact",
    "Finding",
    "Histogram",
    "Point",
    "Scene",
    "StepTime",
    "Track",
    "Wish",
    "arrivals",
    "arrivals_now",
    "attributed",
    "beyond_fact",
    "capacity_per_s",
    "causes",
    "ceiling_per_s",
    "counts_requests",
    "counts_shed",
    "cpu_share",
    "demand_grew",
    "drain_s",
    "eager_share",
    "engines_more",
    "follows_from_slowness",
    "gettext_noop",
    "graph_lost",
    "held_grew",
    "kept_per_s",
    "label",
    "lengths",
    "mean",
    "measured",
    "ms",
    "percentile",
    "pool_grew",
    "queue_fact",
    "queue_follows",
    "score",
    "several",
    "shed_wishes",
    "slower_fact",
    "step_time",
    "traffic_fact",
    "waits_fact",
    "working",
]

UNKNOWN = "unknown"
# The cause that names the turning away of low tiers itself: what is missed ends with that.
SHED_BY_PRIORITY = "shed_by_priority"
# A cause is named only from here on (NORMS: without evidence above its bar it is unknown).
SCORE_MIN = 0.5


def gettext_noop(text: str) -> str:
    """Marks a label for makemessages without importing Django."""
    return text


class Cause(Protocol):
    """Implemented by `CAUSE` of each module in causes/."""

    @property
    def slug(self) -> str: ...

    @property
    def label(self) -> str:
        """A few words for a title, marked with gettext_noop."""
        ...

    def examine(self, scene: Scene) -> Finding:
        """Score 0 to 1 with facts for and against. Never raises for want of data."""
        ...


@cache
def causes() -> dict[str, Cause]:
    """Every cause by slug, found by looking into causes/."""
    return plugins("controlplane.diagnosis.causes", "CAUSE")


def label(slug: str) -> str:
    """The untranslated label of a cause; of the slug itself when nobody knows it any more."""
    if slug == UNKNOWN:
        return gettext_noop("cause unknown")
    cause = causes().get(slug)
    return cause.label if cause else slug
