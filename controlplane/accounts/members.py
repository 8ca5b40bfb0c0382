"""Writes of who belongs to a tenant: coming in, another role, a password, a pause, leaving.

Nobody is ever told somebody else's password: who is let in follows a link, which works once, and
chooses their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX
from django.contrib.auth.models import User
from django.contrib.auth.tokens import default_token_generator
from django.core.exceptions import ValidationError
from django.db import transaction
from django.urls import reverse
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_encode
from django.utils.translation import gettext as _

from controlplane.accounts import audit
from controlplane.accounts.models import Membership, Tenant

MEMBERS_PER_TENANT_MAX = 500
NAME_CHARS_MAX = 150


class MemberError(Exception):
    """What cannot be done to a member as things stand."""


class LastOwner(MemberError):
    """A tenant without an owner would be nobody's; or there is no such member any more."""


def member_add(*, tenant: Tenant, name: str, role: str, actor: str) -> Membership:
    """A new account's place in the tenant. It has no password until `password_link` is followed.

    An account that belongs nowhere any more is taken up anew: its old password opens nothing.
    Raises ValidationError naming `name` or `role`.
    """
    if role not in Membership.Role.values:
        words = _("role=%(given)s: allowed: %(allowed)s")
        allowed = ", ".join(Membership.Role.values)
        raise ValidationError({"role": words % {"given": role[:60], "allowed": allowed}})
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=tenant.pk)
        if Membership.objects.filter(tenant=tenant).count() >= MEMBERS_PER_TENANT_MAX:
            raise ValidationError({"name": _("%d members are the most.") % MEMBERS_PER_TENANT_MAX})
        member = Membership.objects.create(tenant=tenant, user=_account(name), role=role)
        _note(member, actor, "added", role=role)
    return member


def member_change(*, member: Membership, role: str, actor: str) -> None:
    """Gives the member another role. Raises LastOwner when no owner would be left."""
    with _owner_left(member, role):
        if member.role == role:
            return
        before, member.role = member.role, role
        member.save(update_fields=["role"])
        _note(member, actor, "changed", role=[before, role])


def member_deactivate(*, member: Membership, actor: str, now: datetime) -> None:
    """They see nothing of the tenant from their next click on, until `member_activate`. Links to
    choose a password that are still open do nothing meanwhile. Again: changes nothing.

    Raises LastOwner.
    """
    with _owner_left(member, None):
        here = Membership.objects.filter(pk=member.pk, deactivated_at=None)
        if here.update(deactivated_at=now):
            _note(member, actor, "deactivated", role=member.role)
    member.refresh_from_db(fields=["deactivated_at"])


def member_activate(*, member: Membership, actor: str) -> None:
    """Ends a pause. Again: changes nothing."""
    with transaction.atomic():
        paused = Membership.objects.filter(pk=member.pk).exclude(deactivated_at=None)
        if paused.update(deactivated_at=None):
            _note(member, actor, "activated", role=member.role)
    member.refresh_from_db(fields=["deactivated_at"])


def member_remove(*, member: Membership, actor: str) -> None:
    """Takes the person out of the tenant; the account stays. Raises LastOwner."""
    with _owner_left(member, None):
        member.delete()
        _note(member, actor, "removed", role=member.role)


def password_link(*, member: Membership, actor: str) -> str:
    """Where the member chooses a password: works once, and for PASSWORD_RESET_TIMEOUT seconds.

    What they sign in with stays good until then. Raises MemberError for a member who is
    deactivated, or belongs to another tenant too: whoever has the link has the whole account.
    """
    if member.deactivated_at is not None:
        raise MemberError(_("%s is deactivated: activate first.") % member.user.get_username())
    elsewhere = Membership.objects.filter(user=member.user_id).exclude(tenant=member.tenant_id)
    if elsewhere.exists():
        words = _("%s belongs to another tenant too, and changes the password alone.")
        raise MemberError(words % member.user.get_username())
    uid = urlsafe_base64_encode(force_bytes(member.user_id))
    token = default_token_generator.make_token(member.user)
    _note(member, actor, "gave a password link to")
    return f"{settings.TRIMTAB_PUBLIC_URL}{reverse('password-choose', args=[uid, token])}"


def password_changed(*, user: User, how: str) -> None:
    """Tells the audit log of every tenant the person belongs to; Django's form changes it."""
    for member in Membership.objects.filter(user=user).select_related("tenant", "user"):
        audit.record(
            tenant=member.tenant, actor=user.get_username(), verb="changed", noun="password",
            subject=user.get_username(), detail={"how": how},
        )  # fmt: skip


def _account(name: str) -> User:
    """A new account of that name, or one that belongs nowhere. Raises ValidationError."""
    accounts, name = get_user_model().objects, User.normalize_username(name)
    user = accounts.filter(username__iexact=name).first()
    if user is None:
        user = get_user_model()(username=name)
    elif Membership.objects.filter(user=user).exists():
        raise ValidationError({"name": _("The name %s is taken.") % user.get_username()})
    user.is_staff = user.is_superuser = False
    user.is_active = True
    user.set_unusable_password()
    try:
        user.full_clean(exclude=["password"])
    except ValidationError as error:
        raise ValidationError({"name": error.messages}) from None
    user.save()
    return user


@contextmanager
def _owner_left(member: Membership, role: str | None) -> Iterator[None]:
    """A transaction in which the tenant's members stand still, `member` as it is then.

    Who never chose a password is no owner to leave a tenant to: their link may end unused.
    """
    owner = Membership.Role.OWNER
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=member.tenant_id)
        stored = Membership.objects.filter(pk=member.pk).first()
        if stored is None:
            raise LastOwner(_("This person was taken out of the tenant meanwhile."))
        member.role, member.deactivated_at = stored.role, stored.deactivated_at
        owners = Membership.objects.filter(tenant=member.tenant_id, role=owner, deactivated_at=None)
        others = owners.exclude(pk=member.pk)
        others = others.exclude(user__password__startswith=UNUSABLE_PASSWORD_PREFIX)
        leaves = role != owner and member.role == owner and member.deactivated_at is None
        if leaves and not others.exists():
            words = _("A tenant needs an owner with a password: make somebody else one first.")
            raise LastOwner(words)
        yield


def _note(member: Membership, actor: str, verb: str, **detail: object) -> None:
    audit.record(
        tenant=member.tenant, actor=actor, verb=verb, noun="member",
        subject=member.user.get_username(), detail=detail,
    )  # fmt: skip
