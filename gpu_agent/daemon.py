"""The agent, put together: who runs on which thread, and what each may wait for.

collect-<source>   reads one source on the beat, writes to the spool; waits for nobody else
send               drains the spool to the OTLP receiver; waits for the server, with backoff
sync               heartbeat, results out, commands in; waits for the server, with backoff
guard-<engine>     carries out commands, keeps the revert timer; waits for its engine only
health             answers /healthz and /metrics from memory
"""

from __future__ import annotations

import fcntl
import logging
import signal
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from gpu_agent import otlp
from gpu_agent.clock import Clock, utc_text
from gpu_agent.collector import Collector
from gpu_agent.config import Config, ConfigError
from gpu_agent.engine_adapter import adapter_classes
from gpu_agent.footprint import Footprint
from gpu_agent.guard import Guard
from gpu_agent.health import HealthServer
from gpu_agent.journal import Journal
from gpu_agent.limits import load_bounds
from gpu_agent.own_metrics import OwnMetrics
from gpu_agent.protocol import (
    Command,
    CommandState,
    EngineReport,
    SyncReply,
    SyncRequest,
)
from gpu_agent.source import Place, Source, source_classes
from gpu_agent.spool import Answer, Sender, Spool
from gpu_agent.standing import Standing
from gpu_agent.transport import Connection, SyncLoop

log = logging.getLogger(__name__)

RESULTS_PER_SYNC_MAX = 200
STOP_S_MAX = 10.0
METRICS_PATH = "/v1/metrics"


def agent_version() -> str:
    try:
        return metadata.version("trimtab")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"


class Agent:
    """Owns the state folder. Raises ConfigError when another agent does, or a limit is wrong."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.version = agent_version()
        self.clock = Clock()
        self.stop = threading.Event()
        self.failed = False
        self._lock_state()
        load_bounds(config.bounds_file)  # a wrong file shall fail the start, not the first change
        self.journal = Journal(config.state_dir / "journal.sqlite3")
        self.spool = Spool(
            config.state_dir / "spool",
            bytes_max=config.spool_bytes_max,
            age_s_max=config.spool_age_s_max,
        )
        self.footprint = Footprint()
        self.sender = self._make_sender()
        self.sync = self._make_sync()
        self.guards = self._make_guards()
        sources = self._make_sources()
        self.gpu_source = next((source for source in sources if source.gpu_status), None)
        self.collectors: list[Collector] = []
        self.own = OwnMetrics(
            node=config.node,
            footprint=self.footprint,
            gpu_source=self.gpu_source,
            spool=self.spool,
            sender=self.sender,
            sync=self.sync,
            collectors=self.collectors,
        )
        self.collectors += [
            Collector(source, self.spool, scrape_s=config.scrape_s, version=self.version)
            for source in [*sources, self.own]
        ]

    def _lock_state(self) -> None:
        """One agent per state folder: two would send twice and undo each other's changes."""
        path = self.config.state_dir / "lock"
        self._lock = path.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"state_dir: {self.config.state_dir} is in use by another agent, "
                "want one folder for each"
            ) from None

    def _make_sender(self) -> Sender:
        config = self.config
        connection = Connection(config.otlp_url, timeout_s=config.timeout_s, ca_file=config.ca_file)

        def post(body: bytes, headers: dict[str, str]) -> Answer:
            return connection.post(METRICS_PATH, body, headers)

        return Sender(
            self.spool,
            post,
            token=config.ingest_token,
            standing=Standing(
                lost=f"telemetry is not taken at {config.otlp_url}",
                back=f"telemetry is taken again at {config.otlp_url}",
            ),
            rejected_points=otlp.rejected_points,
        )

    def _make_sync(self) -> SyncLoop:
        config = self.config
        connection = Connection(
            config.control_plane_url, timeout_s=config.timeout_s, ca_file=config.ca_file
        )
        return SyncLoop(
            connection, token=config.agent_token, request=self.request, handle=self.handle
        )

    def _make_guards(self) -> dict[str, Guard]:
        config = self.config
        adapters = adapter_classes()
        return {
            engine.name: Guard(
                engine.name,
                adapters[engine.adapter](url=engine.url, timeout_s=config.timeout_s),
                self.journal,
                stop_file=config.stop_file,
                bounds_file=config.bounds_file,
                clock=self.clock,
                server_offset_s=lambda: self.sync.offset_s,
                changed=self.sync.wake,
                read_every_s=config.scrape_s,
            )
            for engine in config.engines
        }

    def _make_sources(self) -> list[Source]:
        config = self.config
        place = Place(
            node=config.node,
            engines=[(engine.name, engine.service, engine.url) for engine in config.engines],
            timeout_s=min(config.timeout_s, config.scrape_s),
            gpu=config.gpu,
        )
        kinds = source_classes().values()
        return [source for kind in kinds for source in kind.build(place)]

    # -- what the sync loop says and hears ----------------------------------------------------

    def request(self, stopping: bool) -> SyncRequest:
        """The next heartbeat. Costs no call to an engine or a driver."""
        _, spool_bytes, oldest_age_s = self.spool.depth()
        cpu_s, rss_bytes = self.footprint.read(
            self.gpu_source.worker_pid if self.gpu_source else None
        )
        return SyncRequest(
            agent_id=self.config.agent_id,
            boot_id=self.clock.boot_id,
            node=self.config.node,
            agent_version=self.version,
            sent_at=utc_text(self.clock.wall_s()),
            gpus=self.gpu_source.gpus if self.gpu_source else [],
            gpu_status=self.gpu_source.gpu_status if self.gpu_source else "off",
            engines=self.engine_reports(),
            results=self.journal.results(RESULTS_PER_SYNC_MAX),
            spool_bytes=spool_bytes,
            spool_oldest_age_s=oldest_age_s,
            spool_dropped_total=sum(self.spool.dropped.values()),
            cpu_seconds_total=cpu_s,
            rss_bytes=rss_bytes,
            stopping=stopping,
            kill_switch=self.config.stop_file.exists(),
        )

    def engine_reports(self) -> list[EngineReport]:
        reports = []
        for engine in self.config.engines:
            guard = self.guards[engine.name]
            state, error = guard.state, guard.error
            reports.append(
                EngineReport(
                    name=engine.name,
                    service=engine.service,
                    adapter=engine.adapter,
                    url=engine.url,
                    reachable=state is not None and not error,
                    model=state.model if state else "",
                    config_version=state.config_version if state else None,
                    values=dict(state.values) if state else {},
                    knobs=dict(state.knobs) if state else {},
                    changed_by=state.changed_by if state else "",
                    changed_at=state.changed_at if state else "",
                    error=error,
                )
            )
        return reports

    def handle(self, request: SyncRequest, reply: SyncReply) -> None:
        """Journals the commands, wakes their guards, and lets go of the results that arrived."""
        accepted = set(reply.accepted_results)
        self.journal.accepted([r for r in request.results if r.command_id in accepted])
        for command in reply.commands:
            self.receive(command)

    def receive(self, command: Command) -> None:
        fresh = self.journal.receive(command)
        guard = self.guards.get(command.engine)
        if guard is not None:
            guard.wake()
        elif fresh:
            here = ", ".join(self.guards) or "none"
            reason = f"engine: {command.engine!r} is not on this node, here: {here}"
            self.journal.finish(command.command_id, CommandState.REJECTED, reason)

    # -- health -------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """`ok` is about the agent: it can reach the control plane and write its spool."""
        batches, spool_bytes, age_s = self.spool.depth()
        parts = {
            **{f"source {c.source.name}": c.standing.to_json() for c in self.collectors},
            "telemetry": self.sender.standing.to_json(),
            "sync": self.sync.standing.to_json(),
        }
        return {
            "ok": all(p["state"] != "bad" for name, p in parts.items() if name != "source gpu"),
            "node": self.config.node,
            "agent_id": self.config.agent_id,
            "version": self.version,
            "gpu": self.gpu_source.gpu_status if self.gpu_source else "off",
            "kill_switch": self.config.stop_file.exists(),
            "parts": parts,
            "spool": {
                "batches": batches,
                "bytes": spool_bytes,
                "oldest_age_s": round(age_s, 3),
                "dropped": dict(self.spool.dropped),
            },
            "engines": [
                {"name": r.name, "reachable": r.reachable, "config_version": r.config_version}
                for r in self.engine_reports()
            ],
        }

    # -- life ---------------------------------------------------------------------------------

    def run(self, ready: Callable[[str], None]) -> bool:
        """Until SIGTERM or SIGINT comes; False when a fault of ours ended it.

        Raises ConfigError when the health port is in use.
        """
        server = self._serve_health()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop.set())
        threads = self._start()
        host, port = server.server_address[:2]
        engines = ", ".join(self.guards) or "no engine"
        ready(
            f"agent ready: node {self.config.node}, {engines}, "
            f"health on http://{host!s}:{port}/healthz"
        )
        self.stop.wait()
        self._finish(threads)
        server.shutdown()
        server.server_close()
        return not self.failed

    def _serve_health(self) -> HealthServer:
        address = (self.config.health_host, self.config.health_port)
        try:
            server = HealthServer(address, health=self.health, families=self.own.families)
        except OSError as error:
            raise ConfigError(
                f"health_port: {address[0]}:{address[1]}: {error.strerror}; "
                "want a free port, 0 takes any"
            ) from error
        server.start()
        return server

    def _start(self) -> list[threading.Thread]:
        jobs: dict[str, Callable[[threading.Event], None]] = {
            **{f"guard-{name}": guard.run for name, guard in self.guards.items()},
            **{f"collect-{c.source.name}": c.run for c in self.collectors},
            "send": self.sender.run,
            "sync": self.sync.run,
        }
        threads = [
            threading.Thread(target=self._keep, args=(run,), name=name, daemon=True)
            for name, run in jobs.items()
        ]
        for thread in threads:
            thread.start()
        return threads

    def _keep(self, run: Callable[[threading.Event], None]) -> None:
        """A thread that dies of a fault of ours takes the agent along: half an agent is none.

        Whoever supervises starts it again, and the journal says what was open.
        """
        try:
            run(self.stop)
        except Exception:
            if not self.stop.is_set():
                log.exception("%s died, the agent stops", threading.current_thread().name)
                self.failed = True
                self.stop.set()

    def _finish(self, threads: list[threading.Thread]) -> None:
        """A change in progress is finished or left to the journal; the spool stays on disk."""
        for guard in self.guards.values():
            guard.wake()
        self.sync.wake()
        deadline = time.monotonic() + STOP_S_MAX
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.name == "sync" and thread.is_alive() for thread in threads):
            self.sync.say_goodbye()
        for collector in self.collectors:
            collector.source.close()
        self.journal.close()
