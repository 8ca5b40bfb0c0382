"""REST of a tenant's tokens and members."""

from __future__ import annotations

from uuid import UUID

from django.core.exceptions import ValidationError
from django.http import Http404
from django.urls import path
from django.utils.translation import gettext as _
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts import services
from controlplane.accounts.audit import actor_of
from controlplane.accounts.authentication import ApiError, request_tenant
from controlplane.accounts.models import Membership, Token
from controlplane.accounts.rest import (
    ListQuery,
    Shape,
    choice,
    documented,
    list_of,
    listed,
    page_of,
)
from controlplane.accounts.selectors import members_of, tokens_of

OWNERS = frozenset({Membership.Role.OWNER})
# What a token must have itself to make one of another kind: agents change engines.
SCOPE_FOR_KIND = {Token.Kind.INGEST: Token.Scope.WRITE, Token.Kind.AGENT: Token.Scope.ACT}


class TokenQuery(ListQuery):
    kind = choice(Token.Kind.values)
    revoked = serializers.BooleanField(required=False)


class TokenShape(Shape):
    """A token without its secret, which nobody has but who was given it."""

    id = serializers.UUIDField()
    kind = serializers.ChoiceField(choices=Token.Kind.values)
    name = serializers.CharField()
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=Token.Scope.values))
    prefix = serializers.CharField(help_text="its first characters")
    created_at = serializers.DateTimeField()
    last_used_at = serializers.DateTimeField(allow_null=True, help_text="to the minute")
    revoked_at = serializers.DateTimeField(allow_null=True)


class TokenMadeShape(TokenShape):
    secret = serializers.CharField(help_text="shown this once")


class TokenBody(Shape):
    kind = serializers.ChoiceField(choices=Token.Kind.values)
    name = serializers.CharField(max_length=100, help_text="what it is for")
    scopes = serializers.ListField(
        child=serializers.ChoiceField(choices=Token.Scope.values),
        required=False,
        help_text="kind api alone; all it may give without it",
    )


class MemberQuery(ListQuery):
    role = choice(Membership.Role.values)


class MemberShape(Shape):
    name = serializers.CharField(source="user.username")
    role = serializers.ChoiceField(choices=Membership.Role.values)
    last_login_at = serializers.DateTimeField(source="user.last_login", allow_null=True)


class MemberBody(Shape):
    role = serializers.ChoiceField(choices=Membership.Role.values)


class Tokens(APIView):
    """The tokens machines carry, by their names' order."""

    roles_to_write = OWNERS

    @documented(query=TokenQuery, answer=list_of("tokens", TokenShape))
    def get(self, request: Request) -> Response:
        """List tokens"""
        asked = TokenQuery.of(request)
        rows = tokens_of(request_tenant(request))
        if "kind" in asked:
            rows = rows.filter(kind=asked["kind"])
        if "revoked" in asked:
            rows = rows.filter(revoked_at__isnull=not asked["revoked"])
        return listed("tokens", page_of(rows, asked, by=("-created_at", "id")), TokenShape)

    @documented(body=TokenBody, answer=TokenMadeShape, status=201)
    def post(self, request: Request) -> Response:
        """Make a token

        For owners, and for tokens: those give no scope they lack, an ingest token only with
        *write* and an agent token only with *act*.
        """
        asked = TokenBody.read(request)
        kind, scopes = asked["kind"], asked.get("scopes")
        if isinstance(request.auth, Token):
            if kind == Token.Kind.API and scopes is None:
                scopes = request.auth.scopes
            _giving_check(request.auth, kind, scopes or [])
        try:
            token, secret = services.token_create(
                tenant=request_tenant(request),
                kind=kind,
                name=asked["name"],
                scopes=scopes,
                actor=actor_of(request),
            )
        except ValidationError as error:
            raise exceptions.ValidationError(error.message_dict) from None
        return Response({**TokenShape(token).data, "secret": secret}, status=201)


class TokenById(APIView):
    """One token."""

    roles_to_write = OWNERS

    @documented(answer=TokenShape)
    def get(self, request: Request, token_id: UUID) -> Response:
        """Read a token"""
        return Response(TokenShape(_token(request, token_id)).data)

    @documented(answer=None, status=204)
    def delete(self, request: Request, token_id: UUID) -> Response:
        """Revoke a token

        It stays in the list. The ingest door may honour it for 30 s more.
        """
        services.token_revoke(token=_token(request, token_id), actor=actor_of(request))
        return Response(status=204)


class Members(APIView):
    """Who belongs to the tenant."""

    @documented(query=MemberQuery, answer=list_of("members", MemberShape))
    def get(self, request: Request) -> Response:
        """List members"""
        asked = MemberQuery.of(request)
        rows = members_of(request_tenant(request))
        if "role" in asked:
            rows = rows.filter(role=asked["role"])
        return listed("members", page_of(rows, asked, by=("id",)), MemberShape)


class MemberByName(APIView):
    """One member. Only owners change one; no token does."""

    roles_to_write = OWNERS

    @documented(answer=MemberShape)
    def get(self, request: Request, name: str) -> Response:
        """Read a member"""
        return Response(MemberShape(_member(request, name)).data)

    @documented(body=MemberBody, answer=MemberShape)
    def put(self, request: Request, name: str) -> Response:
        """Give a member another role"""
        _person_check(request)
        member, role = _member(request, name), MemberBody.read(request)["role"]
        try:
            services.member_change(member=member, role=role, actor=actor_of(request))
        except services.MemberConflict as error:
            raise ApiError(409, "conflict", str(error)) from None
        return Response(MemberShape(member).data)

    @documented(answer=None, status=204)
    def delete(self, request: Request, name: str) -> Response:
        """Take a member out of the tenant"""
        _person_check(request)
        try:
            services.member_remove(member=_member(request, name), actor=actor_of(request))
        except services.MemberConflict as error:
            raise ApiError(409, "conflict", str(error)) from None
        return Response(status=204)


def _giving_check(giver: Token, kind: str, scopes: list[str]) -> None:
    """Raises ApiError 403 for a token that would give what it does not have."""
    needed = set(scopes) if kind == Token.Kind.API else {SCOPE_FOR_KIND[Token.Kind(kind)].value}
    if lacking := sorted(needed - set(giver.scopes)):
        words = _("This token cannot give what it lacks: %s.") % ", ".join(lacking)
        raise ApiError(403, "permission_denied", words, param="scopes")


def _person_check(request: Request) -> None:
    if isinstance(request.auth, Token):
        words = _("Members are changed by a person: sign in.")
        raise ApiError(403, "permission_denied", words)


def _token(request: Request, token_id: UUID) -> Token:
    """Raises Http404, for another tenant's token as for one that never was."""
    token = tokens_of(request_tenant(request)).filter(pk=token_id).first()
    if token is None:
        raise Http404(_("No token has the id %(id)s.") % {"id": token_id})
    return token


def _member(request: Request, name: str) -> Membership:
    """Raises Http404, for another tenant's member as for one that never was."""
    member = members_of(request_tenant(request)).filter(user__username=name).first()
    if member is None:
        raise Http404(_("No member is called %(name)s.") % {"name": name})
    return member


urlpatterns = [
    path("tokens/", Tokens.as_view(), name="api-tokens"),
    path("tokens/<uuid:token_id>/", TokenById.as_view(), name="api-token"),
    path("members/", Members.as_view(), name="api-members"),
    path("members/<str:name>/", MemberByName.as_view(), name="api-member"),
]
