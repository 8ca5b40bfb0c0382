"""The audit log: append-only, and a chain that shows where somebody tampered with it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import connection

from controlplane.accounts import audit
from controlplane.accounts.models import AuditEntry, AuditError, Tenant

pytestmark = pytest.mark.django_db
AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def write(tenant: Tenant, count: int) -> list[AuditEntry]:
    return [
        audit.record(
            tenant=tenant, actor="ada", verb="set", noun="policy", subject=f"engine e{n}",
            detail={"mode": "auto", "at": AT, "n": n, "ß": 0.1}, at=AT,
        )
        for n in range(count)
    ]  # fmt: skip


def tamper(sql: str) -> None:
    """Past the model, as somebody with the database open would."""
    with connection.cursor() as cursor:
        cursor.execute(sql)


def test_a_chain_nobody_touched_holds_read_back_from_the_database(tenant: Tenant) -> None:
    entries = write(tenant, 3)
    check = audit.verify(tenant)
    assert check.holds
    assert (check.entries, check.head) == (3, entries[-1].digest)
    assert entries[0].previous == audit.GENESIS
    assert entries[1].previous == entries[0].digest


def test_tenants_have_chains_of_their_own(tenant: Tenant) -> None:
    other = Tenant.objects.create(slug="other", name="Other")
    write(tenant, 2)
    assert write(other, 1)[0].number == 1
    assert audit.verify(tenant).entries == 2
    assert audit.audit_recent(other)[0].tenant == other


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("UPDATE accounts_auditentry SET actor = 'eve' WHERE number = 2", "entry 2 was changed"),
        ("UPDATE accounts_auditentry SET detail = '{}' WHERE number = 2", "entry 2 was changed"),
        ("DELETE FROM accounts_auditentry WHERE number = 2", "entry 2 is missing, 3 follows"),
        (
            "UPDATE accounts_auditentry SET previous = 'ab' WHERE number = 2",
            "entry 2 does not continue the one before it",
        ),
    ],
)
def test_what_was_tampered_with_is_found(tenant: Tenant, sql: str, words: str) -> None:
    write(tenant, 3)
    tamper(sql)
    check = audit.verify(tenant)
    assert not check.holds
    assert words in check.broken


def test_a_chain_that_was_cut_off_is_found_by_a_digest_kept_elsewhere(tenant: Tenant) -> None:
    entries = write(tenant, 3)
    tamper("DELETE FROM accounts_auditentry WHERE number = 3")
    assert audit.verify(tenant).holds
    assert "entries were cut off" in audit.verify(tenant, expect=entries[2].digest).broken
    assert audit.verify(tenant, expect=entries[1].digest).holds


def test_entries_are_never_changed_nor_deleted(tenant: Tenant) -> None:
    (entry,) = write(tenant, 1)
    entry.actor = "eve"
    with pytest.raises(AuditError, match="never changed"):
        entry.save()
    with pytest.raises(AuditError, match="never deleted"):
        entry.delete()
    with pytest.raises(AuditError, match="never changed"):
        AuditEntry.objects.update(actor="eve")
    with pytest.raises(AuditError, match="never deleted"):
        AuditEntry.objects.filter(tenant=tenant).delete()
