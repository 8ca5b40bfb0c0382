"""Who calls a REST endpoint, for which tenant, and the one shape every error has.

A view says which machines may call it with `token_kinds`; without it, tokens of kind *api*. Such a
token needs the scope *read* to read and *write* to write, unless the view names another one with
`scope_to_write`. A person needs a role: `roles_to_write`, operators and owners without it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import AnonymousUser
from django.http import Http404
from django.utils.translation import gettext as _
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.models import Membership, Tenant, Token
from controlplane.accounts.selectors import membership_of, token_find

if TYPE_CHECKING:
    from rest_framework.views import APIView

TOKEN_KINDS_DEFAULT: frozenset[str] = frozenset({Token.Kind.API})
ROLES_THAT_WRITE = frozenset({Membership.Role.OPERATOR, Membership.Role.OWNER})


class ApiError(exceptions.APIException):
    """An answer in the error shape: status, a code for programs, words, and the field at fault."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(detail=message, code=code)
        self.status_code = status
        self.param = param


class BearerToken(BaseAuthentication):
    """`Authorization: Bearer tt_…`; request.auth is the Token, request.user is anonymous."""

    def authenticate(self, request: Request) -> tuple[AnonymousUser, Token] | None:
        words = get_authorization_header(request).split()
        if not words or words[0].lower() != b"bearer":
            return None
        view = (request.parser_context or {}).get("view")
        kinds: Collection[str] = getattr(view, "token_kinds", TOKEN_KINDS_DEFAULT)
        secret = words[1].decode("ascii", "replace") if len(words) == 2 else ""
        token = token_find(secret, kinds=kinds)
        if token is None:
            raise exceptions.AuthenticationFailed(
                _("The bearer token is unknown, revoked or of another kind; wanted: %(kinds)s.")
                % {"kinds": ", ".join(sorted(kinds))}
            )
        return AnonymousUser(), token

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="trimtab"'


class InTenant(BasePermission):
    """Lets in machines by their token's scopes and members by their role; a viewer only reads."""

    message: str | None = None

    def has_permission(self, request: Request, view: APIView) -> bool:
        reads = request.method in SAFE_METHODS
        if isinstance(request.auth, Token):
            if request.auth.kind != Token.Kind.API:
                return True
            wanted = Token.Scope.READ if reads else getattr(view, "scope_to_write", "write")
            self.message = _("The token's scopes are %(scopes)s; wanted: %(wanted)s.") % {
                "scopes": ", ".join(request.auth.scopes), "wanted": wanted,
            }  # fmt: skip
            return wanted in request.auth.scopes
        member = membership_of(request.user)
        if member is None:
            return False
        roles: Collection[str] = getattr(view, "roles_to_write", ROLES_THAT_WRITE)
        self.message = _("You are %(role)s here; wanted: %(roles)s.") % {
            "role": member.get_role_display(), "roles": ", ".join(sorted(roles)),
        }  # fmt: skip
        return reads or member.role in roles


def request_tenant(request: Request) -> Tenant:
    """The token's tenant, or the one the signed-in person belongs to.

    Raises PermissionDenied for anyone else.
    """
    if isinstance(request.auth, Token):
        return request.auth.tenant
    member = membership_of(request.user)
    if member is None:
        raise exceptions.PermissionDenied()
    return member.tenant


def error_response(error: Exception, context: dict[str, Any]) -> Response | None:
    """DRF's exception handler: `{"error": {"code", "message", "param"}}` whatever went wrong.

    None for what nobody foresaw, which then is a logged 500.
    """
    # DRF's views import this module, by its name in the settings, before they are defined.
    from rest_framework.views import exception_handler

    if isinstance(error, Http404):
        error = exceptions.NotFound(str(error) or None)
    response = exception_handler(error, context)
    if response is None:
        return None
    param = getattr(error, "param", None)
    detail: Any = getattr(error, "detail", response.data)
    while isinstance(detail, dict | list):
        if isinstance(detail, dict):
            name, detail = next(iter(detail.items()), ("", ""))
            param = param or str(name)
        else:
            detail = detail[0] if detail else ""
    code = getattr(detail, "code", "") or "error"
    response.data = {"error": {"code": code, "message": str(detail), "param": param or None}}
    return response
