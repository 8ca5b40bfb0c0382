"""By keys to the settings: a channel that does not answer, a token shown once, a member; by keys
to the ledger and a change of one's own."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.test_story import NARROW, visit  # noqa: F401 -- a fixture

pytestmark = pytest.mark.browser


def quiet(console: list[str], *statuses: int) -> list[str]:
    """A browser writes a 4xx of the page itself to the console, whatever stands on the page."""
    return [said for said in console if not any(f"status of {each} (" in said for each in statuses)]


def test_a_channel_is_set_up_and_tested(visit: Any, site: Site) -> None:  # noqa: F811
    one = visit()
    one.sign_in()
    page = one.page
    page.keyboard.press("g")
    page.keyboard.press("e")
    page.wait_for_url("**/settings/channels/")
    page.fill("#id_name", "pager")
    page.fill("#id_url", "ftp://relay.example/hook")
    page.click("button:has-text('Add it')")
    page.wait_for_selector("#id_url_error")
    assert page.evaluate("document.activeElement.id") in ("id_url", "")
    assert page.get_attribute("#id_url", "aria-invalid") == "true"
    assert one.violations() == []
    one.shoot("channel-wrong")
    page.fill("#id_url", "http://127.0.0.1:9/hook/not-to-be-shown")
    page.click("button:has-text('Add it')")
    page.wait_for_selector("text=it is shown this once")
    assert "whsec_" in page.inner_text(".story pre")
    assert one.violations() == []
    one.shoot("channel-secret")
    page.click("a:has-text('pager')")
    page.wait_for_url("**/settings/channels/*-*/")
    page.click("button:has-text('Send a test')")
    page.wait_for_selector("text=The test did not arrive.")
    assert "not-to-be-shown" not in page.content()
    assert one.violations() == []
    one.shoot("channel-tested")
    page.click("summary:has-text('Remove it')")
    page.click("button:has-text('Remove for good')")
    page.wait_for_url("**/settings/channels/")
    assert not page.is_visible("text=pager")
    assert quiet(one.console, 400) == []


def test_a_token_is_shown_once_and_revoked(visit: Any, site: Site) -> None:  # noqa: F811
    one = visit(theme="dark")
    one.sign_in()
    page = one.page
    one.go("/settings/tokens/")
    page.fill("#id_name", "night job")
    page.check("text=read >> input")
    page.click("button:has-text('Make it')")
    page.wait_for_selector(".story pre")
    secret = page.inner_text(".story pre")
    assert re.fullmatch(r"tt_api_[\w-]{43}", secret)
    assert one.violations() == []
    one.shoot("token-made")
    one.go("/settings/tokens/")
    assert secret not in page.content()
    row = page.locator("tr:has-text('night job')")
    row.locator("summary").click()
    row.locator("button").click()
    page.wait_for_url("**/settings/tokens/")
    assert "revoked" in page.locator("tr:has-text('night job')").inner_text()
    one.go("/settings/members/")
    page.select_option("label:has-text('Role of ada') + select", "viewer")
    page.locator("tr:has-text('ada') button:has-text('Change')").click()
    page.wait_for_selector("text=A tenant needs an owner")
    assert one.violations() == []
    one.shoot("member-last-owner")
    assert quiet(one.console, 409) == []


@pytest.mark.parametrize("width", [1360, NARROW])
def test_a_change_of_ones_own(visit: Any, site: Site, width: int) -> None:  # noqa: F811
    one = visit(width=width)
    one.sign_in()
    page = one.page
    page.keyboard.press("g")
    page.keyboard.press("a")
    page.wait_for_url("**/actions/")
    page.click("text=Change a knob")
    page.wait_for_url("**/actions/new/")
    page.select_option("#id_knob", "max_num_seqs")
    page.fill("#id_value", "9000")
    page.click("button:has-text('Change it')")
    page.wait_for_selector("#main .errorlist, #main .problem")
    assert one.violations() == []
    assert one.overflow() <= 0
    one.shoot(f"action-new-wrong-{width}")
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/contracts/")
    assert quiet(one.console, 400, 409) == []
