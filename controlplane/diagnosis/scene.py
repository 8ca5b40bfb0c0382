"""What a cause is shown: one engine, one objective, the windows that went bad and those before.

Pure: it reads through a tracing Reader and knows the time only from its fields, so the same scene
gives the same answer. A value nobody measured is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from controlplane.diagnosis.amounts import ms
from tracing.types import Grid, HistogramSeries, Reader, Series

# A control window holds at least two scrapes, so a third of it sees about one: the finest time
# share the data can carry. Steps without a sample are NaN and count neither way.
STEPS_PER_WINDOW = 3

# What an engine shows whatever it does.
RUNNING = "vllm:num_requests_running"

Point = tuple[float, float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class EngineFacts:
    """The engine as its agent last read it back. Empty values: nobody reads it.

    `engines` is how many the service has, this one among them; `node` the host it runs on.
    """

    name: str
    service: str
    values: Mapping[str, Any]
    knobs: Mapping[str, Mapping[str, Any]]
    config_version: int | None = None
    engines: int = 1
    node: str = ""

    @property
    def where(self) -> dict[str, str]:
        """Labels of its own metrics."""
        return {"service": self.service, "instance": self.name}

    def number(self, knob: str) -> float | None:
        """The running value of a numeric knob, None when it is not known."""
        value = self.values.get(knob)
        return float(value) if isinstance(value, int | float) else None

    def maximum(self, knob: str) -> float | None:
        """The highest value the engine allows, None when it does not say."""
        value = self.knobs.get(knob, {}).get("maximum")
        return float(value) if isinstance(value, int | float) else None

    def words(self, knob: str) -> tuple[Any, ...]:
        """What the knob may be, each in the place that its gauge shows; () unless it says."""
        words = tuple(self.knobs.get(knob, {}).get("choices") or ())
        return ("off", "on") if set(words) == {"off", "on"} else words

    @property
    def graph_seqs_max(self) -> float | None:
        """Running requests of the largest graph captured; a larger batch runs eagerly.

        None when the engine does not say, which is not the same as without bound.
        """
        value = self.knobs.get("graph_capture", {}).get("seqs_max")
        return float(value) if isinstance(value, int | float) else None

    def supports(self, knob: str) -> bool:
        """Whether the engine has the knob and can turn it here."""
        return knob in self.values and self.knobs.get(knob, {}).get("supported", True) is not False


@dataclass(frozen=True)
class ObjectiveFacts:
    """The promise. `measures` is what its events time: ttft, tpot, e2e, success or other."""

    slug: str
    name: str
    indicator: str
    spec: Mapping[str, Any]
    target: float
    threshold_ms: float | None

    @property
    def measures(self) -> str:
        name = " ".join(str(self.spec.get(key, "")) for key in ("metric", "measure"))
        for word, kind in MEASURES.items():
            if word in name:
                return kind
        return "success" if self.indicator == "success" else "other"

    @property
    def threshold_s(self) -> float | None:
        return None if self.threshold_ms is None else self.threshold_ms / 1000


# Part of a metric's or attribute's name → what is timed (vLLM's and OpenTelemetry's names).
MEASURES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "tpot",
    "e2e": "e2e",
    "duration": "e2e",
}
# … → the histogram that times it, seconds
METRIC_OF = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
WORD_OF = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E latency"}


@dataclass(frozen=True)
class Change:
    """A knob seen to change on the engine (from the engine's own gauges), whoever did it.

    `at` is the end of the window it was seen in. Values as the engine takes them: a number, or the
    word of a choice. `by` is who asked for it, "" when nobody says.
    """

    knob: str
    before: float | str
    after: float | str
    at: datetime
    by: str = ""

    @property
    def by_hand(self) -> bool:
        """Whether it is known that somebody else than Trimtab asked for it."""
        return bool(self.by) and not self.by.startswith("trimtab")


@dataclass(frozen=True)
class Track:
    """One measure over reference and incident: means, and a point per window for a sparkline."""

    before: float | None
    value: float | None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Histogram:
    """Events of all windows of a grid in one histogram; the last count is above bounds[-1]."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def above(self, value: float) -> float:
        """How many events are above a value, linear within its bucket."""
        more, low = self.count, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if bound > value:
                return more - count * max(0.0, value - low) / (bound - low)
            more, low = more - count, bound
        return more

    def bound(self, q: float) -> float | None:
        """The upper bound of the bucket the quantile falls in; None without events or bound."""
        rank, seen = q * self.count, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if count and seen >= rank:
                return bound
        return None

    def quantile(self, q: float) -> float | None:
        """Linear within the bucket, as Prometheus' histogram_quantile; None without events.

        A quantile above the last bound is math.inf: the data does not say how far above.
        """
        rank, seen, low = q * self.count, 0.0, 0.0
        if not self.count:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and seen + count >= rank:
                return low + (bound - low) * (rank - seen) / count
            seen, low = seen + count, bound
        return math.inf


@dataclass(frozen=True)
class Scene:
    """All a cause may look at.

    `incident` are the control windows that went bad, up to the newest settled one and not older
    than the engine's last change of configuration; `reference` the windows before them, None when
    there are none. `bad_since` is when it began, for this objective or another one of the engine. A
    window's width is `window_s`; nothing here is a fixed number of seconds.
    """

    reader: Reader
    now: datetime
    engine: EngineFacts
    objective: ObjectiveFacts
    bad_since: datetime
    incident: Grid
    reference: Grid | None
    changes: tuple[Change, ...] = ()
    # Causes ask for the same series; the store is asked once.
    _read: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def window_s(self) -> float:
        return self.incident.step_s

    @property
    def step_s(self) -> float:
        """Seconds of what `steps` and `sums` give."""
        return self.incident.step_s / STEPS_PER_WINDOW

    @property
    def where(self) -> dict[str, str]:
        return self.engine.where

    @property
    def measured_until(self) -> datetime | None:
        """The end of the newest window in which the engine was measured; None: in none."""
        seen = [at for at, value in self.gauge(RUNNING).points if value is not None]
        return datetime.fromtimestamp(seen[-1], UTC) if seen else None

    def gauge(self, metric: str, *, over: str = "avg") -> Track:
        """A level: the mean over windows of the window's avg, max, min or last."""
        return self._track(lambda g: self._gauge(metric, g, over))

    def gauge_by(self, metric: str, label: str) -> dict[str, float]:
        """A level's mean over the incident by a label's value; those that were measured."""
        found = self.once(
            ("gauge_by", metric, label),
            lambda: self.reader.gauge(metric, self.incident, where=self.where, by=(label,)),
        )
        levels = ((one.labels.get(label, ""), mean(one.values)) for one in found)
        return {value: level for value, level in levels if level is not None}

    def node_gauge(self, metric: str) -> Track:
        """A level of the engine's node (a GPU's clock): the mean over windows and GPUs."""
        if not self.engine.node:
            return Track(None, None)

        def read(grid: Grid) -> list[float]:
            where = {"node": self.engine.node}
            gpus = self.reader.gauge(metric, grid, where=where, by=("gpu",))
            return [mean(row) or math.nan for row in zip(*(g.values for g in gpus), strict=True)]

        return self._track(lambda g: self.once(("node_gauge", metric, g), lambda: read(g)))

    def rate(self, metric: str) -> Track:
        """Growth of a counter per second."""
        return self._track(lambda g: [v / g.step_s for v in evenly(self._increase(metric, g))])

    def growth(self, metric: str) -> float | None:
        """Growth of a counter over the whole incident, None when it was not measured."""
        measured = [v for v in self._increase(metric, self.incident) if not math.isnan(v)]
        return sum(measured) if measured else None

    def growth_by(self, metric: str, label: str, *, reference: bool = False) -> dict[str, float]:
        """Growth of a counter over the incident (or the reference) by a label's value."""
        grid = self.reference if reference else self.incident
        if grid is None:
            return {}
        found = self.once(
            ("growth_by", metric, label, grid),
            lambda: self.reader.increase(metric, grid, where=self.where, by=(label,)),
        )
        return {
            series.labels.get(label, ""): sum(v for v in series.values if not math.isnan(v))
            for series in found
        }

    def histogram(self, metric: str, *, reference: bool = False) -> Histogram | None:
        """All events of the incident (or of the reference) in one histogram; None: no metric."""
        grid = self.reference if reference else self.incident
        if grid is None:
            return None
        return _merged(self._histogram(metric, grid))

    def histogram_by(self, metric: str, label: str) -> dict[str, Histogram]:
        """All events of the incident by a label's value, each in one histogram."""
        found = self.once(
            ("histogram_by", metric, label),
            lambda: self.reader.histogram(metric, self.incident, where=self.where, by=(label,)),
        )
        merged = ((one.labels.get(label, ""), _merged([one])) for one in found)
        return {value: histogram for value, histogram in merged if histogram}

    def means(self, metric: str) -> Track:
        """Mean event of a histogram: over the reference, over the incident, per window."""

        def per_window(grid: Grid) -> list[float]:
            series = self._histogram(metric, grid)
            return _window_means(series[0]) if series else []

        old, new = self.histogram(metric, reference=True), self.histogram(metric)
        track = self._track(per_window)
        return Track(old.mean if old else None, new.mean if new else None, track.points)

    def because(self, text: str) -> str:
        """“TTFT p99 was 1.24 s from 12:00:00 to 12:01:30 because `text`”, a sentence with its time.

        Where no latency is measured it is the text's own: “`text`, from 12:00:00 to 12:01:30”.
        """
        kind, grid = self.objective.measures, self.incident
        seen = f"from {grid.start:%H:%M:%S} to {grid.end:%H:%M:%S}"
        found = self.histogram(METRIC_OF[kind]) if kind in METRIC_OF else None
        p99 = found.quantile(0.99) if found else None
        if found is None or p99 is None:
            return f"{text}, {seen}"
        was = f"above {ms(found.bounds[-1])}" if math.isinf(p99) else ms(p99)
        return f"{WORD_OF[kind]} p99 was {was} {seen} because {text}"

    def late(self) -> float | None:
        """How many of the incident's events took longer than is promised; None: not timed."""
        kind, threshold = self.objective.measures, self.objective.threshold_s
        if kind not in METRIC_OF or threshold is None:
            return None
        found = self.histogram(METRIC_OF[kind])
        return found.above(threshold) if found else None

    def sums(self, metric: str, *, reference: bool = False) -> list[float]:
        """Growth of a histogram's sum in steps of a third of a control window."""
        fine = self._fine(reference)
        series = self._histogram(metric, fine) if fine else []
        return [float(v) for v in series[0].sums] if series else []

    def steps(self, metric: str, *, counter: bool = False, reference: bool = False) -> list[float]:
        """The measure in steps of a third of a control window; NaN where no sample fell."""
        fine = self._fine(reference)
        if fine is None:
            return []
        return self._increase(metric, fine) if counter else self._gauge(metric, fine, "avg")

    def _fine(self, reference: bool) -> Grid | None:
        grid = self.reference if reference else self.incident
        return grid and Grid(grid.start, grid.end, grid.step_s / STEPS_PER_WINDOW)

    def once(self, key: tuple[Any, ...], read: Callable[[], T]) -> T:
        """What `read` gives, read once per scene."""
        if key not in self._read:
            self._read[key] = read()
        return cast(T, self._read[key])

    def _gauge(self, metric: str, grid: Grid, over: str) -> list[float]:
        return self.once(
            ("gauge", metric, grid, over),
            lambda: _one(self.reader.gauge(metric, grid, where=self.where, over=over)),
        )

    def _increase(self, metric: str, grid: Grid) -> list[float]:
        return self.once(
            ("increase", metric, grid),
            lambda: _one(self.reader.increase(metric, grid, where=self.where)),
        )

    def _histogram(self, metric: str, grid: Grid) -> list[HistogramSeries]:
        return self.once(
            ("histogram", metric, grid),
            lambda: self.reader.histogram(metric, grid, where=self.where),
        )

    def _track(self, read: Callable[[Grid], list[float]]) -> Track:
        old = read(self.reference) if self.reference else []
        new = read(self.incident)
        points = _points(self.reference, old) + _points(self.incident, new)
        return Track(mean(old), mean(new), points)


def evenly(growth: Sequence[float]) -> list[float]:
    """Growth per step with what is booked at the end of a gap spread over all of the gap.

    NaN up to a first gap's end: when that began is not known.
    """
    found, since = [math.nan] * len(growth), None if math.isnan(sum(growth[:1])) else -1
    for place, value in enumerate(growth):
        if math.isnan(value):
            continue
        if since is not None:
            found[since + 1 : place + 1] = [value / (place - since)] * (place - since)
        since = place
    return found


def mean(values: Sequence[float]) -> float | None:
    """Mean of the measured values; None when there is none."""
    measured = [v for v in values if not math.isnan(v)]
    return sum(measured) / len(measured) if measured else None


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile of the measured values (nearest rank); None when there is none."""
    measured = sorted(v for v in values if not math.isnan(v))
    return measured[min(len(measured) - 1, int(q * len(measured)))] if measured else None


def _one(series: Sequence[Series]) -> list[float]:
    """The values of the one series an aggregation without `by` gives; [] when nothing matched."""
    return [float(v) for v in series[0].values] if series else []


def _points(grid: Grid | None, values: Sequence[float]) -> tuple[Point, ...]:
    if grid is None:
        return ()
    return tuple(
        (end.timestamp(), None if math.isnan(value) else round(value, 6))
        for end, value in zip(grid.ends(), values, strict=False)
    )


def _merged(series: Sequence[HistogramSeries]) -> Histogram | None:
    if not series:
        return None
    first = series[0]
    rows = [row for row in first.counts if not any(math.isnan(c) for c in row)]
    counts = tuple(float(sum(column)) for column in zip(*rows, strict=True)) if rows else ()
    return Histogram(
        tuple(first.bounds), counts, sum(float(s) for s in first.sums if not math.isnan(s))
    )


def _window_means(series: HistogramSeries) -> list[float]:
    totals = [sum(row) for row in series.counts]
    return [
        s / n if n and not math.isnan(n) else math.nan
        for s, n in zip(series.sums, totals, strict=True)
    ]
