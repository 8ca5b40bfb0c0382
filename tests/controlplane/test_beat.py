from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from controlplane.celery import SteadyScheduler
from controlplane.celery import app as celery_app


class Noted(SteadyScheduler):
    """Notes what it would have sent."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.app.sent.append(entry.name)


def test_a_clock_set_back_stops_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("beat-test", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {
        "fast": {"task": "x", "schedule": 5.0},
        "slow": {"task": "y", "schedule": 15.0},
    }
    clock = datetime(2026, 3, 1, tzinfo=UTC)
    app.sent = []
    monkeypatch.setattr(app, "now", lambda: clock)
    scheduler = Noted(app)

    def pass_s(seconds: int) -> list[str]:
        nonlocal clock
        app.sent.clear()
        for _ in range(seconds):
            clock += timedelta(seconds=1)
            while scheduler.tick() == 0:
                pass
        return sorted(app.sent)

    assert pass_s(30) == ["fast"] * 6 + ["slow"] * 2
    clock -= timedelta(hours=2)
    after = pass_s(31)
    assert after.count("fast") >= 5
    assert after.count("slow") >= 1


def test_a_task_does_not_wait_for_the_worker_of_this_process_to_look() -> None:
    with celery_app.connection_for_read() as connection:
        assert connection.transport.polling_interval <= 0.1
