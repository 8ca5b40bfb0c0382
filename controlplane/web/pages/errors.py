"""What people (and machines, below /api/) see when something failed: what, and what to try."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """`logged`: what the log says beside the reference the person is given; empty for no log."""

    status: int
    title: Promise
    remedy: Promise
    logged: str = ""


# Code, as the API has it → page.
FAILURES = {
    "bad_request": Failure(
        400,
        _("The request cannot be read."),
        _("Go back, load the page again and repeat what you did."),
    ),
    "permission_denied": Failure(
        403,
        _("You may not see this."),
        _("Sign in as someone who may, or ask an owner of the tenant."),
    ),
    "not_found": Failure(
        404,
        _("There is nothing at this address."),
        _("It may have been removed, or it belongs to a tenant you are not in."),
    ),
    "server_error": Failure(
        500,
        _("This page failed, and it is our fault."),
        _("Load it again. If it keeps failing, search the log for the reference below."),
        "Told a person about the failure above as %s: %s",
    ),
    "unavailable": Failure(
        503,
        _("Telemetry cannot be read just now."),
        _("Load the page again. If that fails too, the log says why, under the reference."),
        "Telemetry could not be read, told a person as %s: %s",
    ),
}


def respond(
    request: HttpRequest, code: str, *, title: str = "", detail: object = ""
) -> HttpResponse:
    """The page of a failure, or its JSON below /api/. `title` says it more precisely; `detail` is
    for the log."""
    failure = FAILURES[code]
    said = title or str(failure.title)
    reference = ""
    if failure.logged:
        reference = uuid.uuid4().hex[:8]
        logger.error(failure.logged, reference, detail)
    return refuse(
        request,
        status=failure.status,
        code=code,
        title=said,
        remedy=str(failure.remedy),
        reference=reference,
    )


def refuse(
    request: HttpRequest, *, status: int, code: str, title: str, remedy: str, reference: str = ""
) -> HttpResponse:
    """A page that says what was not done and what to try, or its JSON below /api/."""
    if request.path.startswith("/api/"):
        body = {"error": {"code": code, "message": title, "param": None}}
        return JsonResponse(body, status=status)
    context = {"status": status, "title": title, "remedy": remedy, "reference": reference}
    return render(request, "error.html", context, status=status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    return respond(request, "bad_request")


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    said = exception.args[0] if isinstance(exception, PermissionDenied) and exception.args else ""
    return respond(
        request, "permission_denied", title=str(said) if isinstance(said, (str, Promise)) else ""
    )


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    return respond(request, "not_found")


def server_error(request: HttpRequest) -> HttpResponse:
    return respond(request, "server_error", detail=request.path)


def unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    """503: the telemetry store did not answer; the reason is in the log under the reference."""
    return respond(request, "unavailable", detail=error)
