"""Endpoints that do nothing but fail or say who called."""

from __future__ import annotations

from typing import NoReturn

from django.http import Http404
from django.urls import path
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import ApiError, request_tenant


class WhoAmI(APIView):
    def get(self, request: Request) -> Response:
        return Response({"tenant": request_tenant(request).slug})

    def post(self, request: Request) -> Response:
        return Response({"tenant": request_tenant(request).slug, "said": request.data})


class Agents(WhoAmI):
    token_kinds = frozenset({"agent"})


class Fails(APIView):
    def get(self, request: Request, how: str) -> NoReturn:
        raise {
            "missing": Http404("No such thing."),
            "conflict": ApiError(409, "taken", "That is taken.", param="slug"),
            "fields": exceptions.ValidationError({"target": [{"low": ["Too low."]}]}),
            "list": exceptions.ValidationError(["Wrong."]),
        }[how]


urlpatterns = [
    path("who/", WhoAmI.as_view()),
    path("agents/", Agents.as_view()),
    path("fails/<how>/", Fails.as_view()),
]
