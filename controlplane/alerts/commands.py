"""`trimtab channel` and `trimtab silence`: each command yields the lines to print.

They raise ChannelError for what does not fit.
"""

from __future__ import annotations

import getpass
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.alerts import services
from controlplane.alerts.channel import ChannelError
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.secrecy import masked
from controlplane.alerts.selectors import channels_of, silences_active, silences_of
from controlplane.columns import table
from controlplane.diagnosis.models import Severity

UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def channel_add(tenant: Tenant, options: Namespace) -> Iterator[str]:
    wanted = {
        "name": _name(options),
        "kind": options.kind,
        "url": options.url or "",
        "secret": options.secret,
        "severity_min": options.severity,
        "remind_minutes": options.remind_minutes,
    }
    spec = {key: value for key, value in wanted.items() if value is not None}
    made, secret = services.channel_create(tenant=tenant, spec=spec, by=_me(), now=timezone.now())
    yield f"Messages about incidents go to {masked(made.url)} from now on."
    if secret:
        yield f"Their signatures are made with {secret}, shown this once."


def channel_list(tenant: Tenant, options: Namespace) -> Iterator[str]:
    heads = ("CHANNEL", "KIND", "TELLS OF", "STILL BURNING", "ADDRESS")
    none = "No channel yet. Add one: trimtab channel add --help"
    yield from table(heads, map(_channel_row, channels_of(tenant)), none=none)


def _channel_row(row: Channel) -> tuple[str, ...]:
    told = "all" if row.severity_min == Severity.TICKET else "pages only"
    reminds = f"every {row.remind_minutes} min" if row.remind_minutes else "not told"
    return row.name, row.kind, told if row.enabled else "disabled", reminds, masked(row.url)


def channel_test(tenant: Tenant, options: Namespace) -> Iterator[str]:
    channel = _find(tenant, options)
    sent = services.channel_test(channel=channel, by=_me(), now=timezone.now())
    if sent.state != Delivery.State.SENT:
        lasting = "for good" if sent.permanent else "it may pass"
        raise ChannelError("name", f"{channel.name} did not take it ({lasting}): {sent.last_error}")
    yield f"{channel.name} took it: HTTP {sent.last_status}."


def channel_remove(tenant: Tenant, options: Namespace) -> Iterator[str]:
    channel = _find(tenant, options)
    services.channel_remove(channel=channel, by=_me(), now=timezone.now())
    yield f"Removed {options.name}, and what was still to be sent there."


def silence_add(tenant: Tenant, options: Namespace) -> Iterator[str]:
    now = timezone.now()
    wanted = ("service", "objective", "engine", "reason")
    spec: dict[str, Any] = {key: getattr(options, key) or "" for key in wanted}
    spec["until"] = now + _lasts(options.lasts)
    made = services.silence_create(tenant=tenant, spec=spec, by=_me(), now=now)
    yield f"Quiet about {made}. To end it: trimtab silence end --id {str(made.pk)[:8]}"


def silence_list(tenant: Tenant, options: Namespace) -> Iterator[str]:
    heads = ("SILENCE", "OF WHAT", "BY", "BECAUSE")
    rows = (
        (str(row.pk)[:8], str(row), row.by, row.reason)
        for row in silences_active(tenant.pk, timezone.now())
    )
    yield from table(heads, rows, none="Nobody is kept from hearing anything.")


def silence_end(tenant: Tenant, options: Namespace) -> Iterator[str]:
    wanted = (options.id or "").lower()
    rows = [row for row in silences_of(tenant) if wanted and str(row.pk).startswith(wanted)]
    if len(rows) != 1:
        raise ChannelError("id", f"--id {options.id!r} names {len(rows)} silences; want one")
    services.silence_end(silence=rows[0], by=_me(), now=timezone.now())
    yield f"Ended: {rows[0]}. What still burns is told in a moment."


COMMANDS: dict[tuple[str, str], Callable[[Tenant, Namespace], Iterator[str]]] = {
    ("channel", "add"): channel_add,
    ("channel", "list"): channel_list,
    ("channel", "test"): channel_test,
    ("channel", "remove"): channel_remove,
    ("silence", "add"): silence_add,
    ("silence", "list"): silence_list,
    ("silence", "end"): silence_end,
}


def _name(options: Namespace) -> str:
    if not options.name:
        raise ChannelError("name", f"{options.verb} wants --name")
    return str(options.name)


def _find(tenant: Tenant, options: Namespace) -> Channel:
    rows = channels_of(tenant)
    channel = rows.filter(name=_name(options)).first()
    if channel is None:
        known = ", ".join(row.name for row in rows) or "none"
        raise ChannelError("name", f"--name {options.name!r} is no channel. Known: {known}")
    return channel


def _lasts(text: str | None) -> timedelta:
    match = re.fullmatch(r"(\d{1,5})([mhd])", text or "")
    if match is None:
        raise ChannelError("for", f"--for {text!r}: wanted: minutes, hours or days: 30m, 8h, 7d")
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def _me() -> str:
    return f"{getpass.getuser()} at the command line"
