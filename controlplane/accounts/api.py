"""REST of a tenant's tokens and members."""

from __future__ import annotations

from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404
from django.urls import path
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts import members, services
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
    deactivated_at = serializers.DateTimeField(allow_null=True)


class MemberMadeShape(MemberShape):
    password_url = serializers.CharField(help_text="where they choose a password; shown this once")


class MemberBody(Shape):
    name = serializers.CharField(
        max_length=members.NAME_CHARS_MAX, help_text="letters, digits and @ . + - _"
    )
    role = serializers.ChoiceField(choices=Membership.Role.values)


class MemberChangeBody(Shape):
    role = serializers.ChoiceField(choices=Membership.Role.values, required=False)
    active = serializers.BooleanField(required=False, help_text="false: may not come in for now")


class PasswordLinkShape(Shape):
    password_url = serializers.CharField(help_text="works once; shown this once")


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
    """Who belongs to the tenant. Only owners let somebody in; no token does."""

    roles_to_write = OWNERS

    @documented(query=MemberQuery, answer=list_of("members", MemberShape))
    def get(self, request: Request) -> Response:
        """List members"""
        asked = MemberQuery.of(request)
        rows = members_of(request_tenant(request))
        if "role" in asked:
            rows = rows.filter(role=asked["role"])
        return listed("members", page_of(rows, asked, by=("id",)), MemberShape)

    @documented(body=MemberBody, answer=MemberMadeShape, status=201)
    def post(self, request: Request) -> Response:
        """Let a person in

        The answer holds the one link by which they choose a password.
        """
        _person_check(request)
        asked, actor = MemberBody.read(request), actor_of(request)
        try:
            member = members.member_add(tenant=request_tenant(request), actor=actor, **asked)
        except ValidationError as error:
            raise exceptions.ValidationError(error.message_dict) from None
        url = members.password_link(member=member, actor=actor)
        return Response({**MemberShape(member).data, "password_url": url}, status=201)


class MemberByName(APIView):
    """One member. Only owners change one; no token does."""

    roles_to_write = OWNERS

    @documented(answer=MemberShape)
    def get(self, request: Request, name: str) -> Response:
        """Read a member"""
        return Response(MemberShape(_member(request, name)).data)

    @documented(body=MemberChangeBody, answer=MemberShape)
    def put(self, request: Request, name: str) -> Response:
        """Give a member another role, deactivate or activate them

        What is left out stays. Who is deactivated sees nothing from their next request on.
        """
        _person_check(request)
        member, asked = _member(request, name), MemberChangeBody.read(request)
        actor = actor_of(request)
        try:
            with transaction.atomic():
                if "role" in asked:
                    members.member_change(member=member, role=asked["role"], actor=actor)
                if asked.get("active") is False:
                    members.member_deactivate(member=member, actor=actor, now=timezone.now())
                if asked.get("active") is True:
                    members.member_activate(member=member, actor=actor)
        except members.LastOwner as error:
            raise ApiError(409, "conflict", str(error)) from None
        return Response(MemberShape(member).data)

    @documented(answer=None, status=204)
    def delete(self, request: Request, name: str) -> Response:
        """Take a member out of the tenant"""
        _person_check(request)
        try:
            members.member_remove(member=_member(request, name), actor=actor_of(request))
        except members.LastOwner as error:
            raise ApiError(409, "conflict", str(error)) from None
        return Response(status=204)


class PasswordLink(APIView):
    """Where a member chooses a password anew. Only owners make one; no token does."""

    roles_to_write = OWNERS

    @documented(answer=PasswordLinkShape, status=201)
    def post(self, request: Request, name: str) -> Response:
        """Make a link by which a member chooses a password

        What they sign in with now stays good until they do.
        """
        _person_check(request)
        try:
            url = members.password_link(member=_member(request, name), actor=actor_of(request))
        except members.MemberError as error:
            raise ApiError(409, "conflict", str(error)) from None
        return Response({"password_url": url}, status=201)


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
    path(
        "members/<str:name>/password-link/", PasswordLink.as_view(), name="api-member-password-link"
    ),
]
