"""REST of actions: the ledger, and what a person may order. Policies are in policy_api.py."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404
from django.urls import include, path
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
    Shape,
    body_of,
    choice,
    documented,
    list_of,
    listed,
    page_of,
    text,
)
from controlplane.actions.links import VERBS
from controlplane.actions.models import Action, Priority, State, Verdict
from controlplane.actions.orders import REASON_CHARS_MAX, OrderError, action_ask
from controlplane.actions.selectors import action_get, actions_all, sentence
from controlplane.fleet.models import Engine

KEY_CHARS_MAX = 100
STATUS_OF = {"invalid": 400, "forbidden": 403, "conflict": 409}
HOW = ("trial", "at_once")


class StepShape(Shape):
    at = serializers.DateTimeField()
    actor = serializers.CharField()
    reason = serializers.CharField()

    def get_fields(self) -> dict[str, Any]:
        """`from` is a word of Python's."""
        ends = {
            "from": serializers.CharField(source="from_state", help_text="empty at the first"),
            "to": serializers.ChoiceField(source="to_state", choices=State.values),
        }
        return ends | super().get_fields()


class ActionShape(Shape):
    id = serializers.UUIDField()
    engine = serializers.CharField(source="engine.name")
    incident = serializers.UUIDField(source="incident_id", allow_null=True)
    cause = serializers.CharField()
    why = serializers.CharField()
    changes = serializers.JSONField(help_text='knob → {"from", "to"}')
    predicted = serializers.JSONField(help_text="what was expected; {} when nothing was")
    priority = serializers.SerializerMethodField()
    how = serializers.SerializerMethodField(help_text="trial: judged; at_once: kept at a word")
    supersedes = serializers.UUIDField(source="supersedes_id", allow_null=True)
    undoes = serializers.UUIDField(source="undoes_id", allow_null=True)
    actor = serializers.CharField()
    state = serializers.ChoiceField(choices=State.values)
    verdict = serializers.ChoiceField(choices=["", *Verdict.values])
    outcome = serializers.JSONField(help_text="what was measured; {} until it was")
    sentence = serializers.SerializerMethodField()
    created_at = serializers.DateTimeField()
    applied_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    cleared_at = serializers.DateTimeField(
        allow_null=True, help_text="when a person had looked at an undo that failed"
    )
    transitions = StepShape(many=True)

    def get_priority(self, action: Action) -> str:
        return Priority(action.priority).name.lower()

    def get_how(self, action: Action) -> str:
        return HOW[0] if action.trial else HOW[1]

    def get_sentence(self, action: Action) -> str:
        return sentence(action)


class ActionQuery(ListQuery):
    state = choice(State.values)
    engine = text(help_text="its name")
    incident = serializers.UUIDField(required=False)


class Order(Shape):
    """A person's change. `values` are absolute."""

    engine = serializers.CharField(max_length=100)
    values = serializers.DictField(allow_empty=False, help_text="knob → value")
    how = serializers.ChoiceField(choices=HOW)
    why = serializers.CharField(max_length=REASON_CHARS_MAX, required=False, allow_blank=True)
    expected_config_version = serializers.IntegerField(
        required=False, min_value=0, max_value=2**63 - 1, help_text="refused when it is another"
    )
    key = serializers.CharField(
        max_length=KEY_CHARS_MAX, required=False, help_text="the same key gives the same action"
    )


class Reason(Shape):
    reason = serializers.CharField(max_length=REASON_CHARS_MAX, required=False, allow_blank=True)


class Actions(APIView):
    """The ledger, and changes of one's own."""

    scope_to_write = "act"

    @documented(query=ActionQuery, answer=list_of("actions", ActionShape))
    def get(self, request: Request) -> Response:
        """List actions, newest first, with every step they went through"""
        asked = ActionQuery.of(request)
        rows = actions_all(request_tenant(request))
        for name, column in (
            ("state", "state"),
            ("engine", "engine__name"),
            ("incident", "incident"),
        ):
            if name in asked:
                rows = rows.filter(**{column: asked[name]})
        return listed("actions", page_of(rows, asked, by=("-created_at", "id")), ActionShape)

    @documented(body=Order, answer=ActionShape, status=201)
    def post(self, request: Request) -> Response:
        """Change an engine's knobs, on trial or at once

        What is in flight on the engine steps aside; 409 when it is another person's.
        """
        asked = read(Order, request)
        name = asked.pop("engine")
        engines = Engine.objects.select_related("node", "tenant")
        engine = engines.filter(tenant=request_tenant(request), name=name).first()
        if engine is None:
            words = _("No engine is called %(name)s.") % {"name": name}
            raise ApiError(404, "not_found", words, param="engine")
        try:
            action = action_ask(
                engine=engine,
                actor=actor_of(request),
                now=timezone.now(),
                trial=asked.pop("how") == HOW[0],
                **asked,
            )
        except OrderError as error:
            raise api_error(error) from None
        return Response(ActionShape(action).data, status=201)


class ActionById(APIView):
    """One action."""

    @documented(answer=ActionShape)
    def get(self, request: Request, action_id: UUID) -> Response:
        """Read an action"""
        return Response(ActionShape(find(request, action_id)).data)


class _Verb(APIView):
    """An order about an action; answers with the action that carries it."""

    scope_to_write = "act"
    verb: str

    def order(self, request: Request, action_id: UUID) -> Response:
        action, given = find(request, action_id), read(Reason, request)
        if self.verb == "approve":
            given.pop("reason", None)
        actor, now = actor_of(request), timezone.now()
        try:
            done = VERBS[self.verb](action=action, actor=actor, now=now, **given)
        except OrderError as error:
            raise api_error(error) from None
        return Response(ActionShape(done).data)


class ApproveAction(_Verb):
    verb = "approve"

    @documented(body=Reason, answer=ActionShape)
    def post(self, request: Request, action_id: UUID) -> Response:
        """Approve a proposal

        409 when it is none any more.
        """
        return self.order(request, action_id)


class RejectAction(_Verb):
    verb = "reject"

    @documented(body=Reason, answer=ActionShape)
    def post(self, request: Request, action_id: UUID) -> Response:
        """Reject what has not begun

        409 when it has; then it can be rolled back.
        """
        return self.order(request, action_id)


class RollbackAction(_Verb):
    verb = "rollback"

    @documented(body=Reason, answer=ActionShape)
    def post(self, request: Request, action_id: UUID) -> Response:
        """Take a change back

        A trial is undone; a kept change is taken back by a new action, which is the answer.
        """
        return self.order(request, action_id)


class ClearAction(_Verb):
    verb = "clear"

    @documented(body=Reason, answer=ActionShape)
    def post(self, request: Request, action_id: UUID) -> Response:
        """Say that you looked at a change that could not be undone

        Until somebody does, the autopilot leaves its engine alone. 409 when there is nothing to
        look at.
        """
        return self.order(request, action_id)


def read(kind: type[Shape], request: Request) -> dict[str, Any]:
    """The body's fields. Raises ValidationError, which becomes an answer in the error shape."""
    given = kind(data=body_of(request))
    given.is_valid(raise_exception=True)
    return dict(given.validated_data)


def find(request: Request, action_id: UUID) -> Action:
    """Raises Http404, for another tenant's action as for one that never was."""
    try:
        return action_get(request_tenant(request), action_id)
    except Action.DoesNotExist:
        raise Http404(_("No action has the id %(id)s.") % {"id": action_id}) from None


def api_error(error: OrderError) -> ApiError:
    return ApiError(STATUS_OF[error.code], error.code, str(error), param=error.param)


urlpatterns = [
    path("actions/", Actions.as_view(), name="api-actions"),
    path("actions/<uuid:action_id>/", ActionById.as_view(), name="api-action"),
    path("actions/<uuid:action_id>/approve/", ApproveAction.as_view(), name="api-action-approve"),
    path("actions/<uuid:action_id>/reject/", RejectAction.as_view(), name="api-action-reject"),
    path(
        "actions/<uuid:action_id>/rollback/", RollbackAction.as_view(), name="api-action-rollback"
    ),
    path("actions/<uuid:action_id>/clear/", ClearAction.as_view(), name="api-action-clear"),
    path("", include("controlplane.actions.policy_api")),
]
