from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.app.log import Logging

from controlplane.celery import PASS_AFTER, AfterEachScrape, SteadyScheduler
from controlplane.celery import app as celery_app


class Noted(SteadyScheduler):
    """Notes what it would have sent."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.app.sent.append(entry.name)


def test_a_worker_leaves_the_level_of_the_log_to_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Logging, "_setup", False)
    level = logging.getLogger().level
    Logging(celery_app).setup(loglevel="CRITICAL")
    assert logging.getLogger().level == level


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


def test_a_pass_runs_shortly_after_each_scrape_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Celery("beat-test", broker="memory://", set_as_current=False)
    schedule = AfterEachScrape(5, app)
    clock = datetime(2026, 3, 1, 0, 0, 4, tzinfo=UTC)
    monkeypatch.setattr(app, "now", lambda: clock)
    late = timedelta(seconds=5 * PASS_AFTER)
    last_run_at = datetime(2026, 3, 1, 0, 0, 1, tzinfo=UTC)
    due, wait_s = schedule.is_due(last_run_at)
    assert (due, wait_s) == (False, pytest.approx(1 + late.total_seconds()))
    clock = datetime(2026, 3, 1, 0, 0, 5, tzinfo=UTC) + late
    due, wait_s = schedule.is_due(last_run_at)
    assert (due, wait_s) == (True, pytest.approx(5))
    due, wait_s = schedule.is_due(clock)
    assert (due, wait_s) == (False, pytest.approx(5))
    clock += timedelta(seconds=13)  # a late one is not made up for
    due, wait_s = schedule.is_due(last_run_at)
    assert (due, wait_s) == (True, pytest.approx(2))


def test_a_task_does_not_wait_for_the_worker_of_this_process_to_look() -> None:
    with celery_app.connection_for_read() as connection:
        assert connection.transport.polling_interval <= 0.1
