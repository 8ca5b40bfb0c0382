"""What the cells of the fleet are coloured by: their state, or something measured of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Engine, Node
from controlplane.web.templatetags.ui import measure as measured
from tracing import query
from tracing.types import Grid

LEVELS = 5
FRESH = timedelta(seconds=60)


@dataclass(frozen=True)
class Measure:
    """`whole` gives what a full cell of an engine stands for; None: the most in the fleet."""

    label: Promise
    metric: str
    unit: str
    by: tuple[str, str]
    whole: Callable[[Engine], float | None]


@dataclass(frozen=True)
class Filling:
    """How full a cell is drawn: `share` 0 to 1, `level` 1 to LEVELS, and the value in words."""

    share: float
    level: int
    words: str

    @property
    def top(self) -> float:
        """Where the filled part begins, from above."""
        return 1 - self.share


def _slots(engine: Engine) -> float | None:
    slots = engine.values.get("max_num_seqs")
    return slots if isinstance(slots, int | float) and slots > 0 else None


ENGINE, GPU = ("service", "instance"), ("node", "gpu")
MEASURES: dict[str, Measure] = {
    "kv": Measure(_("KV cache"), "vllm:kv_cache_usage_perc", "ratio", ENGINE, lambda _engine: 1.0),
    "running": Measure(_("running"), "vllm:num_requests_running", "", ENGINE, _slots),
    "waiting": Measure(_("waiting"), "vllm:num_requests_waiting", "", ENGINE, lambda _engine: None),
    "gpu": Measure(_("GPU in use"), "gpu:utilization_ratio", "ratio", GPU, lambda _engine: 1.0),
}


class Readings:
    """The newest value of a measure within the last minute, of everything in the fleet. One query.

    Raises StoreError.
    """

    def __init__(self, tenant: Tenant, measure: Measure, now: datetime) -> None:
        self.measure = measure
        reader = query.reader(str(tenant.pk))
        grid = Grid(now - FRESH, now, FRESH.total_seconds())
        found = reader.gauge(measure.metric, grid, by=measure.by, over="last")
        self.values: Mapping[tuple[str, ...], float] = {
            tuple(series.labels[name] for name in measure.by): value
            for series in found
            if (value := series.last()) is not None and math.isfinite(value)
        }
        self.most = max(self.values.values(), default=0.0)

    def of_engine(self, engine: Engine) -> Filling | None:
        """None for a measure of GPUs, and where nothing was measured."""
        if self.measure.by != ENGINE:
            return None
        return self._filling((engine.service, engine.name), self.measure.whole(engine))

    def of_gpu(self, node: Node, gpu: Mapping[str, Any]) -> Filling | None:
        if self.measure.by != GPU:
            return None
        return self._filling((node.name, str(gpu.get("index", gpu.get("gpu", "")))), 1.0)

    def _filling(self, key: tuple[str, str], whole: float | None) -> Filling | None:
        value = self.values.get(key)
        if value is None:
            return None
        share = min(max(value / (whole or max(self.most, 1.0)), 0.0), 1.0)
        level = max(1, math.ceil(share * LEVELS))
        shown = value if self.measure.unit else round(value)
        return Filling(share, level, measured(shown, self.measure.unit))
