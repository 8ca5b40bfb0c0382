"""Celery's tasks: bodies of a few calls, no logic."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from controlplane import loop
from controlplane.accounts import services as accounts
from controlplane.actions import retention as actions
from controlplane.alerts import outbox
from controlplane.alerts import retention as alerts
from controlplane.diagnosis import retention as diagnosis
from controlplane.fleet import services as fleet
from slo import contracts
from slo import services as slo


@shared_task
def loop_pass() -> None:
    loop.run_pass(timezone.now())


@shared_task
def deliver_due() -> None:
    outbox.deliver_due(timezone.now())


@shared_task
def prune() -> None:
    """Lowest room last: what hangs on a row goes before it."""
    now = timezone.now()
    before = now - timedelta(days=settings.TRIMTAB_RETENTION_DAYS)
    actions.prune(before)
    alerts.prune(before)
    diagnosis.prune(before)
    fleet.prune(before)
    contracts.contracts_settle(now)
    slo.readings_prune(now)
    accounts.prune(now)
