"""A person's browser: goes to pages, looks at them, and notes what the console says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.controlplane.web.world import PASSWORD
from tests.e2e.site import ROOT, Site

SHOTS = Path(__file__).parent / "shots"
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# All that a theme can change of what axe finds.
AXE_COLOUR = {"type": "rule", "values": ["color-contrast"]}
WIDE, NARROW = 1360, 390


class Visit:
    """A page of its own and everything its console said."""

    def __init__(self, browser: Any, site: Site, *, width: int, theme: str) -> None:
        self.site = site
        self.context = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=theme
        )
        self.page = self.context.new_page()
        self.console: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))

    def go(self, path: str, *, at: Site | None = None) -> None:
        self.page.goto((at or self.site).url + path)
        if self.page.locator("#live").count():
            self.page.wait_for_selector("#live:not(:empty)", state="attached")
            undrawn = "[data-src] .plot:not(:has(.u-over)):not(:has(.say))"
            self.page.wait_for_selector(undrawn, state="detached")

    def sign_in(self) -> None:
        self.go("/login/")
        self.page.fill("#id_username", "ada")
        self.page.fill("#id_password", PASSWORD)
        self.page.keyboard.press("Enter")
        self.page.wait_for_url(self.site.url + "/")

    def speak(self, language: str) -> None:
        choice = self.page.locator(f"button[value={language}]")
        if not choice.is_visible():  # in the narrow window's menu
            self.page.click("button[popovertarget=menu]")
        choice.click()
        self.page.wait_for_selector(f"html[lang={language}]")

    def look(self, name: str, *themes: str, axe: bool = True) -> None:
        """Photographs the page in each theme; it must fit the window, and axe finds nothing."""
        assert self.overflow() <= 0, name
        for theme in themes or ("light", "dark"):
            self.page.emulate_media(color_scheme=theme)
            self.shoot(f"{name}-{theme}")
            # What is wrong in one theme only is a colour.
            only = AXE_COLOUR if theme == "dark" and len(themes) != 1 else AXE_TAGS
            found = self.violations(only) if axe else []
            assert not found, f"{name} in {theme}: {found}"

    def violations(self, only: Any = AXE_TAGS) -> list[str]:
        """What axe finds, one line each. The content policy forbids a script tag: evaluate."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("only => axe.run(document, {runOnly: only})", only)
        return [
            f"{rule['id']}: {rule['help']}: {node['html'][:160]}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]

    def overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def shoot(self, name: str) -> None:
        self.page.screenshot(path=str(SHOTS / f"{name}.png"), full_page=True)

    def heard(self, *statuses: int) -> list[str]:
        """What the console said, but that the page itself was answered with one of `statuses`,
        which a browser notes whatever stands on the page."""
        noted = [f"status of {status} (" for status in statuses]
        return [said for said in self.console if not any(note in said for note in noted)]
