"""A real server over a seeded home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from controlplane.demo.house import free_port
from tests.catalogues import compile_all

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


@dataclass
class Site:
    """A running server: where it is, where its state lives, and what of its story has an address:
    `things` are fill.py's, by name."""

    url: str
    home: Path
    things: dict[str, str]
    environ: dict[str, str]
    process: subprocess.Popen[bytes]

    def run(self, code: str) -> str:
        """Runs Python beside the server, as another process of the control plane would."""
        return subprocess.run(
            [sys.executable, "-c", "import django; django.setup()\n" + code],
            env=self.environ, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
        ).stdout  # fmt: skip

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def start(home: Path, *, fill: bool) -> Site:
    """Seeds the home, and serves it."""
    compile_all()
    port = free_port()
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
        [sys.executable, *seed], env=environ, cwd=ROOT, check=True, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    return serve(home, environ, port, json.loads(seeded.stdout))


def beside(site: Site) -> Site:
    """A second server over the same home: the first owns the telemetry, so this one reads none."""
    return serve(site.home, site.environ, free_port(), site.things, "--lifespan", "off")


def serve(
    home: Path, environ: dict[str, str], port: int, things: dict[str, str], *options: str
) -> Site:
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "controlplane.asgi:application", "--port", str(port),
         "--log-level", "warning", *options],
        env=environ, cwd=ROOT,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode} while starting"
        try:
            httpx.get(url + "/login/", timeout=2)
            return Site(url, home, things, environ, process)
        except httpx.TransportError:
            time.sleep(0.2)
    process.kill()
    raise AssertionError(f"the server did not answer within {START_S:g} s")
