"""Share of events at or under a threshold: TTFT, TPOT, E2E, or the length of any span.

spec: {"source": "metric", "metric": "vllm:time_to_first_token_seconds", "threshold_ms": 500} or
{"source": "spans", "span": "llm_request", "measure": "duration", "threshold_ms": 500}, where
`measure` is "duration" or an attribute holding seconds.

A histogram only knows its bucket edges, so over a metric the threshold must be one of them; the
share between two edges is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slo.indicator import (
    MEASUREMENTS,
    SPANS,
    Indicator,
    SpecError,
    Unit,
    gettext_noop,
    spec_choice,
    spec_keys_check,
    spec_name,
    spec_threshold_ms,
    unit_of,
)
from tracing.types import Grid, HistogramSeries, Reader, ShareSeries

METRIC_DEFAULT = "vllm:time_to_first_token_seconds"
SPAN_DEFAULT = "llm_request"
MEASURE_DEFAULT = "duration"
PARAMETERS = {
    "metric": ("source", "metric", "threshold_ms"),
    "spans": ("source", "span", "measure", "threshold_ms"),
}


class Latency:
    slug = "latency"
    label = gettext_noop("Share under a threshold")

    def clean(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        source = spec_choice({"source": "metric", **spec}, "source", PARAMETERS)
        spec_keys_check(spec, PARAMETERS[source])
        threshold_ms = spec_threshold_ms(spec)
        if source == "metric":
            metric = spec_name(spec, "metric", METRIC_DEFAULT)
            return {"source": source, "metric": metric, "threshold_ms": threshold_ms}
        return {
            "source": source,
            "span": spec_name(spec, "span", SPAN_DEFAULT),
            "measure": spec_name(spec, "measure", MEASURE_DEFAULT),
            "threshold_ms": threshold_ms,
        }

    def families(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        return (spec["metric"],) if spec["source"] == "metric" else ()

    def span(self, spec: Mapping[str, Any]) -> str:
        return "" if spec["source"] == "metric" else str(spec["span"])

    def describe(self, spec: Mapping[str, Any]) -> str:
        if spec["source"] == "metric":
            what = spec["metric"].removeprefix("vllm:").removesuffix("_seconds").replace("_", " ")
        elif spec["measure"] == "duration":
            what = f"duration of {spec['span']}"
        else:
            what = spec["measure"].rpartition(".")[2].replace("_", " ")
        return f"{what} ≤ {spec['threshold_ms']:g} ms"

    def unit(self, spec: Mapping[str, Any]) -> Unit:
        if spec["source"] == "metric":
            return unit_of(spec["metric"], unknown=MEASUREMENTS)
        return unit_of(spec["span"], unknown=SPANS)

    def read(
        self, reader: Reader, *, service: str, spec: Mapping[str, Any], grid: Grid
    ) -> list[ShareSeries]:
        threshold_s = spec["threshold_ms"] / 1_000
        if spec["source"] == "spans":
            return reader.span_share(
                grid,
                service=service,
                name=spec["span"],
                measure=spec["measure"],
                threshold_s=threshold_s,
                by=("instance",),
            )
        histograms = reader.histogram(
            spec["metric"], grid, where={"service": service}, by=("instance",)
        )
        return [_share(h, _edge(h.bounds, spec)) for h in histograms]


def _edge(bounds: Sequence[float], spec: Mapping[str, Any]) -> int:
    """Index of the bucket whose upper edge is the threshold: le="1" and le="1.0" are one edge."""
    for index, bound in enumerate(bounds):
        if math.isclose(bound, spec["threshold_ms"] / 1_000, rel_tol=1e-9):
            return index
    edges = ", ".join(f"{round(b * 1_000, 6):g}" for b in bounds if math.isfinite(b))
    raise SpecError(
        "threshold_ms", spec["threshold_ms"], f"a bucket edge of {spec['metric']}, in ms: {edges}"
    )


def _share(histogram: HistogramSeries, edge: int) -> ShareSeries:
    return ShareSeries(
        labels=histogram.labels,
        good=[math.fsum(counts[: edge + 1]) for counts in histogram.counts],
        total=[math.fsum(counts) for counts in histogram.counts],
    )


indicator: Indicator = Latency()
