"""The contract of a cause: a named explanation, judged on evidence for and against.

A cause is one module in causes/ with a module-level `CAUSE`, and a runbook docs/causes/<slug>.md.
It is a pure function of a Scene: no Django, no clock, no state. It always answers: a refuted cause
returns a low score with the facts that speak against it, so the page can list it as a rival.

Sentences are written in English when the explanation is made and kept as they were, like a log
line; labels are marked for translation and translated when shown.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from controlplane.diagnosis.scene import (
    METRIC_OF,
    WORD_OF,
    Histogram,
    Point,
    Scene,
    Track,
    mean,
    percentile,
)

# All a cause needs comes from here: a plug-in imports its contract and nothing else of ours.
__all__ = [
    "METRIC_OF",
    "SCORE_MIN",
    "UNKNOWN",
    "WORD_OF",
    "Cause",
    "Fact",
    "Finding",
    "Histogram",
    "Point",
    "Scene",
    "Track",
    "Wish",
    "causes",
    "gettext_noop",
    "label",
    "mean",
    "measured",
    "percentile",
    "score",
]

UNKNOWN = "unknown"
# A cause is named only from here on (NORMS: without evidence above its bar it is unknown).
SCORE_MIN = 0.5
# What a cause can reach at most when one fact it cannot do without fails or was not measured.
SCORE_REFUTED_MAX = 0.4


def gettext_noop(text: str) -> str:
    """Marks a label for makemessages without importing Django."""
    return text


@dataclass(frozen=True)
class Fact:
    """One measured sentence for (`supports`) or against a cause.

    `required`: without it the cause cannot be named. `weight` is its share in the score. `points`
    are (unix seconds, value or None) per control window.
    """

    sentence: str
    supports: bool
    metric: str = ""
    unit: str = ""
    before: float | None = None
    value: float | None = None
    threshold: float | None = None
    points: tuple[Point, ...] = ()
    required: bool = False
    weight: float = 1.0


@dataclass(frozen=True)
class Wish:
    """A value the cause would like a knob to have; the knob's ladder and bounds have the say.

    `limit` is a value not to pass, where the cause knows what would break beyond it.
    """

    knob: str
    to: float
    why: str
    limit: float | None = None


@dataclass(frozen=True)
class Finding:
    """A cause's opinion. `because` continues the sentence "… because"; `facts` are its numbers.

    `remedy` is ordered: the first wish that can be taken is. `no_remedy` says why there is none.
    """

    cause: str
    score: float
    because: str
    facts: dict[str, Any] = field(default_factory=dict)
    evidence: tuple[Fact, ...] = ()
    remedy: tuple[Wish, ...] = ()
    no_remedy: str = ""


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


def score(evidence: tuple[Fact, ...]) -> float:
    """Weight of the supporting facts over the weight of all, 0 to 1.

    At most SCORE_REFUTED_MAX when a required fact does not support.
    """
    total = sum(fact.weight for fact in evidence)
    share = sum(fact.weight for fact in evidence if fact.supports) / total if total else 0.0
    if any(fact.required and not fact.supports for fact in evidence):
        return round(min(share, SCORE_REFUTED_MAX), 3)
    return round(share, 3)


def measured(
    sentence: str,
    supports: bool,
    *,
    track: Track | None = None,
    metric: str = "",
    unit: str = "",
    threshold: float | None = None,
    value: float | None = None,
    required: bool = False,
    weight: float = 1.0,
) -> Fact:
    """A Fact with its numbers taken from a Track."""
    return Fact(
        sentence,
        supports,
        metric=metric,
        unit=unit,
        before=track.before if track else None,
        value=value if value is not None else (track.value if track else None),
        threshold=threshold,
        points=track.points if track else (),
        required=required,
        weight=weight,
    )


@cache
def causes() -> dict[str, Cause]:
    """Every cause by slug, found by looking into causes/."""
    package = importlib.import_module("controlplane.diagnosis.causes")
    found: dict[str, Cause] = {}
    for module in pkgutil.iter_modules(package.__path__):
        cause: Cause = importlib.import_module(f"{package.__name__}.{module.name}").CAUSE
        assert cause.slug == module.name, f"{module.name}: slug is {cause.slug!r}"
        found[cause.slug] = cause
    return found


def label(slug: str) -> str:
    """The untranslated label of a cause; of the slug itself when nobody knows it any more."""
    if slug == UNKNOWN:
        return gettext_noop("cause unknown")
    cause = causes().get(slug)
    return cause.label if cause else slug
