"""Endpoints that do nothing but fail or say who called."""

from __future__ import annotations

from typing import NoReturn

from django.http import Http404
from django.urls import path
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.authentication import ApiError, request_tenant
from controlplane.accounts.models import Tenant, Token
from controlplane.accounts.rest import (
    ListQuery,
    Shape,
    choice,
    documented,
    list_of,
    listed,
    moment,
    page_of,
    text,
)  # fmt: skip


class WhoAmI(APIView):
    def get(self, request: Request) -> Response:
        return Response({"tenant": request_tenant(request).slug})

    def post(self, request: Request) -> Response:
        return Response({"tenant": request_tenant(request).slug, "said": request.data})


class Agents(WhoAmI):
    token_kinds = frozenset({"agent"})


class Acts(WhoAmI):
    scope_to_write = "act"


class TokenQuery(ListQuery):
    kind = choice(Token.Kind.values)
    name = text()
    since = moment()


class TokenShape(Shape):
    name = serializers.CharField()


class Tokens(APIView):
    @documented(query=TokenQuery, answer=list_of("tokens", TokenShape))
    def get(self, request: Request) -> Response:
        asked = TokenQuery.of(request)
        rows = Token.objects.filter(tenant=request_tenant(request))
        return listed("tokens", page_of(rows, asked, by=("-name", "id")), TokenShape)


class Tenants(APIView):
    def get(self, request: Request) -> Response:
        page = page_of(Tenant.objects.all(), ListQuery.of(request), by=("slug",))
        return listed("tenants", page, TokenShape)


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
    path("acts/", Acts.as_view()),
    path("tokens/", Tokens.as_view()),
    path("tenants/", Tenants.as_view()),
    path("fails/<how>/", Fails.as_view()),
]
