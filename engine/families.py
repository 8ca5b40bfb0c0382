"""What the metrics of every process of the engine are made of: bucket bounds, and families.

The bounds of latencies, in seconds, are those of vLLM 0.33.
"""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

Samples = list[tuple[dict[str, str], float]]


def gauge(name: str, text: str, samples: Samples) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, value in samples:
        metric.add_metric(list(labels.values()), value)
    return metric


def counter(name: str, text: str, samples: Samples) -> Metric:
    """`name` without `_total`, which the exposition adds."""
    metric = CounterMetricFamily(name, text, labels=list(samples[0][0]) if samples else [])
    for labels, value in samples:
        metric.add_metric(list(labels.values()), value)
    return metric
