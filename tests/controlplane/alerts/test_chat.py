"""Each chat service's wire format, spoken by a real HTTP server in its place."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from controlplane.alerts.channel import ChannelError, SendError, channels
from controlplane.alerts.chat import clipped, links_of, untold
from tests.controlplane.alerts.receiver import Receiver

TEAMS = (
    "https://prod-12.westeurope.logic.azure.com:443/workflows/0123abcd/triggers/manual/paths/"
    "invoke?api-version=2016-06-01&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0&sig=AbC_d-1"
)
URLS = {
    "slack": "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7",
    "teams": TEAMS,
    "feishu": "https://open.feishu.cn/open-apis/bot/v2/hook/f1975a0c-d1f0-4c2e-9a06-c0ffee",
    "dingtalk": f"https://oapi.dingtalk.com/robot/send?access_token={'0123abcd' * 8}",
    "wecom": "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=73febdcb-1b38-4d1b",
}
# What each says when it takes a message.
TAKEN: dict[str, tuple[int, str]] = {
    "slack": (200, "ok"),
    "teams": (202, ""),
    "feishu": (200, '{"code":0,"data":{},"msg":"success"}'),
    "dingtalk": (200, '{"errcode":0,"errmsg":"ok"}'),
    "wecom": (200, '{"errcode":0,"errmsg":"ok"}'),
}
WHAT = "184 of 412 requests missed “First token < 500 ms” on engine-0"
SAID = "31 requests wait behind a cap of 8. Proposes max_num_seqs from 8 to 32 on engine-0."
MESSAGE: dict[str, Any] = {
    "event": "incident.opened",
    "severity": "page",
    "title": WHAT,
    "what": f"{WHAT}.",
    "text": f"{WHAT}. {SAID}",
    "actions": {"approve": "https://trimtab.example/a/yes/", "reject": "https://t.example/a/no/"},
    "incident_url": "https://trimtab.example/incidents/1/",
    "trace_url": "",
}

BARE_LINKS = [
    "Approve: https://trimtab.example/a/yes/",
    "Reject: https://t.example/a/no/",
    "Trimtab: https://trimtab.example/incidents/1/",
]
LINKS = {
    "teams": [
        "[Approve](https://trimtab.example/a/yes/) · [Reject](https://t.example/a/no/) · "
        "[Trimtab](https://trimtab.example/incidents/1/)"
    ]
}


def send(slug: str, **more: Any) -> int:
    given = {"url": URLS[slug], "secret": "", "message": MESSAGE, "delivery_id": "d-1", **more}
    return channels()[slug].send(**given).status


def text_in(slug: str, body: Any) -> tuple[str, str]:
    """The title and the text a person sees."""
    if slug == "slack":
        (attachment,) = body["attachments"]
        return attachment["title"], attachment["text"]
    if slug == "teams":
        title, text = body["attachments"][0]["content"]["body"]
        return title["text"], text["text"]
    whole = body["content"]["text"] if slug == "feishu" else body["text"]["content"]
    title, _, text = whole.replace("\r\n", "\n").partition("\n")
    return title, text


@pytest.mark.parametrize("slug", URLS)
def test_a_message_reads_well_and_goes_where_the_address_says(
    slug: str, everywhere: Receiver
) -> None:
    status, answer = TAKEN[slug]
    everywhere.always(status, answer)
    assert send(slug) == status
    ((path, headers, body),) = everywhere.got
    wanted = urlsplit(URLS[slug])
    assert headers["Host"] == wanted.netloc.removesuffix(":443")
    assert path.partition("?")[0].rstrip("/") == wanted.path
    asked = parse_qs(path.partition("?")[2])
    assert asked == parse_qs(wanted.query)
    title, text = text_in(slug, body)
    assert re.sub("&lt;", "<", title) == "▲ " + MESSAGE["title"]
    said, _, links = text.replace("\r\n", "\n").partition("\n\n")
    assert said.strip() == SAID, "and not again what the title says"
    assert [line.strip() for line in links.splitlines()] == LINKS.get(slug, BARE_LINKS)
    assert "githubusercontent" not in json.dumps(body), "no picture from elsewhere"


@pytest.mark.parametrize(
    ("slug", "status", "answer", "permanent", "words"),
    [
        ("slack", 403, "invalid_token", True, "HTTP 403: invalid_token"),
        ("slack", 404, "no_service", True, "HTTP 404: no_service"),
        ("slack", 410, "channel_is_archived", True, "channel_is_archived"),
        ("slack", 500, "rollup_error", False, "rollup_error"),
        ("slack", 200, "<html>sign in</html>", False, "not Slack's answer"),
        ("teams", 401, '{"error":{"code":"DirectApiAuthorizationRequired"}}', True, "Direct"),
        ("teams", 502, "", False, "HTTP 502"),
        ("feishu", 200, '{"code":19024,"msg":"Key Words Not Found"}', True, "wants a keyword"),
        ("feishu", 200, '{"code":19021,"msg":"sign match fail"}', True, "code=19021: the sig"),
        ("feishu", 200, '{"code":11232,"msg":"frequency limited"}', False, "code=11232: {"),
        ("feishu", 400, '{"code":11232,"msg":"frequency limited"}', False, "code=11232: {"),
        ("feishu", 400, '{"code":9499,"msg":"Bad Request"}', True, "code=9499: the bot"),
        ("feishu", 403, "<html>", True, "HTTP 403: <html>"),
        ("feishu", 200, "<html>", False, "not Feishu's answer: <html>"),
        ("dingtalk", 200, '{"errcode":310000,"errmsg":"sign not match"}', True, "keyword, sig"),
        ("dingtalk", 200, '{"errcode":130101,"errmsg":"send too fast"}', False, "send too fast"),
        ("dingtalk", 200, '{"errcode":-1,"errmsg":"系统繁忙"}', False, "系统繁忙"),
        ("wecom", 200, '{"errcode":93000,"errmsg":"invalid webhook url"}', True, "is unknown"),
        ("wecom", 200, '{"errcode":45009,"errmsg":"api freq out of limit"}', False, "45009"),
        ("wecom", 200, "[]", False, "not WeCom's answer"),
    ],
)
def test_a_refusal_is_heard_and_judged(
    slug: str, status: int, answer: str, permanent: bool, words: str, everywhere: Receiver
) -> None:
    """Also where Apprise hears none: DingTalk and WeCom refuse with HTTP 200."""
    everywhere.always(status, answer)
    with pytest.raises(SendError) as caught:
        send(slug)
    assert words in caught.value.message
    assert (caught.value.permanent, caught.value.status) == (permanent, status)


@pytest.mark.parametrize("slug", ["slack", "teams"])
def test_the_wait_a_service_asks_for_is_kept(slug: str, everywhere: Receiver) -> None:
    everywhere.always(429, "rate_limited", Retry_After="30")
    with pytest.raises(SendError) as caught:
        send(slug)
    assert (caught.value.permanent, caught.value.retry_after_s) == (False, 30)


@pytest.mark.parametrize("slug", URLS)
def test_a_redirect_of_a_chat_service_is_not_followed(slug: str, everywhere: Receiver) -> None:
    everywhere.always(302, Location="https://elsewhere.example/")
    with pytest.raises(SendError, match="not followed") as caught:
        send(slug)
    assert caught.value.permanent
    assert len(everywhere.got) == 1


@pytest.mark.parametrize("slug", URLS)
def test_a_chat_service_out_of_reach_is_tried_again(slug: str, everywhere: Receiver) -> None:
    everywhere.shutdown()
    everywhere.server_close()
    with pytest.raises(SendError, match="ConnectError") as caught:
        send(slug)
    assert not caught.value.permanent


def test_dingtalk_is_signed_as_its_documentation_says(everywhere: Receiver) -> None:
    """Once escaped: the server reads the very base64, with its + and =."""
    everywhere.always(*TAKEN["dingtalk"])
    send("dingtalk", secret="SEC0123456789abcdef")
    asked = parse_qs(everywhere.got[0][0].partition("?")[2], strict_parsing=True)
    at = asked["timestamp"][0]
    digest = hmac.new(b"SEC0123456789abcdef", f"{at}\nSEC0123456789abcdef".encode(), hashlib.sha256)
    assert asked["sign"] == [base64.b64encode(digest.digest()).decode()]
    assert len(at) == 13, "milliseconds"


def test_feishu_is_signed_as_its_documentation_says(everywhere: Receiver) -> None:
    everywhere.always(*TAKEN["feishu"])
    send("feishu", secret="zs0T")
    body = everywhere.got[0][2]
    key = f"{body['timestamp']}\nzs0T".encode()
    assert body["sign"] == base64.b64encode(hmac.new(key, b"", hashlib.sha256).digest()).decode()
    assert len(body["timestamp"]) == 10, "seconds"
    assert body["msg_type"] == "text"


@pytest.mark.parametrize("slug", URLS)
def test_a_long_message_is_shortened_and_keeps_its_links(slug: str, everywhere: Receiver) -> None:
    everywhere.always(*TAKEN[slug])
    send(slug, message=MESSAGE | {"text": "高负载。" * 10_000})
    ((_, _, body),) = everywhere.got
    assert len(everywhere.got) == 1
    title, text = text_in(slug, body)
    limits = {"slack": 8_000, "teams": 28_000, "feishu": 20_000, "dingtalk": 20_000, "wecom": 2_048}
    assert len((title + text).encode()) <= limits[slug]
    assert text.rstrip(")\n").endswith("https://trimtab.example/incidents/1/")
    assert "…" in text


@pytest.mark.parametrize("slug", ["feishu", "teams"])
def test_a_name_calls_nobody(slug: str, everywhere: Receiver) -> None:
    everywhere.always(*TAKEN[slug])
    send(slug, message=MESSAGE | {"text": 'missed “<at user_id="all">x</at>”'})
    assert "<at" not in text_in(slug, everywhere.got[0][2])[1]


def test_a_name_sets_no_type_in_teams(everywhere: Receiver) -> None:
    everywhere.always(*TAKEN["teams"])
    send("teams", message=MESSAGE | {"title": "a *b* [c](d) max_num_seqs _e_"})
    title, _ = text_in("teams", everywhere.got[0][2])
    assert title == r"▲ a \*b\* \[c\](d) max_num_seqs \_e\_"


def test_slack_calls_nobody_either(everywhere: Receiver) -> None:
    everywhere.always(*TAKEN["slack"])
    send("slack", message=MESSAGE | {"title": "<!channel>", "text": "<!channel>"})
    assert "<!channel>" not in "".join(text_in("slack", everywhere.got[0][2]))


def test_an_end_and_a_question_are_marked(everywhere: Receiver) -> None:
    everywhere.always(*TAKEN["wecom"])
    for event in ("incident.resolved", "incident.asked", "channel.test"):
        send("wecom", message=MESSAGE | {"event": event, "title": "T"})
    seen = [text_in("wecom", body)[0] for _, _, body in everywhere.got]
    assert seen == ["● T", "◆ T", "T"]


@pytest.mark.parametrize("slug", URLS)
def test_another_services_address_is_refused_with_an_example(slug: str) -> None:
    channels()[slug].check(url=URLS[slug], secret="")
    for other, url in URLS.items():
        if other != slug:
            with pytest.raises(ChannelError, match="wanted: an address like https://") as caught:
                channels()[slug].check(url=url, secret="")
            assert caught.value.param == "url"
    with pytest.raises(ChannelError):
        channels()[slug].check(url="http://127.0.0.1:8300/", secret="")


def test_a_secret_is_refused_where_nothing_can_be_signed() -> None:
    with pytest.raises(ChannelError, match="Slack cannot sign") as caught:
        channels()["slack"].check(url=URLS["slack"], secret="s")
    assert caught.value.param == "secret"


def test_what_the_title_does_not_say_stays() -> None:
    over = MESSAGE | {"title": "Over after 12 minutes: “First token” on engine-0"}
    assert untold(over) == MESSAGE["text"]
    assert untold(MESSAGE | {"title": f"Still burning after 2 minutes: {WHAT}"}) == SAID
    assert untold(MESSAGE | {"text": f"{WHAT}."}) == f"{WHAT}."


def test_text_is_clipped_between_characters() -> None:
    assert clipped("负载", 6) == "负载"
    assert clipped("负载高", 8) == "负…"
    assert clipped("abc", 0) == "…"


def test_an_unknown_deed_is_still_a_link() -> None:
    assert links_of(MESSAGE | {"actions": {"pause": "https://x/"}})[0] == ("pause", "https://x/")
