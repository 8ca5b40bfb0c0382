"""What a pass reads of a service, for all its objectives at once: a question costs the store
milliseconds however small its answer is."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import cached_property

from slo.indicator import indicators
from slo.models import Objective
from tracing.types import Grid, Reader


class Watched:
    """A service in one pass, which its `objectives` share."""

    def __init__(
        self, service: str, objectives: Collection[Objective], reader: Reader, now: datetime
    ) -> None:
        self._service = service
        self._metrics = sorted({metric for one in objectives for metric in _families(one)})
        self._reader = reader
        self._now = now

    def reader_of(self, objective: Objective, grid: Grid) -> Reader:
        """A reader for the grid's windows, which are read for all objectives when one asks."""
        if not _families(objective):
            return self._reader
        return self._reader.ahead(grid, where={"service": self._service}, metrics=self._metrics)

    def last_seen(self, objective: Objective) -> dict[str, datetime]:
        """By engine when it was last heard of; without those not heard of within an hour. One
        scrape brings all families of an objective, so any answers for the others."""
        indicator = indicators()[objective.indicator]
        if name := indicator.span(objective.spec):
            # A quiet exporter and a broken one look alike, so spans are never stale.
            seen = self._reader.span_last_seen(service=self._service, name=name)
            return dict.fromkeys(seen, self._now)
        found: dict[str, datetime] = {}
        for metric in indicator.families(objective.spec):
            for engine, at in self._heard.get(metric, {}).items():
                found[engine] = max(at, found.get(engine, at))
        return found

    @cached_property
    def _heard(self) -> dict[str, dict[str, datetime]]:
        return self._reader.last_seen(self._metrics, where={"service": self._service})


def _families(objective: Objective) -> tuple[str, ...]:
    try:
        return indicators()[objective.indicator].families(objective.spec)
    except KeyError:  # no such indicator, or not its spec: said when it is judged itself
        return ()
