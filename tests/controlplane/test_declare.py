"""`trimtab objective` and `trimtab contract` against a live control plane."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from controlplane import cli
from controlplane.accounts.models import AuditEntry
from controlplane.accounts.services import tenant_create, token_create
from slo.models import Contract, Objective
from tests.slo.test_openslo import FILE as TEMPLATE

pytestmark = pytest.mark.django_db(transaction=True)
FILE = TEMPLATE.replace("2026-03-01", datetime.now(UTC).date().isoformat())


@pytest.fixture
def trimtab(
    live_server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs a command; returns its status, output and errors."""
    tenant = tenant_create(slug="acme", name="Acme")
    _, secret = token_create(tenant=tenant, kind="api", name="ci", scopes=["read", "write"])
    monkeypatch.setenv("TRIMTAB_API_TOKEN", secret)
    monkeypatch.setenv("TRIMTAB_PUBLIC_URL", live_server.url)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "promises.yaml"
    path.write_text(FILE)
    return path


def test_a_file_is_applied_told_field_by_field_and_then_is_no_change(
    trimtab: Any, file: Path
) -> None:
    status, out, err = trimtab("objective", "apply", "-f", str(file), "--dry-run")
    assert (status, err) == (0, "")
    assert "objective chat-ttft: created\n    slug" in out
    assert out.endswith("2 created. Dry run: nothing was written.\n")
    assert not Objective.objects.exists()
    assert not AuditEntry.objects.filter(noun="objective").exists()

    assert trimtab("objective", "apply", "-f", str(file))[1].endswith("\n2 created.\n")
    assert trimtab("objective", "apply", "-f", str(file))[1] == (
        "objective chat-ttft: unchanged\ncontract gold: unchanged\n2 unchanged.\n"
    )
    file.write_text(FILE.replace("500\n", "250\n").replace("percent: 5", "percent: 10"))
    assert trimtab("objective", "apply", "-f", str(file))[1] == (
        "objective chat-ttft: changed\n"
        "    spec.threshold_ms  500 → 250\n"
        "    What is counted changes: the readings so far are dropped.\n"
        "contract gold: changed\n"
        "    terms.percent  5 → 10\n"
        "2 changed.\n"
    )
    told = AuditEntry.objects.filter(noun="objective").values_list("actor", "verb")
    assert list(told) == [("token ci", "created"), ("token ci", "changed")]


def test_what_does_not_fit_is_told_by_file_line_and_field_and_nothing_is_written(
    trimtab: Any, file: Path
) -> None:
    file.write_text(FILE.replace("percent: 5", "percent: 500"))
    status, _, err = trimtab("objective", "apply", "-f", str(file))
    assert status == 1
    assert err == (
        f"trimtab objective: {file}:27: spec.penalty.percent: "
        "terms.percent=500: allowed: percent, 0 to 100\n"
    )
    file.write_text(FILE.replace("service: chat", "servce: chat"))
    status, _, err = trimtab("objective", "apply", "-f", str(file))
    assert (status, f"{file}:7: spec.servce: not supported" in err) == (1, True)
    assert trimtab("objective", "apply", "-f", "/nowhere")[2].startswith(
        "trimtab objective: cannot read /nowhere"
    )
    assert not Objective.objects.exists()


def test_get_prints_what_apply_takes(
    trimtab: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimtab("objective", "apply", "-f", str(file))
    text = trimtab("objective", "get", "chat-ttft")[1] + trimtab("contract", "get", "gold")[1]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert trimtab("objective", "apply", "-f", "-")[1].endswith("2 unchanged.\n")


def test_list_and_delete(trimtab: Any, file: Path) -> None:
    trimtab("objective", "apply", "-f", str(file))
    assert trimtab("objective", "list")[1] == (
        "OBJECTIVE  STATE    BUDGET LEFT  SERVICE  GOOD IS\n"
        "chat-ttft  no_data  no data      chat     time to first token ≤ 500 ms\n"
    )
    assert trimtab("contract", "list")[1].startswith(
        "CONTRACT  PER    PROVIDER  CONSUMER      OWED SO FAR\n"
        "gold      month  Platform  Order centre  "
    )
    status, _, err = trimtab("objective", "delete", "chat-ttft")
    assert (status, "Contracts promise chat-ttft: gold" in err) == (1, True)
    assert trimtab("contract", "delete", "gold")[1] == "Deleted contract gold.\n"
    assert trimtab("objective", "delete", "chat-ttft")[1] == "Deleted objective chat-ttft.\n"
    assert not Objective.objects.exists()
    assert not Contract.objects.exists()
    assert trimtab("contract", "list")[1] == (
        "No contract yet. Declare one: trimtab objective apply -f FILE\n"
    )
    status, _, err = trimtab("objective", "get", "chat-ttft")
    assert (status, err) == (1, "trimtab objective: No objective has the slug chat-ttft.\n")


def test_a_control_plane_that_is_not_there_is_told_so(
    trimtab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = trimtab("objective", "list", "--url", "http://127.0.0.1:1")
    assert status == 1
    assert "no control plane at http://127.0.0.1:1" in err
    monkeypatch.setenv("TRIMTAB_API_TOKEN", "tt_api_wrong")
    status, _, err = trimtab("objective", "list")
    assert (status, "bearer token is unknown" in err) == (1, True)
