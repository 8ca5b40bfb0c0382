"""Settings: the audit log, what it says and whether its chain holds."""

from __future__ import annotations

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.accounts import audit
from controlplane.accounts.models import AuditEntry, Tenant
from controlplane.web.pages import settings_audit
from tests.controlplane.web.answers import text
from tests.controlplane.web.furnished import furnish
from tests.controlplane.web.world import World


def test_the_audit_log_says_whether_its_chain_holds(owner: Client, full: World) -> None:
    furnish(full)
    said = text(owner.get("/settings/audit/"))
    assert "The chain holds." in said
    assert audit.verify(full.tenant).head in said
    narrowed = text(owner.get("/settings/audit/?noun=token&actor=ada"))
    assert narrowed.count("<tr data-row") == AuditEntry.objects.filter(noun="token").count() == 4
    assert "No entry fits." in text(owner.get("/settings/audit/?subject=nobody"))
    assert "allowed:" in text(owner.get("/settings/audit/?after=1"), 400)
    super(type(AuditEntry.objects.all()), AuditEntry.objects.filter(number=2)).update(actor="eve")
    said = text(owner.get("/settings/audit/"))
    assert "The chain is broken." in said
    assert "entry 2 was changed" in said


def test_the_audit_log_calls_an_action_by_its_change(owner: Client, full: World) -> None:
    action = full.tenant.actions.first()
    assert action is not None
    audit.record(
        tenant=full.tenant, actor="ada", verb="used", noun="link", subject=str(action.pk),
        detail={"what": str(action), "link": "approve"},
    )  # fmt: skip
    said = text(owner.get(f"/settings/audit/?subject={action.pk}"))
    assert f"used link <code>{action}</code>" in said
    assert f"<dt>id</dt><dd>{action.pk}</dd><dt>link</dt><dd>approve</dd>" in said
    assert f"<code>{action.pk}" not in said


def test_the_audit_log_calls_a_step_as_the_actions_own_page_does(
    owner: Client, full: World
) -> None:
    action = full.tenant.actions.first()
    assert action is not None
    for verb in ("verified", "rolled_back", "cleared"):
        audit.record(
            tenant=full.tenant, actor="agent", verb=verb, noun="action", subject=str(action.pk),
            detail={"what": str(action)},
        )  # fmt: skip
    said = text(owner.get("/settings/audit/?noun=action&actor=agent"))
    for words in ("kept", "rolled back", "cleared"):
        assert f">{words} action <code>{action}</code>" in said


def test_a_long_chain_is_checked_when_asked_to(
    owner: Client, full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(full)
    monkeypatch.setattr(settings_audit, "CHECKED_AT_ONCE_MAX", 3)
    assert "Check the whole chain" in text(owner.get("/settings/audit/"))
    assert "The chain holds." in text(owner.get("/settings/audit/?check=1"))


def test_a_long_chain_is_not_read_again_and_again(
    owner: Client, full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(full)
    monkeypatch.setattr(settings_audit, "CHECKED_AT_ONCE_MAX", 3)
    read: list[Tenant] = []
    real = audit.verify

    def counted(tenant: Tenant, **options: str) -> audit.Check:
        read.append(tenant)
        return real(tenant, **options)

    monkeypatch.setattr(audit, "verify", counted)
    for _ in range(3):
        assert "Checked <time" in text(owner.get("/settings/audit/?check=1"))
    assert read == [full.tenant]
    later = timezone.now() + audit.CHECK_EVERY
    assert audit.verify_seldom(full.tenant, later)
    assert len(read) == 2
    # While one reads, another is told to come back.
    audit._checking.add(full.tenant.pk)
    try:
        assert audit.verify_seldom(full.tenant, later + audit.CHECK_EVERY) is None
        monkeypatch.setattr(audit, "_checks", {})
        assert "checked for somebody else" in text(owner.get("/settings/audit/?check=1"))
    finally:
        audit._checking.clear()
    assert len(read) == 2
