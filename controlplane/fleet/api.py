"""REST of the fleet: the agents' sync, and read-only nodes and engines."""

from __future__ import annotations

from django.http import Http404
from django.urls import path
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import ApiError, BearerToken, request_tenant
from controlplane.accounts.models import Token
from controlplane.accounts.parsers import StrictJson
from controlplane.accounts.rest import (
    ListQuery,
    Shape,
    documented,
    list_of,
    listed,
    page_of,
    text,
)
from controlplane.fleet import selectors, services
from controlplane.fleet.limits import SYNC_BYTES_MAX
from controlplane.fleet.models import Engine, Node
from gpu_agent.protocol import CommandKind, CommandState, SyncRequest, WireError

# --- what the agents say and hear (gpu_agent.protocol is the authority) ---------------------------


class EngineReportShape(Shape):
    name = serializers.CharField()
    service = serializers.CharField()
    adapter = serializers.CharField()
    url = serializers.CharField()
    reachable = serializers.BooleanField()
    model = serializers.CharField(required=False, allow_blank=True)
    config_version = serializers.IntegerField(required=False, allow_null=True)
    values = serializers.DictField(required=False)
    knobs = serializers.DictField(required=False, child=serializers.DictField())
    error = serializers.CharField(required=False, allow_blank=True)


class CommandResultShape(Shape):
    command_id = serializers.CharField()
    kind = serializers.ChoiceField(choices=[kind.value for kind in CommandKind])
    state = serializers.ChoiceField(choices=[state.value for state in CommandState])
    at = serializers.CharField()
    reason = serializers.CharField(required=False, allow_blank=True)
    config_version = serializers.IntegerField(required=False, allow_null=True)
    values = serializers.DictField(required=False)


class SyncRequestShape(Shape):
    """A heartbeat; keys that are not known are passed over, so that an agent may be newer."""

    agent_id = serializers.CharField()
    boot_id = serializers.CharField()
    node = serializers.CharField()
    agent_version = serializers.CharField(allow_blank=True)
    sent_at = serializers.CharField()
    protocol = serializers.IntegerField(required=False)
    gpus = serializers.ListField(child=serializers.DictField(), required=False)
    gpu_status = serializers.CharField(required=False)
    engines = EngineReportShape(many=True, required=False)
    results = CommandResultShape(many=True, required=False)
    spool_bytes = serializers.IntegerField(required=False)
    spool_oldest_age_s = serializers.FloatField(required=False)
    spool_dropped_total = serializers.IntegerField(required=False)
    cpu_seconds_total = serializers.FloatField(required=False)
    rss_bytes = serializers.IntegerField(required=False)
    stopping = serializers.BooleanField(required=False)


class CommandShape(Shape):
    command_id = serializers.CharField()
    kind = serializers.ChoiceField(choices=[kind.value for kind in CommandKind])
    engine = serializers.CharField()
    generation = serializers.IntegerField()
    deadline = serializers.CharField()
    values = serializers.DictField()
    undo = serializers.DictField()
    expected_config_version = serializers.IntegerField(allow_null=True)
    ttl_s = serializers.FloatField()
    target_command_id = serializers.CharField(allow_blank=True)


class SyncReplyShape(Shape):
    server_time = serializers.CharField()
    commands = CommandShape(many=True)
    accepted_results = serializers.ListField(child=serializers.CharField())
    poll_after_s = serializers.FloatField()


# --- what people and programs read ----------------------------------------------------------------


class NodeShape(Shape):
    name = serializers.CharField()
    agent_id = serializers.CharField()
    agent_version = serializers.CharField()
    state = serializers.SerializerMethodField(help_text="of its agent")
    last_seen_at = serializers.DateTimeField(allow_null=True)
    clock_skew_s = serializers.FloatField()
    kill_switch = serializers.BooleanField(
        help_text="its stop file exists: nothing is changed there"
    )
    gpus = serializers.ListField(child=serializers.DictField())
    gpu_status = serializers.CharField(help_text="ok, or why there is no reading")
    spool_bytes = serializers.IntegerField()
    spool_dropped_total = serializers.IntegerField()
    agent_cpu_seconds = serializers.FloatField()
    agent_rss_bytes = serializers.IntegerField()

    def get_state(self, node: Node) -> selectors.NodeState:
        return selectors.node_state(node, timezone.now())


class EngineShape(Shape):
    """An engine as last read back."""

    name = serializers.CharField()
    service = serializers.CharField()
    node = serializers.CharField(source="node.name")
    state = serializers.SerializerMethodField()
    adapter = serializers.CharField()
    model = serializers.CharField()
    error = serializers.CharField(help_text="why it could not be read; empty: it could")
    config_version = serializers.IntegerField(allow_null=True)
    values = serializers.DictField(help_text="knob to value")
    knobs = serializers.DictField(
        child=serializers.DictField(), help_text="knob to value, unit, bounds and apply class"
    )
    changed_by = serializers.CharField(help_text="who made the newest version; empty: not said")
    changed_at = serializers.DateTimeField(allow_null=True)
    set_by = serializers.DictField(help_text="knob to who last set it, when, from what")
    last_seen_at = serializers.DateTimeField(allow_null=True)

    def get_state(self, engine: Engine) -> selectors.EngineState:
        return selectors.engine_state(engine, timezone.now())


class NodeQuery(ListQuery):
    name = text()


class EngineQuery(ListQuery):
    service = text()
    node = text(help_text="the node's name")


class SyncParser(StrictJson):
    bytes_max = SYNC_BYTES_MAX


class AgentSync(APIView):
    """The agents' door; for tokens of kind *agent*."""

    authentication_classes = [BearerToken]
    token_kinds = frozenset({Token.Kind.AGENT})
    throttle_classes = ()  # a thousand nodes may share one token; the sync itself is bounded
    parser_classes = [SyncParser]

    @documented(body=SyncRequestShape, answer=SyncReplyShape)
    def post(self, request: Request) -> Response:
        """Say what runs on a node and what became of its commands; get new ones"""
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
    """Every node with its GPUs and how its agent is doing."""

    @documented(query=NodeQuery, answer=list_of("nodes", NodeShape))
    def get(self, request: Request) -> Response:
        """List nodes"""
        asked = NodeQuery.of(request)
        rows = Node.objects.filter(tenant=request_tenant(request))
        if "name" in asked:
            rows = rows.filter(name=asked["name"])
        return listed("nodes", page_of(rows, asked, by=("name", "agent_id")), NodeShape)


class Engines(APIView):
    """Every engine as last read back."""

    @documented(query=EngineQuery, answer=list_of("engines", EngineShape))
    def get(self, request: Request) -> Response:
        """List engines"""
        asked = EngineQuery.of(request)
        rows = Engine.objects.filter(tenant=request_tenant(request)).select_related("node")
        if "service" in asked:
            rows = rows.filter(service=asked["service"])
        if "node" in asked:
            rows = rows.filter(node__name=asked["node"])
        return listed("engines", page_of(rows, asked, by=("name",)), EngineShape)


class EngineByName(APIView):
    """One engine as last read back."""

    @documented(answer=EngineShape)
    def get(self, request: Request, name: str) -> Response:
        """Read an engine"""
        rows = Engine.objects.filter(tenant=request_tenant(request)).select_related("node")
        engine = rows.filter(name=name).first()
        if engine is None:
            raise Http404(_("No engine is called %(name)s.") % {"name": name})
        return Response(EngineShape(engine).data)


urlpatterns = [
    path("agent/sync", AgentSync.as_view(), name="agent-sync"),
    path("nodes/", Nodes.as_view(), name="api-nodes"),
    path("engines/", Engines.as_view(), name="api-engines"),
    path("engines/<str:name>/", EngineByName.as_view(), name="api-engine"),
]
