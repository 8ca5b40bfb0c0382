"""The contract of a knob: one engine setting Trimtab may turn, along a ladder, within bounds.

A knob is one module in knobs/ with a module-level `KNOB`. Pure: no Django. The ladder (or, for a
setting that is no number, the choices) is what is tried; the bounds are the narrower of the knob's
own and those the engine reports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from slo.plugins import plugins

# Emergency or not, one action moves a knob at most so far (LOOP 3.4, invariant 4).
STEPS_MAX = 2


@dataclass(frozen=True)
class Knob:
    """`apply_class` hot: takes effect at a step boundary, loses no request; barrier: the engine
    swaps it between two steps, and holds everyone up meanwhile. `sheds`: turning it up turns
    requests away, so it is turned for safety's sake and not to tune.

    A knob has a `ladder`, or `choices` where its values are words.
    """

    slug: str
    label: str
    unit: str = ""
    minimum: int = 0
    maximum: int = 0
    ladder: tuple[int, ...] = ()
    choices: tuple[str, ...] = ()
    apply_class: Literal["hot", "barrier"] = "hot"
    sheds: bool = False

    def __post_init__(self) -> None:
        assert bool(self.ladder) != bool(self.choices), f"{self.slug}: a ladder or choices"
        assert list(self.ladder) == sorted(set(self.ladder)), f"{self.slug}: ladder not ascending"
        if self.ladder:
            assert self.minimum <= self.ladder[0]
            assert self.ladder[-1] <= self.maximum

    def bounds(self, reported: Mapping[str, Any] | None) -> tuple[float, float]:
        """The narrower of our bounds and the engine's `{"minimum", "maximum"}`."""
        reported = reported or {}
        low, high = reported.get("minimum"), reported.get("maximum")
        return (
            max(self.minimum, low) if isinstance(low, int | float) else self.minimum,
            min(self.maximum, high) if isinstance(high, int | float) else self.maximum,
        )

    def step(
        self,
        current: float,
        want: float,
        *,
        bounds: tuple[float, float] | None = None,
        steps_max: int = STEPS_MAX,
    ) -> int | None:
        """The rung to go to: the first that covers `want`, at most `steps_max` rungs away.

        None when there is no rung in that direction within bounds, or nothing to move.
        """
        low, high = bounds or (self.minimum, self.maximum)
        rungs = [rung for rung in self.ladder if low <= rung <= high]
        if want > current:
            ahead = [rung for rung in rungs if rung > current][:steps_max]
            covering = [rung for rung in ahead if rung >= want]
        elif want < current:
            ahead = [rung for rung in reversed(rungs) if rung < current][:steps_max]
            covering = [rung for rung in ahead if rung <= want]
        else:
            return None
        if covering:
            return covering[0]
        return ahead[-1] if ahead else None

    def options(self, *allowed: Collection[str] | None) -> tuple[str, ...]:
        """Our choices that everyone allows; None allows all."""
        return tuple(c for c in self.choices if all(a is None or c in a for a in allowed))


@cache
def knobs() -> dict[str, Knob]:
    """Every knob by slug, found by looking into knobs/."""
    return plugins("controlplane.actions.knobs", "KNOB")
