"""The audit log: who did what, in a chain that shows where somebody tampered with it.

Each entry's digest is SHA-256 over the digest before it and the entry as canonical JSON, so whoever
changes, removes or slips in a row breaks every digest from there on. A chain cannot show that its
newest entries were cut off: keep a digest elsewhere and hand it to `verify`. It is logged with
every entry for that purpose. The model refuses updates and deletes (there is no database trigger:
it would stand in the way of restoring a backup, and who may drop rows may drop triggers).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from rest_framework.request import Request

from controlplane.accounts.models import AuditEntry, Tenant, Token

log = logging.getLogger(__name__)

GENESIS = "0" * 64
ACTOR_CHARS_MAX = SUBJECT_CHARS_MAX = 200
RECENT_MAX = 500
CHECK_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class Check:
    """What became of reading the whole chain; `broken` is empty when it holds."""

    entries: int
    head: str
    broken: str = ""

    @property
    def holds(self) -> bool:
        return not self.broken


# Tenant → what became of the last whole check and when, kept in this process.
_checks: dict[UUID, tuple[Check, datetime]] = {}
_checking: set[UUID] = set()
_lock = threading.Lock()


def record(
    *,
    tenant: Tenant,
    actor: str,
    verb: str,
    noun: str,
    subject: str,
    detail: Mapping[str, Any] | None = None,
    at: datetime | None = None,
) -> AuditEntry:
    """Appends what `actor` did to the tenant's chain, in the caller's transaction if there is one.

    `detail` is kept as JSON; what JSON does not know is kept as its text. Never hand in a secret.
    """
    with transaction.atomic():
        # The lock on the tenant keeps two writers from continuing the same digest.
        Tenant.objects.select_for_update().get(pk=tenant.pk)
        last = AuditEntry.objects.filter(tenant=tenant).order_by("-number").first()
        entry = AuditEntry(
            tenant=tenant,
            number=last.number + 1 if last else 1,
            at=at or timezone.now(),
            actor=actor[:ACTOR_CHARS_MAX],
            verb=verb,
            noun=noun,
            subject=subject[:SUBJECT_CHARS_MAX],
            detail=json.loads(json.dumps(dict(detail or {}), default=str)),
            previous=last.digest if last else GENESIS,
        )
        entry.digest = digest(entry)
        entry.save(force_insert=True)
    log.info("audit %s %s %s", tenant, entry, entry.digest)
    return entry


def digest(entry: AuditEntry) -> str:
    """SHA-256 over the previous digest and the entry as canonical JSON."""
    facts = {
        "tenant": str(entry.tenant_id),
        "number": entry.number,
        "at": entry.at.astimezone(UTC).isoformat(timespec="microseconds"),
        "actor": entry.actor,
        "verb": entry.verb,
        "noun": entry.noun,
        "subject": entry.subject,
        "detail": entry.detail,
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(f"{entry.previous}{canonical}".encode()).hexdigest()


def verify(tenant: Tenant, *, expect: str = "") -> Check:
    """Reads the whole chain, oldest first. With `expect`, that digest has to be in it."""
    previous, count, seen = GENESIS, 0, not expect
    for entry in AuditEntry.objects.filter(tenant=tenant).order_by("number").iterator():
        count += 1
        if entry.number != count:
            return Check(count - 1, previous, f"entry {count} is missing, {entry.number} follows")
        if entry.previous != previous:
            return Check(count - 1, previous, f"entry {count} does not continue the one before it")
        if entry.digest != digest(entry):
            return Check(count - 1, previous, f"entry {count} was changed: {entry}")
        previous = entry.digest
        seen = seen or previous == expect
    broken = "" if seen else f"no entry has the digest {expect}: entries were cut off"
    return Check(count, previous, broken)


def verify_seldom(tenant: Tenant, now: datetime) -> tuple[Check, datetime] | None:
    """`verify` and when it was done: a minute ago at most, by whoever asked then, so that looking
    at a page does not read a long chain again and again. None while somebody else is reading it.
    """
    with _lock:
        kept = _checks.get(tenant.pk)
        if kept is not None and now - kept[1] < CHECK_EVERY:
            return kept
        if tenant.pk in _checking:
            return None
        _checking.add(tenant.pk)
    try:
        kept = verify(tenant), now
        _checks[tenant.pk] = kept
    finally:
        _checking.discard(tenant.pk)
    return kept


def actor_of(request: Request) -> str:
    """Who makes this request, as the audit log names them: a person, or a token by its name."""
    if isinstance(request.auth, Token):
        return f"token {request.auth.name}"
    return str(request.user.get_username()) if request.user else "nobody"


def audit_all(tenant: Tenant) -> QuerySet[AuditEntry]:
    """Newest first, for the caller to narrow and page."""
    return AuditEntry.objects.filter(tenant=tenant).order_by("-number")


def audit_recent(tenant: Tenant, limit: int = 50) -> list[AuditEntry]:
    """Newest first; at most RECENT_MAX."""
    return list(audit_all(tenant)[: min(limit, RECENT_MAX)])
