"""REST of the fleet: the agents' sync, and read-only lists of nodes and engines."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.urls import path
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import ApiError, BearerToken, request_tenant
from controlplane.accounts.models import Token
from controlplane.accounts.parsers import StrictJson
from controlplane.fleet import selectors, services
from controlplane.fleet.limits import SYNC_BYTES_MAX
from controlplane.fleet.models import Engine, Node
from gpu_agent.protocol import SyncRequest, WireError


class SyncParser(StrictJson):
    bytes_max = SYNC_BYTES_MAX


class AgentSync(APIView):
    """POST a gpu_agent.protocol.SyncRequest, get a SyncReply; for tokens of kind *agent*."""

    authentication_classes = [BearerToken]
    token_kinds = frozenset({Token.Kind.AGENT})
    parser_classes = [SyncParser]

    def post(self, request: Request) -> Response:
        try:
            reply = services.sync(
                tenant=request_tenant(request),
                request=SyncRequest.from_json(request.data),
                now=timezone.now(),
            )
        except WireError as error:
            param = str(error).partition(":")[0]
            raise ApiError(400, "invalid", str(error), param=param) from None
        except services.FleetConflict as error:
            raise ApiError(409, error.code, str(error)) from None
        return Response(reply.to_json())


class Nodes(APIView):
    """GET every node with its GPUs and how its agent is doing."""

    def get(self, request: Request) -> Response:
        now = timezone.now()
        nodes = selectors.nodes_of(request_tenant(request))
        return Response({"nodes": [node_json(node, now) for node in nodes]})


class Engines(APIView):
    """GET every engine as last read back; `?service=` narrows."""

    def get(self, request: Request) -> Response:
        now = timezone.now()
        service = request.query_params.get("service")
        engines = selectors.engines_of(request_tenant(request), service)
        return Response({"engines": [engine_json(engine, now) for engine in engines]})


def node_json(node: Node, now: datetime) -> dict[str, Any]:
    return {
        "name": node.name,
        "agent_id": node.agent_id,
        "agent_version": node.agent_version,
        "state": selectors.node_state(node, now),
        "last_seen_at": node.last_seen_at,
        "clock_skew_s": node.clock_skew_s,
        "gpus": node.gpus,
        "gpu_status": node.gpu_status,
        "spool_bytes": node.spool_bytes,
        "spool_dropped_total": node.spool_dropped_total,
        "agent_cpu_seconds": node.agent_cpu_seconds,
        "agent_rss_bytes": node.agent_rss_bytes,
    }


def engine_json(engine: Engine, now: datetime) -> dict[str, Any]:
    return {
        "name": engine.name,
        "service": engine.service,
        "node": engine.node.name,
        "state": selectors.engine_state(engine, now),
        "adapter": engine.adapter,
        "model": engine.model,
        "error": engine.error,
        "config_version": engine.config_version,
        "values": engine.values,
        "knobs": engine.knobs,
        "last_seen_at": engine.last_seen_at,
    }


urlpatterns = [
    path("agent/sync", AgentSync.as_view(), name="agent-sync"),
    path("nodes/", Nodes.as_view(), name="api-nodes"),
    path("engines/", Engines.as_view(), name="api-engines"),
]
