"""The content policy: sent with every answer, and kept by every template and script of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.staticfiles import finders
from django.test import Client

from controlplane.web.middleware import POLICY
from tests.controlplane.web.world import World

ROOT = Path(settings.BASE_DIR)
TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))
OURS = sorted((ROOT / "controlplane" / "web" / "static" / "web").rglob("*.*"))
VERSIONS = {"htmx.org": "4.0.1", "uplot": "1.6.32", "@fontsource-variable/inter": "5.2.8"}


@pytest.mark.parametrize("address", ["/", "/login/", "/nothing/", "/events/", "/series/ttft/"])
def test_every_answer_carries_the_policy(ada: Any, empty: World, address: str) -> None:
    for client in (Client(), ada(empty)):
        assert client.get(address).headers["Content-Security-Policy"] == POLICY


def test_the_policy_allows_nothing_inline_and_nobody_elses() -> None:
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert "frame-ancestors 'none'" in POLICY


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_have_no_inline_script_or_style(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"<style|\sstyle\s*=|<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"\son[a-z]+\s*=|javascript:|hx-on|js:", text)
    assert not re.search(r"(src|href)=\"(https?:)?//", text)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_say_nothing_outside_gettext(path: Path) -> None:
    text = re.sub(r"{#.*?#}|{%\s*comment.*?endcomment\s*%}", "", path.read_text(), flags=re.S)
    text = re.sub(r"{%\s*blocktranslate.*?endblocktranslate\s*%}", "", text, flags=re.S)
    text = re.sub(r"<(pre|svg|code|kbd)\b.*?</\1>", "", text, flags=re.S)
    text = re.sub(r"{%.*?%}|{{.*?}}|<[^>]*>", " ", text, flags=re.S)
    words = [word for word in re.findall(r"[A-Za-z]{3,}", text) if word not in NOT_WORDS]
    assert not words


# Names and protocols, the same in every language.
NOT_WORDS = {"Trimtab", "HTTP", "PUT", "api", "objectives", "GPU", "TTFT", "UTC"}


def test_scripts_need_no_eval_and_build_no_markup_from_text() -> None:
    for path in OURS:
        if path.suffix == ".js":
            text = path.read_text()
            assert not re.search(r"\beval\(|new Function|innerHTML|insertAdjacentHTML", text), path


def test_front_end_files_are_the_documented_versions_and_are_served() -> None:
    package = json.loads((ROOT / "package.json").read_text())
    lock = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    assert package["dependencies"] == VERSIONS
    for name, version in VERSIONS.items():
        assert lock[f"node_modules/{name}"]["version"] == version
        installed = ROOT / "node_modules" / name / "package.json"
        assert json.loads(installed.read_text())["version"] == version
    for file in (
        "vendor/htmx/htmx.min.js", "vendor/uplot/uPlot.iife.min.js", "vendor/uplot/uPlot.min.css",
        "vendor/inter/inter-latin-wght-normal.woff2", "web/js/live.js", "web/css/app.css",
        *(f"web/icons/{state}.svg" for state in ("ok", "warn", "bad", "act", "none")),
    ):  # fmt: skip
        assert finders.find(file), file
