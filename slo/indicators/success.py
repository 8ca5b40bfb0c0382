"""Share of requests that succeeded.

spec: {"source": "metric"} counts good = growth of `metric` with a finished_reason in
`good_reasons`, and bad = growth of `metric` with one in `bad_reasons` plus growth of each of
`bad_metrics`. Other reasons (a client that hung up) are no event. {"source": "spans"} takes the
status of the spans named `span`; what was turned away at the door has no span.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from slo.indicator import (
    REQUESTS,
    SPANS,
    Indicator,
    SpecError,
    Unit,
    gettext_noop,
    spec_choice,
    spec_keys_check,
    spec_name,
    spec_names,
    unit_of,
)
from tracing.types import Grid, Reader, Series, ShareSeries

METRIC_DEFAULT = "vllm:request_success_total"
GOOD_REASONS_DEFAULT = ["stop", "length"]
BAD_METRICS_DEFAULT = ["engine:requests_failed_total", "vllm:admission_rejections_total"]
SPAN_DEFAULT = "llm_request"
PARAMETERS = {
    "metric": ("source", "metric", "good_reasons", "bad_reasons", "bad_metrics"),
    "spans": ("source", "span"),
}


class Success:
    slug = "success"
    label = gettext_noop("Requests that succeeded")

    def clean(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        source = spec_choice({"source": "metric", **spec}, "source", PARAMETERS)
        spec_keys_check(spec, PARAMETERS[source])
        if source == "spans":
            return {"source": source, "span": spec_name(spec, "span", SPAN_DEFAULT)}
        good = spec_names(spec, "good_reasons", GOOD_REASONS_DEFAULT, least=1)
        bad = spec_names(spec, "bad_reasons", [], least=0)
        bad_metrics = spec_names(spec, "bad_metrics", BAD_METRICS_DEFAULT, least=0)
        if both := set(good) & set(bad):
            raise SpecError("bad_reasons", bad, f"reasons that are not good ones: {sorted(both)}")
        if not bad and not bad_metrics:
            raise SpecError("bad_metrics", bad_metrics, "at least one, or one of bad_reasons")
        return {
            "source": source,
            "metric": spec_name(spec, "metric", METRIC_DEFAULT),
            "good_reasons": good,
            "bad_reasons": bad,
            "bad_metrics": bad_metrics,
        }

    def families(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        return (spec["metric"], *spec["bad_metrics"]) if spec["source"] == "metric" else ()

    def span(self, spec: Mapping[str, Any]) -> str:
        return "" if spec["source"] == "metric" else str(spec["span"])

    def describe(self, spec: Mapping[str, Any]) -> str:
        if spec["source"] == "metric":
            return f"finished by {' or '.join(spec['good_reasons'])}"
        return f"{spec['span']} without error"

    def unit(self, spec: Mapping[str, Any]) -> Unit:
        return REQUESTS if spec["source"] == "metric" else unit_of(spec["span"], unknown=SPANS)

    def read(
        self, reader: Reader, *, service: str, spec: Mapping[str, Any], grid: Grid
    ) -> list[ShareSeries]:
        if spec["source"] == "spans":
            return reader.span_share(
                grid,
                service=service,
                name=spec["span"],
                measure="status",
                threshold_s=None,
                by=("instance",),
            )
        where = {"service": service}
        by = ("instance", "finished_reason")
        finished = reader.increase(spec["metric"], grid, where=where, by=by)
        good = [s for s in finished if s.labels.get("finished_reason") in spec["good_reasons"]]
        bad = [s for s in finished if s.labels.get("finished_reason") in spec["bad_reasons"]]
        for metric in spec["bad_metrics"]:
            bad += reader.increase(metric, grid, where=where, by=("instance",))
        return _shares(_by_instance(good), _by_instance(bad))


def _by_instance(series: Iterable[Series]) -> dict[str, list[float]]:
    """Sums per engine and window; NaN only where no series was measured."""
    together: dict[str, list[Series]] = defaultdict(list)
    for one in series:
        together[one.labels.get("instance", "")].append(one)
    return {
        instance: [_plus(*column) for column in zip(*(s.values for s in family), strict=True)]
        for instance, family in together.items()
    }


def _plus(*values: float) -> float:
    """A series that never existed counts as 0 beside one that does; NaN when there is none."""
    measured = [v for v in values if not math.isnan(v)]
    return math.fsum(measured) if measured else math.nan


def _shares(good: dict[str, list[float]], bad: dict[str, list[float]]) -> list[ShareSeries]:
    shares = []
    for instance in sorted(good.keys() | bad.keys()):
        windows = len(good.get(instance) or bad[instance])
        nothing = [math.nan] * windows
        fine, failed = good.get(instance, nothing), bad.get(instance, nothing)
        total = [_plus(g, b) for g, b in zip(fine, failed, strict=True)]
        shares.append(
            ShareSeries(
                labels={"instance": instance},
                good=[
                    t if math.isnan(t) else _plus(g, 0.0) for g, t in zip(fine, total, strict=True)
                ],
                total=total,
            )
        )
    return shares


indicator: Indicator = Success()
