"""Servers and a browser for the stories. What is missing is named and skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.site import ROOT, Site, start
from tests.e2e.visit import SHOTS, WIDE, Visit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
CHROMIUM_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    running = start(tmp_path_factory.mktemp("home"), fill=True)
    yield running
    running.stop()


@pytest.fixture(scope="package")
def empty_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    running = start(tmp_path_factory.mktemp("empty"), fill=False)
    yield running
    running.stop()


@pytest.fixture(scope="package")
def browser() -> Iterator[object]:
    """Until the last test of this folder: while Playwright runs, the main thread has a running
    event loop, under which no other test could start its own."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium: {CHROMIUM} is not there (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip's playwright")
    axe = ROOT / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.exists():
        pytest.skip("needs node_modules: npm ci")
    SHOTS.mkdir(exist_ok=True)
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=CHROMIUM_ARGS
        )
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any, site: Site) -> Iterator[Any]:
    visits: list[Visit] = []

    def open_one(*, width: int = WIDE, theme: str = "light", at: Site = site) -> Visit:
        visits.append(Visit(browser, at, width=width, theme=theme))
        return visits[-1]

    yield open_one
    for one in visits:
        one.context.close()
