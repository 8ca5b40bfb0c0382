"""What people (and machines, below /api/) see when something failed: what, and what to try."""

from __future__ import annotations

import logging
import uuid

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.functional import Promise
from django.utils.translation import gettext as _

logger = logging.getLogger(__name__)


def respond(
    request: HttpRequest, *, status: int, code: str, title: str, remedy: str, reference: str = ""
) -> HttpResponse:
    if request.path.startswith("/api/"):
        return JsonResponse(
            {"error": {"code": code, "message": title, "param": None}}, status=status
        )
    context = {"status": status, "title": title, "remedy": remedy, "reference": reference}
    return render(request, "error.html", context, status=status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    return respond(
        request,
        status=400,
        code="bad_request",
        title=_("The request cannot be read."),
        remedy=_("Go back, load the page again and repeat what you did."),
    )


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    said = exception.args[0] if isinstance(exception, PermissionDenied) and exception.args else ""
    return respond(
        request,
        status=403,
        code="permission_denied",
        title=str(said)
        if isinstance(said, (str, Promise)) and said
        else _("You may not see this."),
        remedy=_("Sign in as someone who may, or ask an owner of the tenant."),
    )


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    return respond(
        request,
        status=404,
        code="not_found",
        title=_("There is nothing at this address."),
        remedy=_("It may have been removed, or it belongs to a tenant you are not in."),
    )


def unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    """503: the telemetry store did not answer; the reason is in the log under the reference."""
    reference = uuid.uuid4().hex[:8]
    logger.error("Telemetry could not be read, told a person as %s: %s", reference, error)
    return respond(
        request,
        status=503,
        code="unavailable",
        title=_("Telemetry cannot be read just now."),
        remedy=_("Load the page again. If that fails too, the log says why, under the reference."),
        reference=reference,
    )


def server_error(request: HttpRequest) -> HttpResponse:
    reference = uuid.uuid4().hex[:8]
    logger.error("Told a person about the failure above as %s: %s", reference, request.path)
    return respond(
        request,
        status=500,
        code="server_error",
        title=_("This page failed, and it is our fault."),
        remedy=_("Load it again. If it keeps failing, search the log for the reference below."),
        reference=reference,
    )
