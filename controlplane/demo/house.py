"""One house: control plane, engine and agent as real processes over one state folder.

The demo, the benches, `make chaos` and the integration tests all start the product this way.
No Django here: a process can hold only one TRIMTAB_HOME, a bench needs several.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain, count
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import httpx

from controlplane.demo.processes import Processes
from engine.load import Request
from engine.replay import Capacity, calibrate

READY_S_MAX = 60.0
FAULTS_TOKEN = "TRIMTAB_FAULTS_TOKEN"  # noqa: S105
PROCESSES = ("control-plane", "engine", "agent")
# From where in the range a process begins keeps houses of several processes apart.
PORT_MIN, PORT_COUNT = 20_000, 12_000
PORTS = (PORT_MIN + (os.getpid() * 997 + i) % PORT_COUNT for i in count())


class NotReady(Exception):
    """A process did not answer in time, or a port is taken; says which and what to do."""


def free_port() -> int:
    """A port nobody listens on, another at each call.

    Below those the kernel lends to clients (from 32768 on Linux): one of these that is free now
    may be the near end of somebody's connection by the time a server is started on it.
    """
    return next(port for port in PORTS if not in_use(port))


def in_use(port: int) -> bool:
    with socket.socket() as sock:
        # As servers do: what closed connections left behind is in nobody's way.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


@dataclass(frozen=True)
class Ports:
    """Where a house listens. `Ports.free()` picks unused ones."""

    web: int = 8000
    otlp: int = 4318
    otlp_grpc: int = 4317
    engine: int = 8100
    agent: int = 8200
    receiver: int = 8300

    @classmethod
    def free(cls) -> Ports:
        return cls(*(free_port() for _ in fields(cls)))

    def taken(self) -> dict[str, int]:
        """The ports something else listens on."""
        return {name: port for name, port in vars(self).items() if in_use(port)}


@dataclass
class House:
    """Prepares and runs one house. `settings` are TRIMTAB_… variables for the control plane.

    `engine_options` are added to the engine's command line; `faults` opens its door for faults.
    `knobs` is how somebody has set the engine up before anything looks at it. `objectives` are
    promised besides those of every house. Of more `engines` than one, all under one agent, the
    others are processes called by their names.
    """

    home: Path
    ports: Ports
    settings: dict[str, str] = field(default_factory=dict)
    model: str = "1.3m"
    scrape_s: float = 5.0
    service: str = "chat"
    engine_name: str = "engine-0"
    node: str = "node-0"
    engine_options: tuple[str, ...] = ()
    knobs: Mapping[str, Any] = field(default_factory=dict)
    objectives: tuple[Mapping[str, Any], ...] = ()
    faults: bool = False
    engines: int = 1

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.processes = Processes(self.home)
        self.secrets: dict[str, str] = {}
        self.faults_token = token_urlsafe()
        self.more_ports = {f"engine-{i}": free_port() for i in range(1, self.engines)}

    @property
    def web_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.web}"

    @property
    def otlp_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.otlp}"

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.engine}"

    @property
    def engine_urls(self) -> dict[str, str]:
        """By the engine's name."""
        more = {name: f"http://127.0.0.1:{port}" for name, port in self.more_ports.items()}
        return {self.engine_name: self.engine_url, **more}

    @property
    def env(self) -> dict[str, str]:
        return {
            # Not what the caller runs under: its settings may be a test's.
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "TRIMTAB_HOME": str(self.home),
            "TRIMTAB_PUBLIC_URL": self.web_url,
            "TRIMTAB_WEB_PORT": str(self.ports.web),
            "TRIMTAB_OTLP_PORT": str(self.ports.otlp),
            "TRIMTAB_OTLP_GRPC_PORT": str(self.ports.otlp_grpc),
            "TRIMTAB_SCRAPE_S": f"{self.scrape_s:g}",
            **self.settings,
        }

    def prepare(self) -> None:
        """Owner, tokens, objectives, channel. Raises NotReady with what was printed."""
        done = subprocess.run(
            [sys.executable, "-m", "controlplane.demo.prepare",
             f"http://127.0.0.1:{self.ports.receiver}/", json.dumps(self.objectives)],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise NotReady(f"could not prepare {self.home}:\n{done.stderr}")
        self.secrets = json.loads(done.stdout)

    def start_control_plane(self) -> None:
        self.processes.start(
            "control-plane", [sys.executable, "-m", "controlplane.cli", "up"], self.env
        )

    def start_engine(self, name: str = "engine") -> None:
        port = self.more_ports.get(name, self.ports.engine)
        engine = name if name in self.more_ports else self.engine_name
        self.processes.start(
            name,
            [sys.executable, "-m", "engine", "--port", str(port),
             "--name", engine, "--service", self.service, "--node", self.node,
             "--model", self.model, "--state", str(self.home / engine),
             "--otlp", self.otlp_url, *self.engine_options,
             *(("--faults-token-env", FAULTS_TOKEN) if self.faults else ())],
            {"TRIMTAB_INGEST_TOKEN": self.secrets["ingest"], FAULTS_TOKEN: self.faults_token},
        )  # fmt: skip

    def start_agent(self) -> None:
        engines = (
            ("--engine", f"name={name},service={self.service},adapter=reference,url={url}")
            for name, url in self.engine_urls.items()
        )
        self.processes.start(
            "agent",
            [sys.executable, "-m", "gpu_agent", "--node", self.node,
             "--state-dir", str(self.home / f"agent-{self.node}"),
             "--control-plane-url", self.web_url, "--otlp-url", self.otlp_url,
             "--health-port", str(self.ports.agent), "--scrape-s", f"{self.scrape_s:g}",
             *chain.from_iterable(engines)],
            {
                "TRIMTAB_INGEST_TOKEN": self.secrets["ingest"],
                "TRIMTAB_AGENT_TOKEN": self.secrets["agent"],
            },
        )  # fmt: skip

    def start_one(self, name: str) -> None:
        """Starts one of them again, over the state it left; awaits nothing."""
        if name == "control-plane":
            self.start_control_plane()
        elif name == "agent":
            self.start_agent()
        else:
            self.start_engine(name)

    def health_url(self, name: str) -> str:
        return {
            "control-plane": f"{self.web_url}/health",
            "engine": f"{self.engine_url}/health",
            "agent": f"http://127.0.0.1:{self.ports.agent}/healthz",
            **{engine: f"{url}/health" for engine, url in self.engine_urls.items()},
        }[name]

    def capacity(
        self,
        seconds: float = 6.0,
        values: dict[str, Any] | None = None,
        requests: Iterable[Request] | None = None,
    ) -> Capacity:
        """What an engine like this house's sustains here, measured on one of its own.

        `values` are knobs to measure under, the defaults otherwise; `requests` as `calibrate` has
        them. That engine tells nobody anything and is ended again: a measurement is no traffic.
        """
        port = free_port()
        name = "capacity"
        self.processes.start(
            name,
            [sys.executable, "-m", "engine", "--port", str(port), "--name", name,
             "--model", self.model, *self.engine_options],
            {},
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            self.wait(f"{url}/health", name)
            if values:
                set_knobs(url, values, by="measuring")
            return asyncio.run(calibrate(url, seconds=seconds, requests=requests))
        finally:
            self.processes.end(name)

    def start(self) -> None:
        """All of them, each awaited until it answers."""
        self.prepare()
        for name in (*PROCESSES[:-1], *self.more_ports, PROCESSES[-1]):
            self.start_one(name)
            self.wait(self.health_url(name), name)
            if name == "engine" and self.knobs:
                self.configure(dict(self.knobs), by="set-up")

    def wait(self, url: str, name: str) -> None:
        """Until the address answers 200. Raises NotReady after READY_S_MAX, Died if it ended."""
        deadline = time.monotonic() + READY_S_MAX
        while time.monotonic() < deadline:
            self.processes.check()
            try:
                if httpx.get(url, timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise NotReady(f"{name} did not answer at {url} within {READY_S_MAX:g} s:\n"
                       f"{self.processes.tail(name)}")  # fmt: skip

    def api(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON of a GET below /api/v1/, with a `body` of a POST. Raises httpx.HTTPError."""
        answer = httpx.request(
            "GET" if body is None else "POST",
            f"{self.web_url}/api/v1/{path}",
            headers={"Authorization": f"Bearer {self.secrets['api']}"},
            json=body,
            timeout=30,
        )
        answer.raise_for_status()
        return answer.json()

    def configure(self, values: dict[str, Any], by: str) -> dict[str, Any]:
        """Sets knobs by hand, as an operator would; returns the engine's answer."""
        return set_knobs(self.engine_url, values, by)

    def break_engine(self, fault: str, **how: Any) -> None:
        """Injects a fault (docs/engine.md), "none" mends all. Raises httpx.HTTPStatusError."""
        answer = httpx.post(
            f"{self.engine_url}/v1/faults",
            json={"fault": fault, **how},
            headers={"Authorization": f"Bearer {self.faults_token}"},
            timeout=30,
        )
        answer.raise_for_status()

    def stop(self) -> None:
        self.processes.stop()


def set_knobs(url: str, values: dict[str, Any], by: str) -> dict[str, Any]:
    """Changes an engine's configuration by compare-and-set. Raises httpx.HTTPStatusError."""
    with httpx.Client(base_url=url, timeout=30) as client:
        version = client.get("/v1/runtime_config").headers["ETag"]
        answer = client.patch(
            "/v1/runtime_config",
            json=values,
            headers={"If-Match": version, "X-Changed-By": by},
        )
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body
