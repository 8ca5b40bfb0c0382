"""/settings/tokens/: what machines carry to be let in."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from controlplane.accounts.models import Token
from controlplane.accounts.selectors import tokens_of
from controlplane.accounts.services import token_create, token_revoke
from controlplane.web.access import TenantRequest, owner_form_page, owner_order, send
from controlplane.web.filters import BadFilter, rows_after
from controlplane.web.forms import TokenForm


@owner_form_page
def token_list(request: TenantRequest) -> HttpResponse:
    """A POST makes a token; its secret is on the page that answers, and on no other."""
    form, made, secret, status = TokenForm(), None, "", 200
    if request.method == "POST":
        form, status = TokenForm(request.POST), 400
        if form.is_valid():
            try:
                made, secret = _made(request, form.cleaned_data)
                form, status = TokenForm(), 201
            except ValidationError as error:
                form.refuse_each(error)
    context: dict[str, Any] = {"form": form, "made": made, "secret": secret, "page_state": "none"}
    raw = {key: str(text) for key, text in request.GET.items() if key != "part"}
    try:
        found = rows_after(tokens_of(request.tenant), raw, by=("-created_at", "id"))
        context |= {"rows": found.rows, "next": found.next}
    except BadFilter as error:
        context["problem"], status = str(error), 400
    return send(request, "settings/tokens.html", context, status=status)


@owner_order
def token_revoke_order(request: TenantRequest, token_id: UUID) -> HttpResponse:
    """Raises Http404 for another tenant's token as for one that never was."""
    token = tokens_of(request.tenant).filter(pk=token_id).first()
    if token is None:
        raise Http404(f"token {token_id} is not one of {request.tenant}")
    token_revoke(token=token, actor=request.user.get_username())
    return redirect(reverse("settings-tokens"))


def _made(request: TenantRequest, given: dict[str, Any]) -> tuple[Token, str]:
    """Only a token of kind API is asked for scopes: the others have none to give."""
    scopes = given["scopes"]
    if given["kind"] != Token.Kind.API:
        scopes = scopes or None
    return token_create(
        tenant=request.tenant,
        kind=given["kind"],
        name=given["name"],
        scopes=scopes,
        actor=request.user.get_username(),
    )
