"""/settings/silences/: who does not want to hear of what, until when, and why."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.alerts.channel import ChannelError
from controlplane.alerts.selectors import silences_active, silences_of
from controlplane.alerts.services import silence_create, silence_end
from controlplane.fleet.selectors import engines_of
from controlplane.web.access import TenantRequest, form_page, order, send
from controlplane.web.filters import BadFilter, rows_after
from controlplane.web.forms import LASTING, SilenceForm
from slo.models import Objective


@form_page
def silence_list(request: TenantRequest) -> HttpResponse:
    """A POST makes a silence. Answers 400 for a place in the list no link of ours led to."""
    now, choices = timezone.now(), _choices(request.tenant)
    form, status = SilenceForm(choices=choices, initial={"lasts": "4h"}), 200
    if request.method == "POST":
        form, status = SilenceForm(request.POST, choices=choices), 400
        if form.is_valid():
            spec = dict(form.cleaned_data)
            spec["until"] = now + LASTING[spec.pop("lasts")][0]
            actor = request.user.get_username()
            try:
                silence_create(tenant=request.tenant, spec=spec, by=actor, now=now)
                return redirect("settings-silences")
            except ChannelError as error:
                form.refuse(error.param, str(error))
    context: dict[str, Any] = {"form": form, "page_state": "none"}
    raw = {key: str(text) for key, text in request.GET.items() if key != "part"}
    active = set(silences_active(request.tenant.pk, now).values_list("pk", flat=True))
    try:
        found = rows_after(silences_of(request.tenant), raw, by=("-created_at", "-id"))
        rows = [(row, row.pk in active) for row in found.rows]
        context |= {"rows": rows, "next": found.next}
    except BadFilter as error:
        context["problem"], status = str(error), 400
    return send(request, "settings/silences.html", context, status=status)


@order
def silence_end_order(request: TenantRequest, silence_id: UUID) -> HttpResponse:
    """Raises Http404 for another tenant's silence as for one that never was."""
    silence = silences_of(request.tenant).filter(pk=silence_id).first()
    if silence is None:
        raise Http404(f"silence {silence_id} is not one of {request.tenant}")
    silence_end(silence=silence, by=request.user.get_username(), now=timezone.now())
    return redirect("settings-silences")


def _choices(tenant: Tenant) -> dict[str, list[tuple[str, str]]]:
    engines = engines_of(tenant)
    promised = Objective.objects.filter(tenant=tenant).order_by("slug")
    services = {engine.service for engine in engines} | {each.service for each in promised}
    return {
        "service": [(name, name) for name in sorted(services)],
        "objective": [(each.slug, each.name) for each in promised],
        "engine": [(engine.name, engine.name) for engine in engines],
    }
