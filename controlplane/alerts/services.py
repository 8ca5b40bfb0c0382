"""Writes of the alerts room: channels, their test, and silences; each told to the audit log.

What is said of an incident is decided in telling.py and sent by outbox.py. `by` is the person or
token that asks, as the audit log names them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from controlplane.accounts import audit
from controlplane.accounts.models import Tenant
from controlplane.alerts.channel import ChannelError, channels
from controlplane.alerts.message import compose_test
from controlplane.alerts.models import Channel, Delivery, Silence
from controlplane.alerts.outbox import LEASE, deliver_once
from controlplane.alerts.secrecy import masked
from controlplane.alerts.selectors import scopes_known, silences_active
from controlplane.diagnosis.models import Severity

CHANNELS_PER_TENANT_MAX = 50
SILENCES_PER_TENANT_MAX = 200
SILENCE_MAX = timedelta(days=30)
SCOPES_SHOWN_MAX = 20
REMIND_MINUTES_MAX = 7 * 24 * 60
NAME_CHARS_MAX, URL_CHARS_MAX, SECRET_CHARS_MAX, REASON_CHARS_MAX = 100, 1_000, 200, 300
FIELDS = ("name", "kind", "url", "secret", "severity_min", "remind_minutes", "enabled")


def channel_create(
    *, tenant: Tenant, spec: Mapping[str, Any], by: str, now: datetime
) -> tuple[Channel, str]:
    """The channel of `spec` (name and url, the other FIELDS if wanted) and the secret made for it.

    A secret is made where the kind signs with one of ours and none is given; this is the one time
    it is told, "" if none was made. Raises ChannelError naming the field and what is allowed.
    """
    kind = channels().get(str(spec.get("kind", "webhook")))
    made = kind.secret_new() if kind is not None and "secret" not in spec else ""
    channel = Channel(tenant=tenant, **_cleaned({"secret": made, **spec}, Channel()))
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=tenant.pk)
        own = Channel.objects.filter(tenant=tenant)
        if own.count() >= CHANNELS_PER_TENANT_MAX:
            raise _error("name", channel.name, _("%d channels") % CHANNELS_PER_TENANT_MAX)
        _name_check(channel)
        channel.save()
        _note(channel, "created", by, now, **_facts(channel))
    return channel, made


def channel_update(*, channel: Channel, spec: Mapping[str, Any], by: str, now: datetime) -> Channel:
    """Changes the given fields, all but the kind; raises ChannelError.

    What is still to be sent goes to the new address; switched off, it is not sent at all.
    """
    if spec.get("kind", channel.kind) != channel.kind:
        raise _error("kind", spec["kind"], _("%s, as it is; make another") % channel.kind)
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=channel.tenant_id)
        now_stored = Channel.objects.filter(pk=channel.pk).first()
        if now_stored is None:
            raise ChannelError("name", _("the channel was removed meanwhile"))
        channel = now_stored  # someone else may have changed it since it was read
        changed = _cleaned(spec, channel)
        for name, value in changed.items():
            setattr(channel, name, value)
        _name_check(channel)
        channel.save(update_fields=list(changed))
        if not channel.enabled:
            channel.deliveries.filter(state=Delivery.State.PENDING).update(
                state=Delivery.State.FAILED, last_error="the channel was switched off"
            )
        renewed = [key for key in ("url", "secret") if key in spec]
        _note(channel, "changed", by, now, **_facts(channel), renewed=renewed)
    return channel


def channel_remove(*, channel: Channel, by: str, now: datetime) -> None:
    """Deletes it, what was still to be sent there, and its log. Again: changes nothing."""
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=channel.tenant_id)
        if Channel.objects.filter(pk=channel.pk).delete()[0]:
            _note(channel, "removed", by, now, **_facts(channel))


def channel_test(*, channel: Channel, by: str, now: datetime) -> Delivery:
    """Sends a test at once, once; the row says what came of it. Takes up to SEND_WITHIN_S.

    One of a tenant at a time, as each holds a web thread. Raises ChannelError for another.
    """
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=channel.tenant_id)
        under_way = Delivery.objects.filter(
            tenant=channel.tenant_id, event=Delivery.Event.TEST, state=Delivery.State.PENDING,
            next_try_at__gt=now,
        )  # fmt: skip
        if under_way.exists():
            raise ChannelError("name", _("another test is on its way; wait for its answer"))
        delivery = Delivery.objects.create(
            tenant_id=channel.tenant_id,
            channel=channel,
            event=Delivery.Event.TEST,
            message=compose_test(channel, by=by, now=now),
            attempts=1,
            next_try_at=now + LEASE,
            created_at=now,
        )
    deliver_once(delivery, now)
    _note(channel, "tested", by, now, state=delivery.state)
    return delivery


def silence_create(*, tenant: Tenant, spec: Mapping[str, Any], by: str, now: datetime) -> Silence:
    """Keeps quiet about `spec`'s service, objective (slug) and engine until `until`.

    At least one of the three is wanted, each of something there is, a `reason`, and an end within
    30 days. Raises ChannelError.
    """
    scope = ("service", "objective", "engine")
    _known(spec, (*scope, "reason", "until"))
    until = spec.get("until")
    if not isinstance(until, datetime) or not now < until <= now + SILENCE_MAX:
        raise _error("until", str(until), _("a time within %d days from now") % SILENCE_MAX.days)
    silence = Silence(
        tenant=tenant,
        by=by,
        created_at=now,
        until=until,
        reason=_text(spec, "reason", REASON_CHARS_MAX),
        **{name: _text(spec, name, NAME_CHARS_MAX) for name in scope if spec.get(name)},
    )
    if not any(getattr(silence, name) for name in scope):
        words = _("at least one of %s; to hear of nothing, switch the channel off")
        raise ChannelError("service", words % ", ".join(scope))
    for name, known in scopes_known(tenant).items():
        if getattr(silence, name) and getattr(silence, name) not in known:
            shown = ", ".join(sorted(known)[:SCOPES_SHOWN_MAX]) or _("none yet")
            raise _error(name, getattr(silence, name), shown)
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=tenant.pk)
        if silences_active(tenant.pk, now).count() >= SILENCES_PER_TENANT_MAX:
            raise _error("service", silence.service, _("%d silences") % SILENCES_PER_TENANT_MAX)
        silence.save()
        detail = {name: getattr(silence, name) for name in (*scope, "reason", "until")}
        _note(silence, "created", by, now, **detail)
    return silence


def silence_end(*, silence: Silence, by: str, now: datetime) -> Silence:
    """Ends it now. What still burns is told at the next pass. Again: changes nothing."""
    live = Silence.objects.filter(pk=silence.pk, ended_at=None, until__gt=now)
    with transaction.atomic():
        if live.update(ended_at=now):
            _note(silence, "ended", by, now)
    silence.refresh_from_db()
    return silence


def _note(thing: Channel | Silence, verb: str, by: str, now: datetime, **detail: Any) -> None:
    audit.record(
        tenant=thing.tenant, actor=by, verb=verb, noun=type(thing).__name__.lower(),
        subject=str(thing), detail=detail, at=now,
    )  # fmt: skip


def _facts(channel: Channel) -> dict[str, Any]:
    shown = ("kind", "severity_min", "remind_minutes", "enabled")
    return {name: getattr(channel, name) for name in shown} | {"url": masked(channel.url)}


def _name_check(channel: Channel) -> None:
    others = Channel.objects.filter(tenant=channel.tenant_id).exclude(pk=channel.pk)
    if taken := others.filter(name=channel.name).first():
        words = _("name=%(name)r is taken, for %(url)s; remove it first")
        raise ChannelError("name", words % {"name": taken.name, "url": masked(taken.url)})


def _cleaned(spec: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
    """The given fields, and `channel`'s where a check needs them."""
    _known(spec, FIELDS)
    kind = spec.get("kind", channel.kind)
    if not isinstance(kind, str) or kind not in channels():
        raise _error("kind", kind, ", ".join(channels()))
    clean: dict[str, Any] = {"kind": kind}
    if "name" in spec or not channel.name:
        clean["name"] = _text(spec, "name", NAME_CHARS_MAX)
    given = {**spec, "url": spec.get("url", channel.url)}
    url = _text(given, "url", URL_CHARS_MAX, shown=False)
    secret = spec.get("secret", channel.secret)
    if not isinstance(secret, str) or len(secret) > SECRET_CHARS_MAX:
        raise ChannelError("secret", _("a text of at most %d characters") % SECRET_CHARS_MAX)
    channels()[kind].check(url=url, secret=secret)
    clean |= {"url": url, "secret": secret}
    if "severity_min" in spec:
        if spec["severity_min"] not in Severity.values:
            raise _error("severity_min", spec["severity_min"], ", ".join(Severity.values))
        clean["severity_min"] = spec["severity_min"]
    if "remind_minutes" in spec:
        clean["remind_minutes"] = _minutes(spec["remind_minutes"])
    if "enabled" in spec:
        if not isinstance(spec["enabled"], bool):
            raise _error("enabled", spec["enabled"], "true, false")
        clean["enabled"] = spec["enabled"]
    return clean


def _minutes(value: object) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 <= value <= REMIND_MINUTES_MAX:  # type: ignore[operator]
        allowed = _("0 (say it once) to %d") % REMIND_MINUTES_MAX
        raise _error("remind_minutes", value, allowed)
    return value  # type: ignore[return-value]


def _known(spec: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    for key in spec:
        if key not in fields:
            raise ChannelError(key, _("no such field, only %s") % ", ".join(fields))


def _text(spec: Mapping[str, Any], key: str, chars_max: int, *, shown: bool = True) -> str:
    value = spec.get(key)
    if isinstance(value, str) and 0 < len(value.strip()) <= chars_max:
        text = value.strip()
        if not any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
            return text
    allowed = _("a text of 1 to %d characters, no control characters") % chars_max
    if not shown:
        raise ChannelError(key, allowed)
    raise _error(key, value, allowed)


def _error(param: str, value: object, allowed: str) -> ChannelError:
    words = _("%(param)s=%(value)r: allowed: %(allowed)s")
    shown = value if len(repr(value)) <= URL_CHARS_MAX else f"{str(value)[:URL_CHARS_MAX]}…"
    return ChannelError(param, words % {"param": param, "value": shown, "allowed": allowed})
