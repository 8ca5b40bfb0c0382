from __future__ import annotations

import io

import pytest

from controlplane import cli
from controlplane.accounts.services import tenant_create
from controlplane.alerts.models import Channel, Silence
from slo.models import Objective
from tests.controlplane.alerts.conftest import receiver
from tests.controlplane.alerts.receiver import Receiver

pytestmark = pytest.mark.django_db
__all__ = ["receiver"]  # the fixture


@pytest.fixture(autouse=True)
def a_service() -> None:
    tenant = tenant_create(slug="default", name="Default")
    Objective.objects.create(tenant=tenant, slug="ttft", service="chat", target=0.9)


def add(*arguments: str) -> int:
    return cli.main(["silence", "add", *arguments])


def test_a_silence_is_added_listed_and_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert add("--service", "chat", "--for", "2h", "--reason", "moving racks") == 0
    made = Silence.objects.get()
    assert (made.until - made.created_at).total_seconds() == 7_200
    assert made.by.endswith(" at the command line")
    short = str(made.pk)[:8]
    assert f"trimtab silence end --id {short}" in capsys.readouterr().out
    assert cli.main(["silence", "list"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.startswith("SILENCE   OF WHAT  ")
    assert row.startswith(f"{short}  chat until ")
    assert row.endswith("  moving racks")
    assert cli.main(["silence", "end", "--id", short]) == 0
    assert cli.main(["silence", "list"]) == 0
    assert capsys.readouterr().out.endswith("Nobody is kept from hearing anything.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--service", "chat", "--for", "2 hours", "--reason", "r"), "30m, 8h, 7d"),
        (("--service", "chat", "--for", "31d", "--reason", "r"), "within 30 days"),
        (("--service", "chat", "--for", "1h", "--reason", ""), "reason=''"),
        (("--service", "chats", "--for", "1h", "--reason", "r"), "service='chats': allowed: chat"),
        (("--for", "1h", "--reason", "r"), "at least one of service, objective, engine"),
    ],
)
def test_a_silence_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(*arguments) == 1
    assert words in capsys.readouterr().err
    assert not Silence.objects.exists()


def test_an_end_wants_one_silence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["silence", "end", "--id", ""]) == 1
    assert "names 0 silences" in capsys.readouterr().err


def test_a_channel_is_tested_and_its_address_read_from_standard_input(
    receiver: Receiver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address on the command line is read by everyone who can list processes."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{receiver.url}\n"))
    assert cli.main(["channel", "add", "--name", "oncall", "--url", "-"]) == 0
    assert Channel.objects.get().url == receiver.url
    assert "whsec_" in capsys.readouterr().out
    assert cli.main(["channel", "test", "--name", "oncall"]) == 0
    assert capsys.readouterr().out == "oncall took it: HTTP 200.\n"
    receiver.always(410, "gone")
    assert cli.main(["channel", "test", "--name", "oncall"]) == 1
    assert "oncall did not take it (for good): HTTP 410: gone" in capsys.readouterr().err
