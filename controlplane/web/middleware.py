"""What every response carries and every request knows."""

from __future__ import annotations

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.deprecation import MiddlewareMixin

from controlplane.accounts.authentication import ROLES_THAT_WRITE
from controlplane.accounts.models import Membership
from controlplane.accounts.selectors import membership_of

# No inline script or style anywhere: geometry is drawn with SVG attributes, which this allows.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)


class ContentSecurityPolicy(MiddlewareMixin):
    """Sends `POLICY` with every response; a view that must loosen it sets the header itself."""

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        response.headers.setdefault("Content-Security-Policy", POLICY)
        return response


class CurrentTenant(MiddlewareMixin):
    """Sets `request.tenant`: the tenant the user joined first, None for anonymous or a stranger;
    `request.may_write`: whether they may change anything there, and `request.may_own`: also who
    else may come in.

    Costs one query for a signed-in user, none for anyone else.
    """

    def process_request(self, request: HttpRequest) -> None:
        member = membership_of(request.user)
        request.tenant = member.tenant if member else None  # type: ignore[attr-defined]
        may_write = member is not None and member.role in ROLES_THAT_WRITE
        request.may_write = may_write  # type: ignore[attr-defined]
        may_own = member is not None and member.role == Membership.Role.OWNER
        request.may_own = may_own  # type: ignore[attr-defined]
