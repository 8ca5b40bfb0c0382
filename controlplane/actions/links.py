"""Links in chat messages for what may be done to an action: signed, for one use, for one hour.

Whoever has the link may use it without signing in: it is for the phone at night. So it can do one
thing to one action, ends soon, and works once; opening it only asks, as mail scanners and chat
previews open every link. Who used it is asked for and told to the audit log, with the address it
came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core import signing
from django.db import IntegrityError, transaction
from django.urls import reverse
from django.utils.translation import gettext as _

from controlplane.accounts import audit
from controlplane.actions.models import Action, LinkUse, Mode, State
from controlplane.actions.orders import (
    action_approve,
    action_clear,
    action_reject,
    action_rollback,
    verbs_open,
)
from controlplane.actions.policy import rules_of

LIFE = timedelta(hours=1)
TOKEN_CHARS_MAX = 200
ACTOR_CHARS_MAX = 60
ADDRESS_CHARS_MAX = 60

VERBS: dict[str, Callable[..., Action]] = {
    "approve": action_approve,
    "reject": action_reject,
    "rollback": action_rollback,
    "clear": action_clear,
}
_signer = signing.Signer(salt="controlplane.actions.links")


class LinkError(Exception):
    """Why a link does nothing, in the language of who opened it. `kind`: foreign, expired, used."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Link:
    verb: str
    action: Action
    expires_at: datetime
    digest: str


def links_of(action: Action, now: datetime) -> dict[str, str]:
    """Verb → address, for what a person may do with the action now.

    A proposal under `propose` stands on the page and asks nobody.
    """
    verbs = verbs_open(action)
    if action.state == State.PROPOSED and rules_of(action.engine).mode == Mode.PROPOSE:
        verbs = ()
    return {verb: f"{settings.TRIMTAB_PUBLIC_URL}{link_path(action, verb, now)}" for verb in verbs}


def link_path(action: Action, verb: str, now: datetime) -> str:
    assert verb in VERBS
    expires = int((now + LIFE).timestamp())
    return reverse("action-link", args=[_signer.sign(f"{verb}.{action.pk.hex}.{expires}")])


def link_open(token: str, now: datetime) -> Link:
    """What the link would do. Changes nothing. Raises LinkError."""
    foreign = _("this link was not made here, or it was cut short or changed on its way")
    try:
        if len(token) > TOKEN_CHARS_MAX:
            raise signing.BadSignature
        verb, action_id, expires = _signer.unsign(token).split(".")
        action = Action.objects.select_related("engine", "tenant", "incident").get(
            pk=UUID(action_id)
        )
        expires_at = datetime.fromtimestamp(int(expires), UTC)
    except (signing.BadSignature, ValueError, Action.DoesNotExist):
        raise LinkError("foreign", foreign) from None
    link = Link(verb, action, expires_at, hashlib.sha256(token.encode()).hexdigest())
    used = LinkUse.objects.filter(digest=link.digest).first()
    if used is not None:
        when = f"{used.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        told = _("this link was used at %(when)s by %(actor)s")
        raise LinkError("used", told % {"when": when, "actor": used.actor})
    if now > expires_at:
        told = _("this link ended at %(when)s")
        raise LinkError("expired", told % {"when": f"{expires_at:%Y-%m-%d %H:%M:%S} UTC"})
    return link


def link_use(
    token: str, *, actor: str, now: datetime, signed_in: bool, seen: Mapping[str, Any]
) -> Action:
    """Does what the link says, once. `seen` (address, browser) goes to the audit log.

    Raises LinkError, or OrderError when the action cannot do that any more; the link stays good
    then, and nothing is done.
    """
    link = link_open(token, now)
    actor = f"{actor[:ACTOR_CHARS_MAX]}, {'signed in' if signed_in else 'not signed in'}, by link"
    with transaction.atomic():
        try:
            with transaction.atomic():
                LinkUse.objects.create(
                    digest=link.digest, action=link.action, verb=link.verb, actor=actor, at=now
                )
        except IntegrityError:
            raise LinkError("used", _("this link was used a moment ago")) from None
        audit.record(
            tenant=link.action.tenant, actor=actor, verb="used", noun="link",
            subject=str(link.action.pk),
            detail={"what": str(link.action), "link": link.verb, "digest": link.digest, **seen},
            at=now,
        )  # fmt: skip
        return VERBS[link.verb](action=link.action, actor=actor, now=now)
