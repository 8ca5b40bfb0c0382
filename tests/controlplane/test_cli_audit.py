from __future__ import annotations

import pytest
from django.db import connection

from controlplane import cli
from controlplane.accounts import audit
from controlplane.accounts.services import tenant_create

pytestmark = pytest.mark.django_db


def test_the_chain_is_checked_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    tenant = tenant_create(slug="default", name="Default")
    entries = [
        audit.record(tenant=tenant, actor="ada", verb="set", noun="policy", subject=f"engine e{n}")
        for n in range(2)
    ]
    assert cli.main(["audit", "verify"]) == 0
    said = capsys.readouterr().out
    assert said == f"2 entries, the chain holds. Newest digest: {entries[1].digest}\n"
    assert cli.main(["audit", "list"]) == 0
    assert "1. ada: set policy engine e0" in capsys.readouterr().out
    named = {"what": "max_num_seqs 8 → 32 on engine-0"}
    audit.record(tenant=tenant, actor="ada", verb="set", noun="action", subject="5", detail=named)
    assert cli.main(["audit", "list"]) == 0
    assert "3. ada: set action max_num_seqs 8 → 32 on engine-0" in capsys.readouterr().out
    assert cli.main(["audit", "verify", "--expect", "0" * 64]) == 1
    assert "entries were cut off" in capsys.readouterr().err
    with connection.cursor() as cursor:
        cursor.execute("UPDATE accounts_auditentry SET actor = 'eve' WHERE number = 1")
    assert cli.main(["audit", "verify"]) == 1
    assert "does not hold after 0 entries: entry 1 was changed" in capsys.readouterr().err
