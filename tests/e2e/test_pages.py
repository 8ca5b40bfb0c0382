"""Every page there is, looked at: light and dark, wide and narrow, English and Chinese; full,
empty, stale and in error. The photographs are in shots/."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.controlplane.web.world import TRACE_ID
from tests.e2e.site import Site, beside
from tests.e2e.visit import NARROW, WIDE, Visit

pytestmark = pytest.mark.browser


def paths(site: Site) -> dict[str, str]:
    return {
        "fleet-measure": "/fleet/?measure=running",  # while what was measured is fresh
        "overview": "/",
        "objectives": "/objectives/",
        "objective": "/objectives/ttft/",
        "objective-no-data": "/objectives/code-e2e/",
        "objective-stale": "/objectives/code-ttft/",
        "incidents": "/incidents/",
        "incident": f"/incidents/{site.things['incident']}/",
        "traces": "/traces/",
        "traces-slowest": "/traces/?status=failed&sort=slowest",
        "traces-none-fit": "/traces/?q=no-such-request",
        "traces-error": "/traces/?max_ms=soon",
        "trace": f"/traces/{TRACE_ID}/",
        "fleet": "/fleet/",
        "node": "/fleet/node-a/",
        "node-lost": "/fleet/node-b/",
        "node-stopped": "/fleet/node-c/",
        "actions": "/actions/",
        "actions-none-fit": "/actions/?state=failed",
        "actions-error": "/actions/?state=happy",
        "action-new": "/actions/new/",
        "policies": "/policies/",
        "policy": "/policies/edit/",
        "policy-service-frozen": "/policies/edit/?service=code",
        "policy-engine": "/policies/edit/?engine=engine-0",
        "contracts": "/contracts/",
        "contract": "/contracts/chat-gold/",
        "channels": "/settings/channels/",
        "channel": f"/settings/channels/{site.things['channel']}/",
        "deliveries": "/settings/deliveries/",
        "deliveries-none-fit": "/settings/deliveries/?state=pending",
        "silences": "/settings/silences/",
        "tokens": "/settings/tokens/",
        "members": "/settings/members/",
        "password": "/settings/password/",
        "audit": "/settings/audit/",
        "audit-error": "/settings/audit/?after=nowhere",
        "reference": "/api/v1/",
        "ui": "/ui/",
    }


EMPTY = {
    "first-run": "/",
    "no-objectives": "/objectives/",
    "no-incidents": "/incidents/",
    "no-traces": "/traces/",
    "no-fleet": "/fleet/",
    "no-actions": "/actions/",
    "no-policies": "/policies/",
    "no-contracts": "/contracts/",
    "no-channels": "/settings/channels/",
    "no-deliveries": "/settings/deliveries/",
    "no-silences": "/settings/silences/",
    "no-tokens": "/settings/tokens/",
    "no-audit": "/settings/audit/",
}


# A language changes words and widths, not colours: one theme each will do.
LOOKS = [
    (WIDE, "en", ("light", "dark")),
    (NARROW, "en", ("light", "dark")),
    (WIDE, "zh-hans", ("dark",)),
    (NARROW, "zh-hans", ("light",)),
]


@pytest.mark.parametrize(("width", "language", "themes"), LOOKS)
def test_every_page_is_accessible_silent_and_fits(
    visit: Any, site: Site, width: int, language: str, themes: tuple[str, ...]
) -> None:
    one = visit(width=width)
    one.go("/login/")
    if language != "en":
        one.speak(language)
    one.look(f"login-{language}-{width}", *themes)
    one.sign_in()
    for name, path in paths(site).items():
        one.go(path)
        assert one.page.get_attribute("html", "lang") == language
        # The same markup was asked before, and its names are asked in the narrow window.
        one.look(f"{name}-{language}-{width}", *themes, axe=themes != ("dark",))
    if language != "en":
        one.speak("en")
        assert one.page.url == site.url + "/ui/"
    assert one.heard(400) == []


def test_on_a_narrow_screen_one_button_opens_the_pages(visit: Any) -> None:
    one: Visit = visit(width=NARROW)
    one.sign_in()
    assert not one.page.is_visible("text=Sign out")
    one.page.click("text=Menu")
    assert one.page.is_visible("text=Sign out")
    assert one.overflow() <= 0
    one.look("menu-en-390")
    one.page.keyboard.press("Escape")
    assert not one.page.is_visible("text=Sign out")
    one.page.click("text=Menu")
    one.page.click("#menu >> text=Incidents")
    one.page.wait_for_url("**/incidents/")
    assert one.console == []


BOXES = "each => each.map(one => one.getBoundingClientRect().toJSON())"


@pytest.mark.parametrize(("width", "in_a_row"), [(1360, 3), (1280, 3), (1024, 1), (NARROW, 1)])
def test_charts_stand_in_whole_rows(visit: Any, width: int, in_a_row: int) -> None:
    one: Visit = visit(width=width)
    one.sign_in()
    tops = [box["top"] for box in one.page.eval_on_selector_all(".charts .chart", BOXES)]
    assert [tops.count(top) for top in tops] == [in_a_row] * 3


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_zone_of_all_times_is_always_seen(visit: Any, width: int) -> None:
    one: Visit = visit(width=width)
    one.sign_in()
    zone = one.page.locator(".zone")
    assert zone.is_visible()
    assert "UTC" in zone.inner_text()


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_signs_and_times_of_the_budgets_curve_do_not_lie_on_each_other(
    visit: Any, width: int
) -> None:
    one: Visit = visit(width=width)
    one.sign_in()
    one.go("/objectives/ttft/")
    signs = one.page.eval_on_selector_all(".over .mark text", BOXES)
    lines = one.page.eval_on_selector_all(".over .mark line", BOXES)
    kinds = one.page.eval_on_selector_all(".over .mark text", "all => all.map(t => t.textContent)")
    assert set(kinds) >= {"■", "◆"}
    for kind, sign, line in zip(kinds, signs, lines, strict=True):
        side = sign["right"] - line["left"] if kind == "■" else line["left"] - sign["left"]
        assert side < 1, "an incident's sign left of its line, an action's right of it"
    times = one.page.eval_on_selector_all(".over .tick text, .over .now", BOXES)
    assert len(times) >= 3
    assert all(one["right"] < other["left"] for one, other in pairwise(times))


@pytest.mark.parametrize(("width", "language", "themes"), LOOKS[::3])
def test_what_is_empty_says_what_to_do(
    visit: Any, empty_site: Site, width: int, language: str, themes: tuple[str, ...]
) -> None:
    one = visit(width=width, at=empty_site)
    one.go("/login/")
    if language != "en":
        one.speak(language)
    one.sign_in()
    for name, path in EMPTY.items():
        one.go(path)
        one.look(f"{name}-{language}-{width}", *themes)
    assert one.console == []


@pytest.fixture(scope="module")
def deaf(site: Site) -> Iterator[Site]:
    """A server that cannot read telemetry, which the other one owns."""
    running = beside(site)
    yield running
    running.stop()


@pytest.mark.parametrize(("width", "language", "themes"), LOOKS[1:3])
def test_errors_and_links_wear_the_same_look(
    visit: Any, site: Site, deaf: Site, width: int, language: str, themes: tuple[str, ...]
) -> None:
    one: Visit = visit(width=width)

    def look(name: str, path: str, *, at: Site | None = None, title: str = "") -> None:
        one.go(path, at=at)
        if title and language == "en":
            assert one.page.inner_text("h1") == title
        one.look(f"{name}-{language}-{width}", *themes)

    one.go("/login/")
    if language != "en":
        one.speak(language)
    one.page.fill("#id_username", "ada")
    one.page.fill("#id_password", "wrong")
    one.page.keyboard.press("Enter")
    one.page.wait_for_selector("[role=alert]")
    one.look(f"login-wrong-{language}-{width}", *themes)
    look("link", site.things["link"], title="Take this change back?")
    look("link-ended", "/a/made-up/", title="This link is not one of ours.")
    look("welcome", site.things["welcome"], title="Welcome, joan")
    look("welcome-ended", "/welcome/MQ/made-up/", title="This link has ended.")
    one.sign_in()
    look("error-404", "/nothing/", title="There is nothing at this address.")
    look("error-503", "/traces/", at=deaf, title="Telemetry cannot be read just now.")
    one.context.clear_cookies(name="csrftoken")
    one.go("/settings/silences/")
    one.page.fill("#id_reason", "racks")
    one.context.clear_cookies(name="csrftoken")
    one.page.click("#main form.form button")
    one.page.wait_for_selector("text=403")
    one.look(f"error-403-{language}-{width}", *themes)
    assert one.heard(400, 403, 404, 410, 503) == []
