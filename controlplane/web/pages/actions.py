"""POST /actions/<id>/<verb>/ from a page's button, and /a/<token>/, the link of a chat message."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from controlplane.actions.links import (
    ACTOR_CHARS_MAX,
    ADDRESS_CHARS_MAX,
    VERBS,
    Link,
    LinkError,
    link_open,
    link_use,
)
from controlplane.actions.models import Action
from controlplane.actions.orders import OrderError
from controlplane.actions.selectors import action_get
from controlplane.actions.words import translated
from controlplane.web.access import TenantRequest, order
from controlplane.web.pages.errors import refuse

BROWSER_CHARS_MAX = 200
# What a link's button says, and what its page asks.
ASKED: dict[str, tuple[str, str]] = {
    "approve": (gettext_noop("Approve"), gettext_noop("Make this change?")),
    "reject": (gettext_noop("Reject"), gettext_noop("Turn this change down?")),
    "rollback": (gettext_noop("Roll back"), gettext_noop("Take this change back?")),
    "clear": (
        gettext_noop("I have looked"),
        gettext_noop("May the autopilot change this engine again?"),
    ),
}
STATUS_OF = {"invalid": 400, "forbidden": 403, "conflict": 409}
GONE: dict[str, tuple[int, str]] = {
    "foreign": (404, gettext_noop("This link is not one of ours.")),
    "expired": (410, gettext_noop("This link has ended.")),
    "used": (410, gettext_noop("This link was used already.")),
}


@order
def action_order(request: TenantRequest, action_id: UUID, verb: str) -> HttpResponse:
    """Raises Http404 for another tenant's action as for one that never was."""
    if verb not in VERBS:
        raise Http404(f"actions know no {verb!r}, only: {', '.join(VERBS)}")
    try:
        action = action_get(request.tenant, action_id)
    except Action.DoesNotExist:
        raise Http404(f"action {action_id} is not one of {request.tenant}") from None
    try:
        VERBS[verb](action=action, actor=request.user.get_username(), now=timezone.now())
    except OrderError as error:
        return refused(request, error)
    return redirect(_back(request, action))


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def action_link(request: HttpRequest, token: str) -> HttpResponse:
    """GET asks and changes nothing; POST does it, once. For whoever has the link.

    Somebody who is signed in has to be a member of the action's tenant who may write.
    """
    now = timezone.now()
    try:
        link = link_open(token, now)
        if not _may_use(request, link):
            return _gone(request, "foreign", _("It belongs to a tenant you may not write to."))
        if request.method != "POST":
            return _ask(request, link)
        actor = _actor(request)
        if not actor:
            return _ask(request, link, problem=_("Say who you are; it goes to the audit log."))
        known, seen = request.user.is_authenticated, _seen(request)
        action = link_use(token, actor=actor, now=now, signed_in=known, seen=seen)
    except LinkError as error:
        return _gone(request, error.kind, str(error))
    except OrderError as error:
        return refused(request, error)
    context = {"link": link, "action": action, "done": True}
    return render(request, "link.html", context)


def refused(request: HttpRequest, error: OrderError) -> HttpResponse:
    title = _("This cannot be done now.")
    return refuse(
        request, status=STATUS_OF[error.code], code=error.code, title=title,
        remedy=translated(error.words),
    )  # fmt: skip


def _back(request: TenantRequest, action: Action) -> str:
    """The page the button was on, where the form says so; else the incident's, or the ledger."""
    page = request.POST.get("next", "")
    if url_has_allowed_host_and_scheme(page, {request.get_host()}, request.is_secure()):
        return page
    if action.incident_id:
        return reverse("incident", args=[action.incident_id])
    return reverse("actions")


def _ask(request: HttpRequest, link: Link, problem: str = "") -> HttpResponse:
    button, question = ASKED[link.verb]
    context: dict[str, Any] = {
        "link": link,
        "action": link.action,
        "button": _(button),
        "question": _(question),
        "problem": problem,
        "actor_chars_max": ACTOR_CHARS_MAX,
    }
    return render(request, "link.html", context, status=400 if problem else 200)


def _gone(request: HttpRequest, kind: str, why: str) -> HttpResponse:
    status, title = GONE[kind]
    return refuse(request, status=status, code=kind, title=_(title), remedy=why)


def _may_use(request: HttpRequest, link: Link) -> bool:
    if not request.user.is_authenticated:
        return True
    tenant = getattr(request, "tenant", None)
    return tenant == link.action.tenant and bool(getattr(request, "may_write", False))


def _actor(request: HttpRequest) -> str:
    if request.user.is_authenticated:
        return str(request.user.get_username())
    said = "".join(c for c in request.POST.get("actor", "") if c.isprintable())
    return said.strip()[:ACTOR_CHARS_MAX]


def _seen(request: HttpRequest) -> dict[str, str]:
    address = request.META.get("REMOTE_ADDR") or "unknown"
    browser = request.headers.get("User-Agent", "")
    return {"address": address[:ADDRESS_CHARS_MAX], "browser": browser[:BROWSER_CHARS_MAX]}
