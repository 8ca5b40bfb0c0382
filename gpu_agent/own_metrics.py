"""The agent's metrics about itself, as one more source of telemetry."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpu_agent.collector import Collector
from gpu_agent.footprint import Footprint
from gpu_agent.source import Family, Kind, Place, Reading, Source
from gpu_agent.spool import Sender, Spool
from gpu_agent.transport import SyncLoop


class OwnMetrics(Source):
    """CPU, memory, spool, sync, and how the reading of each source goes."""

    slug = "agent"
    label = "The agent itself"
    name = "agent"

    def __init__(
        self,
        *,
        node: str,
        footprint: Footprint,
        gpu_source: Source | None,
        spool: Spool,
        sender: Sender,
        sync: SyncLoop,
        collectors: Sequence[Collector],
    ) -> None:
        self._footprint = footprint
        self._gpu_source = gpu_source
        self._spooled = spool
        self._sender = sender
        self._sync = sync
        self._collectors = collectors
        self._start_ns = time.time_ns()
        self._resource = {
            "service.name": "trimtab-agent",
            "service.instance.id": node,
            "host.name": node,
        }

    @classmethod
    def build(cls, place: Place) -> list[Source]:
        return []  # the daemon makes the one there is, from itself

    def collect(self) -> Reading:
        return Reading(self._resource, time.time_ns(), self.families(), self._start_ns)

    def families(self) -> list[Family]:
        return [*self._cost(), *self._spool(), *self._connections(), *self._sources()]

    def _cost(self) -> list[Family]:
        worker_pid = self._gpu_source.worker_pid if self._gpu_source else None
        cpu_s, rss_bytes = self._footprint.read(worker_pid)
        return [
            _one("agent:cpu_seconds_total", cpu_s, "CPU used, NVML worker included."),
            _one("agent:resident_memory_bytes", rss_bytes, "Memory, NVML worker included."),
        ]

    def _spool(self) -> list[Family]:
        batches, size_bytes, age_s = self._spooled.depth()
        dropped = Family("agent:spool_dropped_total", Kind.SUM, "Batches dropped, by reason.")
        for reason, count in dict(self._spooled.dropped).items():
            dropped.add(count, reason=reason)
        return [
            _one("agent:spool_batches", batches, "Batches waiting."),
            _one("agent:spool_bytes", size_bytes, "Bytes waiting."),
            _one("agent:spool_oldest_age_seconds", age_s, "Age of the oldest batch waiting."),
            dropped,
        ]

    def _connections(self) -> list[Family]:
        sender, sync = self._sender, self._sync
        errors = Family("agent:send_errors_total", Kind.SUM, "Sends that failed, by reason.")
        for reason, count in dict(sender.errors).items():
            errors.add(count, reason=reason)
        return [
            _one("agent:batches_sent_total", sender.sent, "Batches the receiver took."),
            _one("agent:points_rejected_total", sender.points_rejected, "Points it refused."),
            errors,
            _one("agent:sync_errors_total", sync.standing.errors_total, "Heartbeats that failed."),
            _one("agent:clock_offset_seconds", sync.offset_s, "Server clock minus this node's."),
        ]

    def _sources(self) -> list[Family]:
        success = Family("agent:scrape_success", Kind.GAUGE, "1 when the last reading was good.")
        duration = Family("agent:scrape_duration_seconds", Kind.GAUGE, "Time of the last reading.")
        errors = Family("agent:scrape_errors_total", Kind.SUM, "Readings that failed.")
        bad = Family("agent:scrape_bad_lines", Kind.GAUGE, "Lines refused in the last page.")
        over = Family("agent:scrape_series_over", Kind.GAUGE, "Series over the limit, left out.")
        series = Family("agent:scrape_series", Kind.GAUGE, "Series in the last page.")
        for collector in self._collectors:
            labels = {"kind": collector.source.slug, "source": collector.source.name}
            success.add(float(collector.standing.state == "good"), **labels)
            duration.add(collector.duration_s, **labels)
            errors.add(collector.standing.errors_total, **labels)
            for family, note in ((bad, "lines_bad"), (over, "series_over"), (series, "series")):
                if note in collector.notes:
                    family.add(collector.notes[note], **labels)
        return [success, duration, errors, bad, over, series]


def _one(name: str, value: float, help_text: str) -> Family:
    family = Family(name, Kind.SUM if name.endswith("_total") else Kind.GAUGE, help_text)
    family.add(float(value))
    return family
