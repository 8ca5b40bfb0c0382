from __future__ import annotations

import pytest

from controlplane import cli
from controlplane.accounts.models import Token
from controlplane.accounts.services import tenant_create

pytestmark = pytest.mark.django_db


def test_a_token_is_made_listed_under_a_heading_and_revoked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tenant_create(slug="default", name="Default")
    assert cli.main(["token", "list"]) == 0
    assert capsys.readouterr().out == "No token yet. Make one: trimtab token create --help\n"
    assert cli.main(["token", "create", "--kind", "api", "--scope", "read", "--name", "ci"]) == 0
    said = capsys.readouterr()
    made = Token.objects.get()
    assert said.out.startswith(made.prefix)
    assert said.err == "api token 'ci'; shown this once.\n"
    assert cli.main(["token", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "TOKEN         KIND  NAME  SCOPES  LAST USED (UTC)",
        f"{made.prefix}…  api   ci    read    never",
    ]
    # As it was copied from the list.
    assert cli.main(["token", "revoke", "--prefix", f"{made.prefix}…"]) == 0
    cli.main(["token", "list"])
    assert capsys.readouterr().out.endswith("  revoked\n")
    assert cli.main(["token", "revoke", "--prefix", made.prefix]) == 1
    assert "names 0 live tokens" in capsys.readouterr().err


def test_what_a_token_opens_is_never_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["token", "create"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--kind {ingest,agent,api}" in said
    assert "required: --kind" in said
    assert not Token.objects.exists()
