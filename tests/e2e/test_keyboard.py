"""A person without a mouse: what has the focus is seen, whole, wherever Tab leads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.site import Site
from tests.e2e.visit import NARROW, WIDE, Visit

pytestmark = pytest.mark.browser
STOPS_MAX = 120
LOW = {"width": WIDE, "height": 480}
# "" once nothing on the page has the focus; else what has it, and what is wrong with its ring:
# not drawn, in pieces, outside the window, cut off by a box around it, or under another thing.
FOCUS = """() => {
  const it = document.activeElement;
  if (it === document.body) return "";
  const style = getComputedStyle(it), ring = parseFloat(style.outlineWidth) + parseFloat(style.outlineOffset);
  const { left, top, right, bottom } = it.getBoundingClientRect(), [first] = it.getClientRects();
  const wrong = [];
  if (style.outlineStyle === "none") wrong.push("no ring");
  if (it.querySelector("small") && it.getClientRects().length > 1) wrong.push("in pieces");
  const within = (box) => left - ring > box.left - 1 && right + ring < box.right + 1
    && top - ring > box.top - 1 && bottom + ring < box.bottom + 1;
  if (!within({ left: 0, top: 0, right: innerWidth, bottom: innerHeight })) wrong.push("outside");
  for (let box = it.parentElement; box !== document.body; box = box.parentElement)
    if (box.checkVisibility() && getComputedStyle(box).display !== "contents"
        && getComputedStyle(box).overflowX !== "visible" && !within(box.getBoundingClientRect()))
      wrong.push("cut off by " + box.className);
  const there = document.elementFromPoint((first.left + first.right) / 2, (first.top + first.bottom) / 2);
  if (!it.contains(there) && !there?.contains(it)) wrong.push("under " + there?.className);
  return `${it.tagName} ${it.innerText}: ${wrong.join(", ")}`;
}"""  # noqa: E501


def walk(one: Visit, key: str, stops_max: int = STOPS_MAX) -> list[str]:
    """Every stop until the page is left."""
    stops: list[str] = []
    while len(stops) < stops_max:
        one.page.keyboard.press(key)
        if not (stop := one.page.evaluate(FOCUS)):
            break
        stops.append(stop)
    return stops


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_what_has_the_focus_is_seen_whole(visit: Any, site: Site, width: int) -> None:
    one: Visit = visit(width=width)
    one.sign_in()
    for path in (
        "/", f"/incidents/{site.things['incident']}/", "/objectives/ttft/", "/actions/",
        "/traces/?status=failed", "/settings/silences/", "/settings/tokens/",
    ):  # fmt: skip
        one.go(path)
        there = walk(one, "Tab")
        back = walk(one, "Shift+Tab", len(there))
        assert there[0].startswith("A Skip to content")
        assert len(there) > 5
        assert [stop for stop in there + back if not stop.endswith(": ")] == [], path


def test_a_chart_is_read_at_any_time_with_the_arrow_keys(visit: Any) -> None:
    one: Visit = visit()
    one.sign_in()
    one.go("/objectives/ttft/")
    charts = one.page.locator(".plot[role=slider]")
    missed, load = charts.first, one.page.locator("[data-chart=load]")
    assert missed.get_attribute("aria-description").startswith("Left and right arrows read it")
    newest, last = (missed.get_attribute(f"aria-{name}") for name in ("valuetext", "valuenow"))
    missed.focus()
    end = missed.get_attribute("aria-valuemax")
    for key, place in (
        ("ArrowLeft", int(last) - 1), ("ArrowRight", int(last)), ("Home", 0), ("PageUp", 10),
        ("End", int(end)),
    ):  # fmt: skip
        one.page.keyboard.press(key)
        assert missed.get_attribute("aria-valuenow") == str(place), key
        time = one.page.locator("[data-chart=bad] .readout > span").first.inner_text()
        assert missed.get_attribute("aria-valuetext").startswith(f"{time}, missed ")
        # The same cursor across the page.
        assert load.locator(".readout > span").first.inner_text() == time
    one.page.keyboard.press("Home")
    assert missed.get_attribute("aria-valuetext") != newest
    one.page.keyboard.press("Escape")
    assert missed.get_attribute("aria-valuetext") == newest
    one.page.keyboard.press("ArrowLeft")
    one.page.keyboard.press("Tab")
    assert missed.get_attribute("aria-valuetext") == newest, "who went on has no cursor there"
    assert one.heard() == []


def test_in_a_low_window_the_pages_and_the_way_out_can_be_reached(visit: Any) -> None:
    one: Visit = visit()
    one.page.set_viewport_size(LOW)
    one.sign_in()
    stops = walk(one, "Tab")
    assert "BUTTON Sign out: " in stops
    assert [stop for stop in stops if not stop.endswith(": ")] == []


def test_the_menu_closes_when_the_focus_goes_on_below_it(visit: Any) -> None:
    one: Visit = visit(width=NARROW)
    one.sign_in()
    one.page.focus("text=Menu")
    one.page.keyboard.press("Enter")
    stops = walk(one, "Tab")
    assert "BUTTON Sign out: " in stops
    assert [stop for stop in stops if not stop.endswith(": ")] == []
    assert not one.page.is_visible("text=Sign out")
