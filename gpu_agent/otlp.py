"""Readings as OTLP metrics: one `ExportMetricsServiceRequest` per reading, gzip'd for the spool.

Counters become cumulative monotonic sums, gauges gauges, histograms cumulative histograms with
explicit bounds; names and labels stay as the source gave them.
Source: opentelemetry-proto 1.x, metrics/v1/metrics.proto.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Metric,
    NumberDataPoint,
)

from gpu_agent.source import Family, Kind, Labels, Reading

SCOPE_NAME = "gpu_agent"


def encode(reading: Reading, *, version: str) -> bytes:
    """The reading as a gzip'd protobuf body, ready to send."""
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    resource.resource.attributes.extend(_attributes(reading.resource))
    scope = resource.scope_metrics.add()
    scope.scope.name = SCOPE_NAME
    scope.scope.version = version
    for family in reading.families:
        if family.samples or family.histograms:
            _encode_family(scope.metrics.add(), family, reading)
    return compress(request.SerializeToString())


def compress(body: bytes) -> bytes:
    """gzip at level 1: the page shrinks tenfold, a better level costs CPU the node has not got."""
    gzip = zlib.compressobj(1, zlib.DEFLATED, 31)
    return gzip.compress(body) + gzip.flush()


def rejected_points(body: bytes) -> tuple[int, str]:
    """What a receiver's reply says it refused of a batch it took: count and reason."""
    partial = ExportMetricsServiceResponse.FromString(body).partial_success
    return partial.rejected_data_points, partial.error_message


def _encode_family(metric: Metric, family: Family, reading: Reading) -> None:
    metric.name = family.name
    metric.description = family.help
    metric.unit = family.unit
    if family.kind is Kind.HISTOGRAM:
        _encode_histograms(metric, family, reading)
        return
    if family.kind is Kind.SUM:
        metric.sum.is_monotonic = True
        metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        points, start_ns = metric.sum.data_points, reading.start_ns
    else:
        points, start_ns = metric.gauge.data_points, 0
    points.extend(
        NumberDataPoint(
            attributes=_attributes(sample.labels),
            time_unix_nano=reading.read_at_ns,
            start_time_unix_nano=start_ns,
            as_double=sample.value,
        )
        for sample in family.samples
    )


def _encode_histograms(metric: Metric, family: Family, reading: Reading) -> None:
    metric.histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
    for sample in family.histograms:
        point = metric.histogram.data_points.add()
        point.attributes.extend(_attributes(sample.labels))
        point.time_unix_nano = reading.read_at_ns
        point.start_time_unix_nano = reading.start_ns
        point.count = sample.count
        if sample.sum == sample.sum:  # NaN: the page gave no sum, and OTLP's is optional
            point.sum = sample.sum
        point.bucket_counts.extend(sample.counts)
        point.explicit_bounds.extend(sample.bounds)


def _attributes(labels: Labels) -> Iterable[KeyValue]:
    for key, value in labels.items():
        pair = KeyValue(key=key)
        pair.value.string_value = value
        yield pair
