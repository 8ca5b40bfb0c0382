"""English and Chinese: chosen by the browser, then by the person, kept by a cookie."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.utils import translation

from controlplane.web.templatetags.prose import prose, reason
from controlplane.web.templatetags.ui import duration
from tests.catalogues import compile_all
from tests.controlplane.web.answers import text
from tests.controlplane.web.story import BECAUSE
from tests.controlplane.web.world import World

# Written down by the loop or by a person, or a term of the field in an indicator's own words.
STORED = (
    BECAUSE,
    "time to first token",
    "First token within 500 ms",
    "Each token within 50 ms",
    "Requests answered",
    "Whole answer within 10 s",
)
CHINESE = {"HTTP_ACCEPT_LANGUAGE": "zh-CN,zh;q=0.9"}


@pytest.fixture(scope="module", autouse=True)
def catalogues() -> None:
    compile_all()


def test_a_browser_that_prefers_chinese_gets_chinese(ada: Any, full: World) -> None:
    said = text(ada(full).get("/", **CHINESE))
    assert '<html lang="zh-hans">' in said
    for words in ("概览", "错误预算", "处置中", "请求未达到该目标"):
        assert words in said
    # What was measured and told is stored, and stays as it was said.
    assert "31 requests wait behind a cap of 8 running" in said


def test_a_person_switches_and_stays(client: Client, ada: Any, empty: World) -> None:
    ada(empty)
    assert '<html lang="en">' in text(client.get("/objectives/"))
    answer = client.post("/language/", {"language": "zh-hans", "next": "/objectives/?x=1"})
    assert answer["Location"] == "/objectives/?x=1"
    assert client.cookies["language"]["samesite"] == "Lax"
    said = text(client.get("/objectives/"))
    assert '<html lang="zh-hans">' in said
    assert re.search(r'value="zh-hans" lang="zh-hans" aria-current="true">简体中文<', said)
    assert ">English</button>" in said  # for someone who came here by mistake
    client.post("/language/", {"language": "en", "next": "/"})
    assert '<html lang="en">' in text(client.get("/objectives/", **CHINESE))


def test_the_switch_leads_nowhere_else(client: Client, db: None) -> None:
    answer = client.post("/language/", {"language": "zh-hans", "next": "https://evil.example/"})
    assert answer["Location"] == "/"
    assert "sessionid" not in client.cookies


@pytest.mark.parametrize(
    "address",
    ["/", "/objectives/ttft/", "/incidents/", "/traces/", "/fleet/?measure=running", "/policies/",
     "/policies/edit/", "/policies/edit/?engine=engine-0", "/settings/channels/",
     "/settings/silences/", "/settings/tokens/", "/settings/members/", "/settings/password/"],
)  # fmt: skip
def test_no_english_is_left_in_chinese_pages(ada: Any, full: World, address: str) -> None:
    """Words of the field, names, commands and what is stored may stay; English sentences not."""
    said = text(ada(full).get(address, **CHINESE))
    main = said.partition("<main")[2]
    shown = re.sub(r"<(pre|code|svg|script)\b.*?</\1>|<[^>]+>", " ", main, flags=re.S)
    for stored in STORED:
        shown = shown.replace(prose(stored), "")
    leftover = re.findall(r"\b(?:the|of|is|are|was|and|no|not|with|for|to)\b", shown)
    assert leftover == [], shown


def test_durations_and_reasons_speak_the_language() -> None:
    class Told:
        because, cause = "load beyond capacity", "load_beyond_capacity"

    with translation.override("zh-hans"):
        assert duration(4 * 3600 + 12 * 60) == "4\u00a0小时 12\u00a0分"
        assert "因为" in reason(Told())  # type: ignore[arg-type]
