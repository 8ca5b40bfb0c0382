"""What runs when: the whole beat schedule."""

from __future__ import annotations

import math
import os
from datetime import datetime
from typing import Any

from celery import Celery
from celery.beat import Scheduler
from celery.schedules import schedstate, schedule
from celery.signals import setup_logging
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

# Of a scrape: what an agent reads and sends is durable by then.
PASS_AFTER = 0.15

app = Celery("trimtab")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["controlplane"])


@setup_logging.connect
def leave_the_log_alone(**_: Any) -> None:
    """Settings say what is logged; without a receiver a worker sets the level of all loggers."""


class AfterEachScrape(schedule):
    """PASS_AFTER of a scrape after each multiple of it since the epoch: agents read their engines
    just before, so a pass finds what they saw."""

    def __init__(self, scrape_s: float, app: Celery) -> None:
        super().__init__(scrape_s, app=app)
        self.scrape_s = scrape_s

    def is_due(self, last_run_at: datetime) -> schedstate:
        late_s = PASS_AFTER * self.scrape_s
        now_s = self.now().timestamp() - late_s
        place = math.floor(now_s / self.scrape_s)
        due = place > math.floor((last_run_at.timestamp() - late_s) / self.scrape_s)
        return schedstate(due, (place + 1) * self.scrape_s - now_s)


app.conf.beat_schedule = {
    "loop": {
        "task": "controlplane.tasks.loop_pass",
        "schedule": AfterEachScrape(settings.TRIMTAB_SCRAPE_S, app),
        # A pass that waited for a slow one has nothing to add.
        "options": {"expires": settings.TRIMTAB_SCRAPE_S},
    },
    "deliver": {
        "task": "controlplane.tasks.deliver_due",
        "schedule": 2.0,
        "options": {"expires": 2.0},
    },
    "prune": {"task": "controlplane.tasks.prune", "schedule": 3600.0},
}


class SteadyScheduler(Scheduler):
    """Keeps time in memory, and on when the wall clock is set back.

    Celery compares an entry's last run to the clock: an hour set back is an hour without a pass
    (and its default scheduler would keep that over a restart, in a file).
    """

    def tick(self, *args: Any, **kwargs: Any) -> float:
        now = self.app.now()
        for entry in self.schedule.values():
            if entry.last_run_at is None or entry.last_run_at > now:
                entry.last_run_at = now
                self._heap = None  # holds times of the old clock; made anew from the entries
        return super().tick(*args, **kwargs)
