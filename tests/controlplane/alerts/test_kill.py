"""kill -9 in the middle of a send: nothing is lost, and what comes twice says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.controlplane.alerts.receiver import Receiver

ROOT = Path(__file__).resolve().parents[3]
SENDER = """
import sys
from datetime import datetime, timedelta, UTC
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from controlplane.accounts.models import Tenant
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.outbox import deliver_due
from controlplane.alerts.telling import incident_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Story
from slo.models import Objective

now = datetime(2026, 3, 1, 12, tzinfo=UTC)
tenant, new = Tenant.objects.get_or_create(slug="acme", name="Acme")
if new:
    objective = Objective.objects.create(tenant=tenant, slug="ttft", service="chat", target=0.9)
    Incident.objects.create(
        tenant=tenant, objective=objective, scope="engine-0", trigger="fast burn",
        bad_since=now, opened_at=now,
    )
    for name in ("a", "b"):
        Channel.objects.create(tenant=tenant, name=name, url=sys.argv[1])
incident_tell(incident=Incident.objects.get(), story=Story(what="T"), now=now)
later = now + timedelta(seconds=float(sys.argv[2]))
deliver_due(later, lambda: 0.0)
print(sorted(Delivery.objects.values_list("state", "attempts")))
"""


def start(home: Path, url: str, seconds: float) -> subprocess.Popen[str]:
    environment = os.environ | {
        "TRIMTAB_HOME": str(home), "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", SENDER, url, str(seconds)],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.processes
def test_a_killed_sender_loses_no_message(receiver: Receiver, tmp_path: Path) -> None:
    receiver.answer(200, "ok", delay_s=4)
    with start(tmp_path, receiver.url, 0) as first:
        deadline = time.monotonic() + 60
        while not receiver.got and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL
    assert len(receiver.got) == 1, "killed while the first was on its way, before the second"

    again, _ = start(tmp_path, receiver.url, 31).communicate(timeout=60)
    assert again.strip() == "[('sent', 1), ('sent', 2)]"
    ids = [headers["Trimtab-Delivery-Id"] for _, headers, _ in receiver.got]
    assert len(ids) == 3
    assert len(set(ids)) == 2, "the receiver can tell which came twice"
