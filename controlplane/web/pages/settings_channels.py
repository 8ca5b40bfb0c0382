"""/settings/channels/ and /settings/channels/<id>/: who hears of incidents, and whether they do."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.accounts.models import Tenant
from controlplane.alerts.channel import ChannelError, channels
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.secrecy import masked
from controlplane.alerts.selectors import channels_of, deliveries_of
from controlplane.alerts.services import (
    channel_create,
    channel_remove,
    channel_test,
    channel_update,
)
from controlplane.web.access import TenantRequest, form_page, order, send
from controlplane.web.forms import ChannelEditForm, ChannelForm
from controlplane.web.pages.errors import refuse

DELIVERIES = 10


@form_page
def channel_list(request: TenantRequest) -> HttpResponse:
    """A POST makes a channel; a secret made for it is on the page that answers, and on no other."""
    form, made, secret, status = ChannelForm(), None, "", 200
    if request.method == "POST":
        form, status = ChannelForm(request.POST), 400
        if form.is_valid():
            try:
                made, secret = channel_create(
                    tenant=request.tenant, spec=form.spec(), by=_me(request), now=timezone.now()
                )
                if not secret:
                    return redirect("settings-channels")
                form, status = ChannelForm(), 200
            except ChannelError as error:
                form.refuse(error.param, str(error))
    rows = channels_of(request.tenant)
    context = {
        "rows": [(row, masked(row.url), channels().get(row.kind)) for row in rows],
        "form": form,
        "kinds": channels().values(),
        "made": made,
        "secret": secret,
        "page_state": "none",
    }
    return send(request, "settings/channels.html", context, status=status)


@form_page
def channel_one(request: TenantRequest, channel_id: UUID) -> HttpResponse:
    """A secret made anew is on the page that answers, and on no other. Raises Http404 for another
    tenant's channel as for one that never was."""
    channel = _channel(request.tenant, channel_id)
    form, status, secret = ChannelEditForm(channel=channel, initial=_shown(channel)), 200, ""
    if request.method == "POST":
        form, status = ChannelEditForm(request.POST, channel=channel), 400
        if form.is_valid():
            try:
                spec = form.spec()
                channel_update(channel=channel, spec=spec, by=_me(request), now=timezone.now())
                secret = form.made_secret
                if not secret:
                    return redirect("settings-channel", channel.pk)
                form, status = ChannelEditForm(channel=channel, initial=_shown(channel)), 200
            except ChannelError as error:
                form.refuse(error.param, str(error))
                channel = _channel(request.tenant, channel_id)  # as it is, not as it was asked for
    told = deliveries_of(request.tenant).filter(channel=channel)
    context: dict[str, Any] = {
        "channel": channel,
        "kind": channels().get(channel.kind),
        "address": masked(channel.url),
        "form": form,
        "secret": secret,
        "deliveries": told[:DELIVERIES],
        "tested": _tested(request, told),
        "page_state": "none",
    }
    return send(request, "settings/channel.html", context, status=status)


@order
def channel_test_order(request: TenantRequest, channel_id: UUID) -> HttpResponse:
    """Takes as long as the channel takes to answer, alerts.SEND_WITHIN_S at most."""
    channel = _channel(request.tenant, channel_id)
    try:
        delivery = channel_test(channel=channel, by=_me(request), now=timezone.now())
    except ChannelError as error:
        title = _("This cannot be done now.")
        return refuse(request, status=409, code="conflict", title=title, remedy=str(error))
    return redirect(f"{reverse('settings-channel', args=[channel.pk])}?tested={delivery.pk}")


@order
def channel_remove_order(request: TenantRequest, channel_id: UUID) -> HttpResponse:
    channel = _channel(request.tenant, channel_id)
    channel_remove(channel=channel, by=_me(request), now=timezone.now())
    return redirect("settings-channels")


def _channel(tenant: Tenant, channel_id: UUID) -> Channel:
    channel = channels_of(tenant).filter(pk=channel_id).first()
    if channel is None:
        raise Http404(f"channel {channel_id} is not one of {tenant}")
    return channel


def _shown(channel: Channel) -> dict[str, Any]:
    """What a form may hold: all but the address and the secret."""
    names = ("name", "severity_min", "remind_minutes", "enabled")
    return {name: getattr(channel, name) for name in names}


def _tested(request: TenantRequest, told: Any) -> Delivery | None:
    """The test whose result the address asks for."""
    try:
        wanted = UUID(request.GET.get("tested", ""))
    except ValueError:
        return None
    found: Delivery | None = told.filter(pk=wanted, event=Delivery.Event.TEST).first()
    return found


def _me(request: TenantRequest) -> str:
    return str(request.user.get_username())
