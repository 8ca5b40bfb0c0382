"""Who may see a page, and how a page or one part of it is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast

from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import LogoutView
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import Resolver404, resolve
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.accounts.models import Tenant
from controlplane.web.charts import MINUTES_DEFAULT, RANGES
from controlplane.web.pages.errors import unavailable
from tracing.types import StoreError

P = ParamSpec("P")
STRANGER = gettext_lazy("You belong to no tenant yet: ask an owner to add you.")


class TenantRequest(HttpRequest):
    """A request of a signed-in member; everything a page reads belongs to `tenant`."""

    tenant: Tenant
    may_write: bool
    may_own: bool


def page(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """Makes `view` a page: read-only, never cached, for members; anyone else signs in first.

    While the telemetry store does not answer, a page says so with status 503; parts of an open
    page keep what they showed. Raises PermissionDenied for a user who belongs to no tenant.
    """

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if getattr(request, "tenant", None) is None:
            raise PermissionDenied(STRANGER)
        try:
            return view(cast(TenantRequest, request), *args, **kwargs)
        except StoreError as error:
            return unavailable(request, error)

    decorated = require_safe(never_cache(login_required(guarded)))
    return cast(Callable[Concatenate[HttpRequest, P], HttpResponse], decorated)


def order(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """Makes `view` something only a POST of a member who may write does; anyone else signs in.

    It has no page of its own: a GET, as after signing in or choosing a language where it was
    refused, leads to the page above it. Raises PermissionDenied for a viewer, and for a user who
    belongs to no tenant.
    """
    return _posted(
        view, "may_write", gettext_lazy("Only operators and owners may change anything.")
    )


def owner_order(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """As `order`, for owners alone: who may come in is theirs to say."""
    return _posted(view, "may_own", gettext_lazy("Only owners may change tokens and members."))


def own_order(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """As `order`, for every member: what is theirs alone."""
    return _posted(view, "tenant", STRANGER)


def form_page(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse],
    ordered: Callable[[Any], Callable[Concatenate[HttpRequest, P], HttpResponse]] = order,
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """Makes `view` a page with a form: a GET is a `page`, a POST an order of the kind `ordered`."""
    read, write = page(view), ordered(view)

    @wraps(view)
    def either(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        answer = write if request.method == "POST" else read
        return answer(request, *args, **kwargs)

    return cast(Callable[Concatenate[HttpRequest, P], HttpResponse], either)


def owner_form_page(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """As `form_page`; only an owner's POST is taken."""
    return form_page(view, owner_order)


def own_form_page(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse],
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    """As `form_page`; every member's POST is taken."""
    return form_page(view, own_order)


def _posted(
    view: Callable[Concatenate[TenantRequest, P], HttpResponse], right: str, refusal: Promise
) -> Callable[Concatenate[HttpRequest, P], HttpResponse]:
    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if request.method != "POST":
            return redirect(_above(request.path))
        if not getattr(request, right, False):
            raise PermissionDenied(refusal)
        return view(cast(TenantRequest, request), *args, **kwargs)

    decorated = require_http_methods(["GET", "HEAD", "POST"])(never_cache(login_required(guarded)))
    return cast(Callable[Concatenate[HttpRequest, P], HttpResponse], decorated)


def _above(address: str) -> str:
    """The nearest address above that leads somewhere."""
    above = address.rstrip("/").rpartition("/")[0] + "/"
    try:
        resolve(above)
    except Resolver404:
        return _above(above)
    return above


class SignOut(LogoutView):
    """A POST; whoever comes with a GET, sent back here by another page, is not signed out."""

    http_method_names = ["get", "head", "post", "options"]

    def get(self, request: HttpRequest) -> HttpResponse:
        return redirect(_above(request.path))


def minutes_of(request: HttpRequest, default: int = MINUTES_DEFAULT) -> int:
    """The time range in the address, `?minutes=`. Raises Http404 for one that is not offered."""
    text = request.GET.get("minutes", str(default))
    if text not in map(str, RANGES):
        raise Http404(f"minutes={text!r}, allowed: {', '.join(map(str, RANGES))}")
    return int(text)


def send(
    request: HttpRequest,
    template: str,
    context: Mapping[str, Any],
    *,
    parts: Collection[str] = (),
    status: int = 200,
) -> HttpResponse:
    """The whole page, or the part of it named by `?part=`, which live pages fetch again.

    Raises Http404 for a part the page does not have.
    """
    part = request.GET.get("part")
    if part is None or status != 200:
        return render(request, template, dict(context), status=status)
    if part not in parts:
        raise Http404(f"{template} has no part {part!r}, only: {', '.join(parts) or 'none'}")
    return render(request, f"{template}#{part}", dict(context))
