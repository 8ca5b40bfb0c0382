from __future__ import annotations

import pytest

from controlplane import cli
from controlplane.accounts.services import tenant_create
from controlplane.alerts.models import Channel

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def a_tenant() -> None:
    tenant_create(slug="default", name="Default")


def add(name: str = "oncall", url: str = "http://alert-relay:8300/hook", *more: str) -> int:
    return cli.main(["channel", "add", "--name", name, "--url", url, *more])


def test_a_channel_is_added_listed_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    assert add() == 0
    made = Channel.objects.get()
    assert (made.name, made.kind, made.url, made.enabled) == (
        "oncall", "webhook", "http://alert-relay:8300/hook", True,
    )  # fmt: skip
    assert cli.main(["channel", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "CHANNEL  KIND     TELLS OF  STILL BURNING  ADDRESS",
        "oncall   webhook  all       every 60 min   http://alert-relay:8300/…",
    ]
    assert cli.main(["channel", "remove", "--name", "oncall"]) == 0
    assert not Channel.objects.exists()
    assert cli.main(["channel", "remove", "--name", "oncall"]) == 1
    assert "Known: none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("", "http://a.example/"), "wants --name"),
        (("oncall", "ftp://a.example/"), "an http or https address"),
        (("oncall", "http://[::1/"), "an http or https address"),
        (("oncall", "http://a.example:99999/"), "an http or https address"),
        (
            ("oncall", "http://a.example/", "--kind", "pigeon"),
            "allowed: dingtalk, feishu, slack, teams, webhook, wecom",
        ),
        (("oncall", "http://a.example/", "--tenant", "acme"), "Known: default"),
    ],
)
def test_what_could_never_deliver_is_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(*arguments) == 1
    assert words in capsys.readouterr().err
    assert not Channel.objects.exists()


def test_a_name_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert add() == 0
    assert add(url="http://b.example/") == 1
    assert "is taken, for http://alert-relay:8300/…" in capsys.readouterr().err
