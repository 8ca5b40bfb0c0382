"""REST of actions, read-only: the ledger, newest first."""

from __future__ import annotations

from typing import Any

from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import request_tenant
from controlplane.actions.models import Action
from controlplane.actions.selectors import actions_recent, sentence

LIST_MAX = 100


class Actions(APIView):
    """GET the newest actions with every step they went through."""

    def get(self, request: Request) -> Response:
        found = actions_recent(request_tenant(request), LIST_MAX)
        return Response({"actions": [action_json(action) for action in found]})


def action_json(action: Action) -> dict[str, Any]:
    return {
        "id": str(action.pk),
        "engine": action.engine.name,
        "incident": str(action.incident_id) if action.incident_id else None,
        "cause": action.cause,
        "why": action.why,
        "changes": action.changes,
        "actor": action.actor,
        "state": action.state,
        "verdict": action.verdict,
        "outcome": action.outcome,
        "sentence": sentence(action),
        "created_at": action.created_at,
        "applied_at": action.applied_at,
        "ended_at": action.ended_at,
        "transitions": [
            {
                "from": step.from_state,
                "to": step.to_state,
                "at": step.at,
                "actor": step.actor,
                "reason": step.reason,
            }
            for step in action.transitions.all()
        ],
    }


urlpatterns = [path("actions/", Actions.as_view(), name="api-actions")]
