"""Sign in, read the story, open the objective, the incident, see its outcome, open the trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.controlplane.web.world import PASSWORD, TRACE_ID
from tests.e2e.conftest import ROOT, SHOTS, Site, start, stop

pytestmark = pytest.mark.browser

AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
WIDE, NARROW = 1360, 390
VERIFIED = """
from django.utils import timezone
from controlplane.actions.models import Action, State
from controlplane.diagnosis.models import Incident
from tests.controlplane.web.world import end
end(Action.objects.get(state=State.VERIFYING), State.VERIFIED, timezone.now())
incident = Incident.objects.get()
incident.state, incident.closed_at = "closed", timezone.now()
incident.save()
"""

NEXT_WINDOW = """
from datetime import timedelta
from slo.budget import Counts
from slo.models import Objective, Reading
from slo.readings import Measured, readings_book
from tracing.types import Signal
objective = Objective.objects.get(slug="ttft")
last = Reading.objects.filter(objective=objective, scope="").order_by("window_end").last()
one = Measured(last.window_end + timedelta(seconds=15), Counts(23, 100), Signal.OK)
readings_book(objective=objective, scope="", window_s=15.0, measured=[one])
"""


class Visit:
    """A signed-in page and everything its console said."""

    def __init__(self, browser: Any, site: Site, *, width: int, theme: str) -> None:
        self.site = site
        self.context = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=theme
        )
        self.page = self.context.new_page()
        self.console: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))

    def go(self, path: str) -> None:
        self.page.goto(self.site.url + path)
        if "/login/" not in self.page.url:
            self.page.wait_for_selector("#live:not(:empty)", state="attached")
            undrawn = "[data-src] .plot:not(:has(.u-over)):not(:has(.say))"
            self.page.wait_for_selector(undrawn, state="detached")

    def sign_in(self) -> None:
        self.go("/login/")
        self.page.fill("#id_username", "ada")
        self.page.fill("#id_password", PASSWORD)
        self.page.keyboard.press("Enter")
        self.page.wait_for_url(self.site.url + "/")

    def violations(self) -> list[str]:
        """What axe finds, one line each. The content policy forbids a script tag: evaluate."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("tags => axe.run(document, {runOnly: tags})", AXE_TAGS)
        return [
            f"{rule['id']}: {rule['help']}: {node['html'][:160]}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]

    def overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def shoot(self, name: str) -> None:
        self.page.screenshot(path=str(SHOTS / f"{name}.png"), full_page=True)


@pytest.fixture
def visit(browser: Any, site: Site) -> Iterator[Any]:
    visits: list[Visit] = []

    def open_one(*, width: int = WIDE, theme: str = "light", at: Site = site) -> Visit:
        visits.append(Visit(browser, at, width=width, theme=theme))
        return visits[-1]

    yield open_one
    for one in visits:
        one.context.close()


def paths(site: Site) -> dict[str, str]:
    return {
        "overview": "/",
        "objectives": "/objectives/",
        "objective": "/objectives/ttft/",
        "objective-no-data": "/objectives/code-e2e/",
        "incidents": "/incidents/",
        "incident": f"/incidents/{site.incident}/",
        "traces": "/traces/",
        "traces-slowest": "/traces/?status=failed&sort=slowest",
        "traces-empty": "/traces/?q=no-such-request",
        "traces-error": "/traces/?max_ms=soon",
        "trace": f"/traces/{TRACE_ID}/",
        "fleet": "/fleet/",
        "node": "/fleet/node-a/",
        "actions": "/actions/",
        "actions-none-fit": "/actions/?state=failed",
        "actions-error": "/actions/?state=happy",
        "action-new": "/actions/new/",
        "policies": "/policies/",
        "contracts": "/contracts/",
        "contract": "/contracts/chat-gold/",
        "channels": "/settings/channels/",
        "deliveries": "/settings/deliveries/",
        "silences": "/settings/silences/",
        "tokens": "/settings/tokens/",
        "members": "/settings/members/",
        "audit": "/settings/audit/",
        "ui": "/ui/",
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_page_is_accessible_silent_and_fits(
    visit: Any, site: Site, theme: str, width: int
) -> None:
    one = visit(width=width, theme=theme)
    one.go("/login/")
    assert one.violations() == []
    one.shoot(f"login-{theme}-{width}")
    one.sign_in()
    for name, path in paths(site).items():
        one.go(path)
        one.shoot(f"{name}-{theme}-{width}")
        assert one.violations() == [], name
        assert one.overflow() <= 0, name
    # A browser writes a 4xx of the page itself to the console, whatever stands on the page.
    assert [said for said in one.console if "400 (Bad Request)" not in said] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_speaks_chinese(visit: Any, site: Site, theme: str) -> None:
    one = visit(theme=theme)
    one.go("/login/")
    one.page.click("button[value=zh-hans]")
    one.page.wait_for_selector("html[lang=zh-hans]")
    one.shoot(f"login-{theme}-zh")
    one.sign_in()
    for name, path in paths(site).items():
        one.go(path)
        one.shoot(f"{name}-{theme}-zh")
        assert one.page.get_attribute("html", "lang") == "zh-hans"
        assert one.violations() == [], name
        assert one.overflow() <= 0, name
    one.page.click("button[value=en]")
    one.page.wait_for_selector("html[lang=en]")
    assert one.page.url == site.url + "/ui/"
    assert [said for said in one.console if "400 (Bad Request)" not in said] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_first_run_is_accessible_and_silent(visit: Any, empty_site: Site, theme: str) -> None:
    one = visit(theme=theme, at=empty_site)
    one.sign_in()
    for name, path in {
        "first-run": "/",
        "no-objectives": "/objectives/",
        "no-incidents": "/incidents/",
        "no-traces": "/traces/",
        "no-fleet": "/fleet/",
        "no-actions": "/actions/",
        "no-contracts": "/contracts/",
        "no-channels": "/settings/channels/",
        "no-deliveries": "/settings/deliveries/",
        "no-silences": "/settings/silences/",
        "no-tokens": "/settings/tokens/",
        "no-audit": "/settings/audit/",
    }.items():
        one.go(path)
        one.shoot(f"{name}-{theme}")
        assert one.violations() == [], name
    assert one.console == []


def test_errors_wear_the_same_look(visit: Any, site: Site) -> None:
    one = visit()
    one.sign_in()
    one.page.goto(site.url + "/nothing/")
    assert one.page.inner_text("h1") == "There is nothing at this address."
    assert one.violations() == []
    one.shoot("error-404")


def test_the_keyboard_reaches_everything(visit: Any, site: Site) -> None:
    one = visit()
    one.sign_in()
    page = one.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_url("**/objectives/")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/objectives/ttft/")
    page.keyboard.press("t")
    page.wait_for_url("**/objectives/ttft/?minutes=360")
    page.keyboard.press(".")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    assert page.is_visible("dialog#keys")
    assert one.violations() == []
    one.shoot("keys")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.wait_for_url(site.url + "/")
    page.focus("button.cell")
    page.keyboard.press("Enter")
    assert page.is_visible("[popover]:popover-open")
    assert "max_num_seqs" in page.inner_text("[popover]:popover-open")
    one.shoot("engine")
    page.evaluate("document.body.dispatchEvent(new CustomEvent('changed:fleet'))")
    page.wait_for_timeout(1000)
    assert page.is_visible("[popover]:popover-open"), "a live update closed what was being read"
    page.keyboard.press("Escape")
    page.focus("button.cell")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement !== document.body")
    assert one.console == []


def test_requests_are_searched_with_keys_and_dragged_from_the_heat_map(
    visit: Any, site: Site
) -> None:
    one = visit()
    one.sign_in()
    page = one.page
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_url("**/traces/")
    page.wait_for_selector("svg.cells")
    whole = page.inner_text(".heat .readout b")
    field = page.locator("svg.cells")
    box = field.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + box["height"] * 0.5, steps=5)
    one.shoot("heat-dragged")
    page.mouse.up()
    page.wait_for_url("**since=*")
    assert "min_ms=" in page.url
    page.wait_for_selector(".heat .readout b")
    assert int(page.inner_text(".heat .readout b")) < int(whole)
    assert page.is_visible("text=Only requests that ended from")
    one.shoot("heat-part")
    page.click("text=Clear")
    page.wait_for_url(lambda url: "since" not in url)
    page.keyboard.press("/")
    page.keyboard.type("0af7651916")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=0af7651916*")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/traces/{TRACE_ID}/")
    page.keyboard.press("g")
    page.keyboard.press("f")
    page.wait_for_url("**/fleet/")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/fleet/node-a/")
    assert "runs 20, told was 5" in page.inner_text("main")
    assert one.console == []


def test_charts_follow_the_cursor_together(visit: Any, site: Site) -> None:
    one = visit()
    one.sign_in()
    one.go("/objectives/ttft/")
    plot = one.page.locator(".u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    one.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    one.page.wait_for_timeout(200)
    times = [
        re.search(r"\d\d:\d\d:\d\d", text).group()
        for text in one.page.locator(".readout").all_inner_texts()
    ]  # type: ignore[union-attr]
    assert len(times) == 3
    assert len(set(times)) == 1
    one.shoot("cursor")


def test_from_story_to_objective_to_incident_to_outcome_to_trace(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server, site = start(tmp_path_factory.mktemp("outcome"), fill=True)
    try:
        one = Visit(browser, site, width=WIDE, theme="light")
        one.sign_in()
        page = one.page
        assert "because 31 requests wait behind a cap of 8 running" in page.inner_text("#story")
        assert page.get_attribute("#favicon", "href").endswith("/act.svg")  # type: ignore[union-attr]
        page.click("#objectives >> text=First token within 500 ms")
        page.wait_for_url("**/objectives/ttft/")
        page.wait_for_selector("#live:not(:empty)", state="attached")
        page.wait_for_selector(".u-over")
        site.run(NEXT_WINDOW)
        page.wait_for_selector(".readout >> text=missed 77", timeout=20_000)
        page.click("#incidents a")
        page.wait_for_url(f"**/incidents/{site.incident}/")
        page.wait_for_selector("#live:not(:empty)", state="attached")
        assert "now checking" in page.inner_text("#all")
        site.run(VERIFIED)
        page.wait_for_selector(
            "text=44.7 % of requests missed the objective before", timeout=20_000
        )
        page.wait_for_selector("#favicon[href$='/ok.svg']", state="attached")
        assert "Kept max_num_seqs from 8 to 32 on engine-0" in page.inner_text("#all")
        assert one.violations() == []
        one.shoot("outcome")
        page.click("#all a:has(code)")
        page.wait_for_url("**/traces/**")
        assert "waiting in the queue 911 ms" in page.inner_text("main").replace("\u00a0", " ")
        one.go("/")
        one.shoot("overview-outcome")
        assert one.console == []
    finally:
        stop(server)  # with the page still open: its stream must not hold the server up
    one.context.close()
    assert server.returncode in (0, -15, 143)
