"""REST of policies and freezes: what may be done to which engine, and the button that stops all."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404
from django.urls import path
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.audit import actor_of
from controlplane.accounts.authentication import ApiError, request_tenant
from controlplane.accounts.rest import (
    ListQuery,
    Page,
    Shape,
    body_of,
    documented,
    list_of,
    listed,
    page_of,
)
from controlplane.actions.models import Mode, Policy
from controlplane.actions.policies import (
    NAME_CHARS_MAX,
    REASON_CHARS_MAX,
    PolicyError,
    freeze,
    policy_delete,
    policy_set,
    unfreeze,
)
from controlplane.actions.policy import (
    COLUMNS,
    freeze_words,
    freezes_of,
    node_stop,
    rules_of,
    undo_failed,
)
from controlplane.fleet.models import Engine

SCOPE = ("service", "engine")


class PolicyColumns(Shape):
    """null, "" and {} say "as the wider scope has it"."""

    mode = serializers.ChoiceField(choices=["", *Mode.values], required=False)
    cool_down_harmful_s = serializers.IntegerField(allow_null=True, required=False)
    cool_down_unproven_s = serializers.IntegerField(allow_null=True, required=False)
    steps_max = serializers.IntegerField(allow_null=True, required=False)
    barrier = serializers.BooleanField(allow_null=True, required=False)
    failures_per_hour_max = serializers.IntegerField(allow_null=True, required=False)
    quiet_hours = serializers.JSONField(
        allow_null=True, required=False, help_text='{"from", "until", "days", "time_zone"}'
    )
    bounds = serializers.JSONField(
        required=False, help_text='knob → {"minimum", "maximum"} or {"choices"}'
    )


class PolicyBody(PolicyColumns):
    """Neither a service nor an engine: the tenant."""

    service = serializers.CharField(required=False, allow_blank=True, max_length=NAME_CHARS_MAX)
    engine = serializers.CharField(required=False, allow_blank=True, max_length=NAME_CHARS_MAX)


class PolicyShape(PolicyBody):
    id = serializers.UUIDField()
    frozen = serializers.SerializerMethodField(help_text="why nothing is changed; empty if not")
    freeze_until = serializers.DateTimeField(allow_null=True)
    freeze_reason = serializers.CharField()
    frozen_by = serializers.CharField()

    def get_frozen(self, policy: Policy) -> str:
        return freeze_words(policy, timezone.now())


class RulesShape(PolicyColumns):
    """What holds for one engine, all scopes put together."""

    engine = serializers.CharField()
    origin = serializers.JSONField(help_text="column → the scope that says so")
    frozen = serializers.CharField(help_text="why nothing is changed; empty if not")
    quiet = serializers.CharField(help_text="until when a person decides; empty if not")
    kill_switch = serializers.CharField(help_text="why the node changes nothing; empty if not")
    undo_failed = serializers.CharField(help_text="why a person has to look first; empty if not")


class FreezeBody(Shape):
    """Neither a service nor an engine: everything. Without `until`: until it is lifted."""

    reason = serializers.CharField(max_length=REASON_CHARS_MAX)
    until = serializers.DateTimeField(required=False, allow_null=True)
    service = serializers.CharField(required=False, allow_blank=True, max_length=NAME_CHARS_MAX)
    engine = serializers.CharField(required=False, allow_blank=True, max_length=NAME_CHARS_MAX)


class Policies(APIView):
    """The policies of the tenant."""

    @documented(query=ListQuery, answer=list_of("policies", PolicyShape))
    def get(self, request: Request) -> Response:
        """List policies"""
        rows = Policy.objects.filter(tenant=request_tenant(request))
        page = page_of(rows, ListQuery.of(request), by=("service", "engine", "id"))
        return listed("policies", page, PolicyShape)

    @documented(body=PolicyBody, answer=PolicyShape)
    def put(self, request: Request) -> Response:
        """Make or replace the policy of a scope

        What is left out is as the wider scope has it. A freeze stays as it is.
        """
        given = body_of(request)
        scope = {name: _text(name, given.pop(name, "")) for name in SCOPE}
        try:
            policy = policy_set(
                tenant=request_tenant(request),
                actor=actor_of(request),
                now=timezone.now(),
                values=given,
                **scope,
            )
        except PolicyError as error:
            raise _api_error(error) from None
        return Response(PolicyShape(policy).data)


class PolicyById(APIView):
    """One policy."""

    @documented(answer=PolicyShape)
    def get(self, request: Request, policy_id: UUID) -> Response:
        """Read a policy"""
        return Response(PolicyShape(_find(request, policy_id)).data)

    @documented(answer=None, status=204)
    def delete(self, request: Request, policy_id: UUID) -> Response:
        """Delete a policy; the wider scope's holds

        409 while it is frozen.
        """
        policy = _find(request, policy_id)
        try:
            policy_delete(policy=policy, actor=actor_of(request), now=timezone.now())
        except PolicyError as error:
            raise ApiError(409, "conflict", str(error), param=error.param) from None
        return Response(status=204)


class PolicyOfEngine(APIView):
    """What holds for one engine now."""

    @documented(answer=RulesShape)
    def get(self, request: Request, name: str) -> Response:
        """Read what holds for an engine, and which scope says so"""
        engines = Engine.objects.select_related("node")
        engine = engines.filter(tenant=request_tenant(request), name=name).first()
        if engine is None:
            raise Http404(_("No engine is called %(name)s.") % {"name": name})
        rules, now = rules_of(engine), timezone.now()
        columns = {column: getattr(rules, column) for column in (*COLUMNS, "bounds", "origin")}
        held = {
            "engine": engine.name,
            "frozen": rules.frozen(now),
            "quiet": rules.quiet(now),
            "kill_switch": node_stop(engine),
            "undo_failed": undo_failed(engine),
        }
        return Response(RulesShape(columns | held).data)


class Freezes(APIView):
    """What is frozen now."""

    scope_to_write = "act"

    @documented(answer=list_of("freezes", PolicyShape))
    def get(self, request: Request) -> Response:
        """List the freezes in force"""
        held = freezes_of(request_tenant(request), timezone.now())
        return listed("freezes", Page(held, None), PolicyShape)

    @documented(body=FreezeBody, answer=PolicyShape, status=201)
    def post(self, request: Request) -> Response:
        """Freeze everything, a service or an engine

        Nothing is changed from then on, and what is on trial is undone at once.
        """
        given = FreezeBody(data=body_of(request))
        given.is_valid(raise_exception=True)
        try:
            policy = freeze(
                tenant=request_tenant(request),
                actor=actor_of(request),
                now=timezone.now(),
                **given.validated_data,
            )
        except PolicyError as error:
            raise _api_error(error) from None
        return Response(PolicyShape(policy).data, status=201)


class FreezeById(APIView):
    """One freeze; its id is its policy's."""

    scope_to_write = "act"

    @documented(answer=None, status=204)
    def delete(self, request: Request, policy_id: UUID) -> Response:
        """Lift a freeze"""
        unfreeze(policy=_find(request, policy_id), actor=actor_of(request), now=timezone.now())
        return Response(status=204)


def _find(request: Request, policy_id: UUID) -> Policy:
    policy = Policy.objects.filter(tenant=request_tenant(request), pk=policy_id).first()
    if policy is None:
        raise Http404(_("No policy has the id %(id)s.") % {"id": policy_id})
    return policy


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ApiError(400, "invalid", f"{name}: got {value!r}, allowed: a text", param=name)
    return value


def _api_error(error: PolicyError) -> ApiError:
    return ApiError(400, "invalid", str(error), param=error.param)


urlpatterns = [
    path("policies/", Policies.as_view(), name="api-policies"),
    path("policies/<uuid:policy_id>/", PolicyById.as_view(), name="api-policy"),
    path("engines/<str:name>/policy/", PolicyOfEngine.as_view(), name="api-engine-policy"),
    path("freezes/", Freezes.as_view(), name="api-freezes"),
    path("freezes/<uuid:policy_id>/", FreezeById.as_view(), name="api-freeze"),
]
