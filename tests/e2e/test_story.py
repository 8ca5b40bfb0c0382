"""Sign in, read the story, open the objective, the incident, see its outcome, open the trace."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.controlplane.web.world import TRACE_ID
from tests.e2e.site import Site, start
from tests.e2e.visit import NARROW, WIDE, Visit

pytestmark = pytest.mark.browser

VERIFIED = """
from django.utils import timezone
from controlplane.actions.models import Action, State
from controlplane.diagnosis.models import Incident
from tests.controlplane.web.story import end
end(Action.objects.get(state=State.VERIFYING), State.VERIFIED, timezone.now())
incident = Incident.objects.get()
incident.state, incident.closed_at = "closed", timezone.now()
incident.save()
"""

NOT_ENOUGH = """
from datetime import timedelta
from django.utils import timezone
from controlplane.actions.models import Action
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.explaining import diagnosis_confirm
from tests.controlplane.web.story import goes_on
found, kept_at = Incident.objects.get(), timezone.now() - timedelta(seconds=70)
Incident.objects.update(state="open", closed_at=None)
found.refresh_from_db()
action = found.actions.get()
action.ended_at = kept_at
lost = {"objective": "Each token within 50 ms", "before": 0, "after": 0.0231, "budget": 0.01}
action.outcome["price"] = [lost]
action.save()
diagnosis_confirm(incident=found, cause=action.cause, acted_at=kept_at)
goes_on(found, kept_at)
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
    site = start(tmp_path_factory.mktemp("outcome"), fill=True)
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
        page.wait_for_url(f"**/incidents/{site.things['incident']}/")
        page.wait_for_selector("#live:not(:empty)", state="attached")
        assert "now checking" in page.inner_text("#story")
        site.run(VERIFIED)
        page.wait_for_selector(
            "text=44.7 % of requests missed the objective before", timeout=20_000
        )
        page.wait_for_selector("#favicon[href$='/ok.svg']", state="attached")
        assert "Kept max_num_seqs at 32 (was 8) on engine-0" in page.inner_text("#story")
        assert one.violations() == []
        one.shoot("outcome")
        page.click("#reasons a:has(code)")
        page.wait_for_url("**/traces/**")
        assert "waiting in the queue 911 ms" in page.inner_text("main").replace("\u00a0", " ")
        one.go("/")
        one.shoot("overview-outcome")
        site.run(NOT_ENOUGH)
        what_a_kept_change_left(one)
        assert one.console == []
    finally:
        site.stop()  # with the page still open: its stream must not hold the server up
    one.context.close()
    assert site.process.returncode in (0, -15, 143)


def what_a_kept_change_left(one: Visit) -> None:
    """On a narrow screen: the price has room beside the verdict, and nothing sticks together."""
    one.page.set_viewport_size({"width": NARROW, "height": 850})
    one.go(f"/incidents/{one.site.things['incident']}/")
    one.look("not-enough")

    def box(selector: str) -> dict[str, float]:
        return one.page.locator(selector).first.bounding_box()

    facts, verdict = box(".facts.result"), box(".facts.result > :last-child")
    assert "“Each token within 50 ms” got worse" in one.page.inner_text(".facts.result")
    assert verdict["width"] == pytest.approx(facts["width"], abs=3)
    said, details = box("#look ~ .said"), box("#look ~ details")
    assert details["y"] - said["y"] - said["height"] >= 12
