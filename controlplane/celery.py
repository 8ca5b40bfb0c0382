"""What runs when: the whole beat schedule."""

from __future__ import annotations

import os

from celery import Celery
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

app = Celery("trimtab")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["controlplane"])

app.conf.beat_schedule = {
    "loop": {
        "task": "controlplane.tasks.loop_pass",
        "schedule": settings.TRIMTAB_SCRAPE_S,
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
