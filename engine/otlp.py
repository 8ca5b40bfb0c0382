"""Spans of a process of the engine: whose they are, and where they are sent (OTLP/HTTP)."""

from __future__ import annotations

import logging

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

EXPORT_S_MAX = 10.0  # with the exporter's own retries


def provider(*, service: str, name: str, node: str) -> TracerProvider:
    """Of the process `name`; its spans go nowhere yet."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    resource = Resource.create(
        {"service.name": service, "service.instance.id": name, "host.name": node}
    )
    return TracerProvider(resource=resource, shutdown_on_exit=False)


def exporter(endpoint: str, token: str) -> OTLPSpanExporter:
    """`endpoint`: without the path; `token`: the bearer's, or empty."""
    return OTLPSpanExporter(
        endpoint=endpoint.rstrip("/") + "/v1/traces",
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=EXPORT_S_MAX,
    )
