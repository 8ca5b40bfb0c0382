"""OTLP requests as a sender builds them, with the official protobuf messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tracing.ingest import Accepted, Door

CHAT = {"service.name": "chat", "service.instance.id": "engine-0", "host.name": "node-0"}
CUMULATIVE, DELTA = 2, 1


def ns(time_: datetime) -> int:
    return round(time_.timestamp() * 1e6) * 1000


def put(attributes: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        any_value = attributes.add(key=key).value
        if isinstance(value, bool):
            any_value.bool_value = value
        elif isinstance(value, int):
            any_value.int_value = value
        elif isinstance(value, float):
            any_value.double_value = value
        elif isinstance(value, bytes):
            any_value.bytes_value = value
        elif isinstance(value, list):
            for item in value:
                any_value.array_value.values.add().string_value = item
        elif value is not None:
            any_value.string_value = value


def span(span_id: int, **fields: Any) -> dict[str, Any]:
    """Fields of a span; `trace` and the id as small integers, `attributes` as a dict."""
    now = time.time_ns()
    return {
        "trace_id": fields.pop("trace", 1).to_bytes(16, "big"),
        "span_id": span_id.to_bytes(8, "big"),
        "name": "llm_request",
        "kind": 2,
        "start_time_unix_nano": now - 10**9,
        "end_time_unix_nano": now,
        **fields,
    }


def trace_request(
    spans: Sequence[Mapping[str, Any]], resource: Mapping[str, str] = CHAT
) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    put(resource_spans.resource.attributes, resource)
    into = resource_spans.scope_spans.add().spans
    for fields in spans:
        fields = dict(fields)
        attributes = fields.pop("attributes", {})
        status = fields.pop("status", None)
        added = into.add(**fields)
        put(added.attributes, attributes)
        if status is not None:
            added.status.code = status
    return request


class Metrics:
    """A metrics request under construction: counter, gauge and histogram points of one resource."""

    def __init__(self, resource: Mapping[str, str] = CHAT) -> None:
        self.request = ExportMetricsServiceRequest()
        resource_metrics = self.request.resource_metrics.add()
        put(resource_metrics.resource.attributes, resource)
        self._metrics = resource_metrics.scope_metrics.add().metrics

    def counter(
        self, name: str, at: datetime, value: float, temporality: int = CUMULATIVE, **labels: str
    ) -> Metrics:
        metric = self._metrics.add(name=name)
        metric.sum.aggregation_temporality = temporality
        metric.sum.is_monotonic = True
        point = metric.sum.data_points.add(time_unix_nano=ns(at), as_double=value)
        put(point.attributes, labels)
        return self

    def gauge(
        self, name: str, at: datetime, value: float, flags: int = 0, **labels: str
    ) -> Metrics:
        metric = self._metrics.add(name=name)
        point = metric.gauge.data_points.add(time_unix_nano=ns(at), as_double=value, flags=flags)
        put(point.attributes, labels)
        return self

    def histogram(
        self,
        name: str,
        at: datetime,
        bounds: Sequence[float],
        counts: Sequence[int],
        total: float,
        **labels: str,
    ) -> Metrics:
        metric = self._metrics.add(name=name)
        metric.histogram.aggregation_temporality = CUMULATIVE
        point = metric.histogram.data_points.add(
            time_unix_nano=ns(at),
            explicit_bounds=bounds,
            bucket_counts=counts,
            count=sum(counts),
            sum=total,
        )
        put(point.attributes, labels)
        return self


def send_spans(door: Door, tenant: str, *requests: ExportTraceServiceRequest) -> list[Accepted]:
    """All at the same time, as concurrent senders do."""

    async def one(body: bytes) -> Accepted:
        with door.room(tenant) as room:
            room.take(size_bytes=len(body))
            return await door.traces(tenant, lambda: body, room)

    async def all_of_them() -> list[Accepted]:
        return await asyncio.gather(*(one(r.SerializeToString()) for r in requests))

    return asyncio.run(all_of_them())


def send_metrics(door: Door, tenant: str, *metrics: Metrics) -> list[Accepted]:
    """One after the other."""

    async def all_of_them() -> list[Accepted]:
        answers = []
        for one in metrics:
            body = one.request.SerializeToString()
            with door.room(tenant) as room:
                room.take(size_bytes=len(body))
                answers.append(await door.metrics(tenant, lambda body=body: body, room))  # type: ignore[misc]
        return answers

    return asyncio.run(all_of_them())
