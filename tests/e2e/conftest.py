"""A real server over a seeded home, and a real browser. What is missing is named and skipped."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.catalogues import compile_all

ROOT = Path(__file__).resolve().parents[2]
SHOTS = Path(__file__).parent / "shots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
CHROMIUM_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
START_S = 60.0


@dataclass
class Site:
    """A running server: where it is, where its state lives, which incident its story tells."""

    url: str
    home: Path
    incident: str
    environ: dict[str, str]

    def run(self, code: str) -> str:
        """Runs Python beside the server, as another process of the control plane would."""
        return subprocess.run(
            [sys.executable, "-c", "import django; django.setup()\n" + code],
            env=self.environ, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
        ).stdout  # fmt: skip


def start(home: Path, *, fill: bool) -> tuple[subprocess.Popen[bytes], Site]:
    compile_all()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **os.environ,
        "TRIMTAB_HOME": str(home),
        "TRIMTAB_PUBLIC_URL": f"http://127.0.0.1:{port}",
        # A broker elsewhere: no loop runs in this server, so the seeded story stays as it is.
        "TRIMTAB_BROKER_URL": "filesystem://",
        "TRIMTAB_OTLP_GRPC_PORT": "0",
        "TRIMTAB_LOG_LEVEL": "WARNING",
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
    }
    seed = ["-m", "tests.e2e.fill", *([] if fill else ["--empty"])]
    seeded = subprocess.run(
        [sys.executable, *seed], env=environ, cwd=ROOT, check=True, capture_output=True, text=True
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "controlplane.asgi:application", "--port", str(port),
         "--log-level", "warning"],
        env=environ, cwd=ROOT,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server ended with {server.returncode} while starting"
        try:
            httpx.get(url + "/login/", timeout=2)
            return server, Site(url, home, seeded.stdout.strip(), environ)
        except httpx.TransportError:
            time.sleep(0.2)
    server.kill()
    raise AssertionError(f"the server did not answer within {START_S:g} s")


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(10)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    server, running = start(tmp_path_factory.mktemp("home"), fill=True)
    yield running
    stop(server)


@pytest.fixture(scope="package")
def empty_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    server, running = start(tmp_path_factory.mktemp("empty"), fill=False)
    yield running
    stop(server)


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
