"""Engines whose counters grow by what a test says, scraped every 5 s."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import tenant_create
from slo.models import Objective
from slo.services import objective_apply
from tests.memory_reader import MemoryReader

START = datetime(2026, 3, 1, tzinfo=UTC)
WINDOW = timedelta(seconds=15)
SETTLED = timedelta(seconds=6.5)
TTFT = "vllm:time_to_first_token_seconds"


class Engine:
    """Counts requests under and over 500 ms; the last sample of a window is at its very end."""

    def __init__(self, reader: MemoryReader, name: str = "engine-0", service: str = "chat") -> None:
        self.reader, self.labels = reader, {"instance": name, "service": service}
        reader.bounds[TTFT] = [0.25, 0.5, 1.0]
        self.counts = [0.0, 0.0, 0.0, 0.0, 0.0]  # of the four buckets, and the sum
        self.window = 0
        self.scrape(START)

    def scrape(self, at: datetime) -> None:
        self.reader.add(TTFT, at, tuple(self.counts), self.labels)

    def serve(self, good: int, bad: int, *, windows: int = 1) -> datetime:
        """Good and bad events per window; returns the end of the last one."""
        for _ in range(windows):
            begin = START + self.window * WINDOW
            for scrape in (1, 2):
                self.scrape(begin + timedelta(seconds=5 * scrape))
            self.counts[1] += good
            self.counts[2] += bad
            self.window += 1
            self.scrape(begin + WINDOW)
        return START + self.window * WINDOW

    def silence(self, *, windows: int) -> datetime:
        """Nothing is scraped."""
        self.window += windows
        return START + self.window * WINDOW


def a_tenant(slug: str) -> Tenant:
    return tenant_create(slug=slug, name=slug.title())


def an_objective(tenant: Tenant, **changes: object) -> Objective:
    spec = {
        "slug": "chat-ttft",
        "name": "First token within 500 ms",
        "service": "chat",
        "indicator": "latency",
        "spec": {"source": "metric", "metric": TTFT, "threshold_ms": 500},
        "target": 0.99,
        **changes,
    }
    return objective_apply(tenant=tenant, spec=spec)
