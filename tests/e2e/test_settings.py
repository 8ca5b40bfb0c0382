"""By keys to the settings: a channel that does not answer, a token shown once, a member; by keys
to the ledger and a change of one's own."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.site import Site
from tests.e2e.visit import NARROW

pytestmark = pytest.mark.browser


def test_a_channel_is_set_up_and_tested(visit: Any, site: Site) -> None:
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
    assert one.heard(400) == []


def test_a_token_is_shown_once_and_revoked(visit: Any, site: Site) -> None:
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
    assert one.heard(409) == []


@pytest.mark.parametrize("width", [1360, NARROW])
def test_a_change_of_ones_own(visit: Any, site: Site, width: int) -> None:
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
    assert one.heard(400, 409) == []


def test_somebody_is_let_in_and_paused(visit: Any, site: Site) -> None:
    one = visit(width=NARROW)
    one.sign_in()
    page = one.page
    one.go("/settings/members/")
    page.fill("#id_name", "not a name")
    page.click("button:has-text('Let in')")
    page.wait_for_selector("#id_name_error")
    assert page.get_attribute("#id_name", "aria-invalid") == "true"
    page.fill("#id_name", "barbara")
    page.click("button:has-text('Let in')")
    page.wait_for_selector(".story pre")
    assert "/welcome/" in page.inner_text(".story pre")
    row = page.locator("tr:has(th:has-text('barbara'))")
    row.locator("summary").click()
    one.look("member-let-in")
    row.locator("button:has-text('Deactivate')").click()
    page.wait_for_url("**/settings/members/")
    assert "deactivated" in page.locator("tr:has(th:has-text('barbara'))").inner_text()
    assert one.heard(400) == []


@pytest.mark.parametrize("width", [1360, NARROW])
def test_a_policy_is_written(visit: Any, site: Site, width: int) -> None:
    one = visit(width=width)
    one.sign_in()
    page = one.page
    page.keyboard.press("g")
    page.keyboard.press("p")
    page.wait_for_url("**/policies/")
    page.click("tbody a:has-text('engine-0')")
    page.wait_for_url("**/policies/edit/?engine=engine-0")
    page.fill("#id_cool_down_harmful_s", "-1")
    page.fill("#id_quiet_from", "22:00")
    page.fill("#id_quiet_until", "")
    page.fill("#id_maximum_max_num_seqs", "9999")
    page.click("button:has-text('Save')")
    page.wait_for_selector("#id_maximum_max_num_seqs_error")
    assert page.is_visible("#id_cool_down_harmful_s_error")
    assert page.is_visible("#id_quiet_until_error")
    one.look(f"policy-wrong-{width}")
    page.fill("#id_cool_down_harmful_s", "90")
    page.fill("#id_quiet_until", "07:00")
    page.fill("#id_maximum_max_num_seqs", "48")
    page.click("button:has-text('Save')")
    page.wait_for_url("**/policies/")
    said = page.locator("tr:has(a:text-is('engine engine-0'))").inner_text().replace("\u00a0", " ")
    assert "max_num_seqs at most 48" in said
    assert "Cool-down, harmful 1 min 30 s" in said
    assert one.heard(400) == []
