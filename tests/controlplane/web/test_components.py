"""/ui/: for staff, and complete: every state that a page can show is on it."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.actions.models import State
from controlplane.diagnosis.models import Severity
from controlplane.web.templatetags.ui import STATES
from tests.controlplane.web.world import World, member


@pytest.fixture
def said(client: Any, empty: World) -> str:
    client.force_login(member(empty.tenant, staff=True))
    answer = client.get("/ui/")
    assert answer.status_code == 200
    return str(answer.content.decode())


@pytest.mark.parametrize("address", ["/ui/", "/ui/series/"])
def test_only_staff_sees_the_components(ada: Any, empty: World, address: str) -> None:
    answer = ada(empty).get(address)
    assert answer.status_code == 403
    assert "This page is for staff" in answer.content.decode()


def test_every_state_is_shown(said: str) -> None:
    for kind, word in STATES.values():
        assert f'<span class="chip {kind}">{word}</span>' in said
    assert said.count('<article class="action"') == len(State.values)
    assert said.count('<svg class="budget"') >= 7
    for severity in Severity.values:
        assert f"</span>{severity}</span>" in said
    for story in ("bad", "act", "ok", "warn"):
        assert f'<section class="story {story}"' in said or f'<p class="story {story}"' in said


def test_a_picture_of_it_is_the_same_tomorrow(client: Any, said: str) -> None:
    again = client.get("/ui/").content.decode()
    without_token = [
        [line for line in text.splitlines() if "csrfmiddlewaretoken" not in line]
        for text in (said, again)
    ]
    assert without_token[0] == without_token[1]
    assert client.get("/ui/series/").json()["charts"].keys() == {"latency", "load", "empty"}
