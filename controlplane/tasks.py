"""Celery's tasks: each body is one call."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from controlplane import loop
from controlplane.alerts import services as alerts
from slo import services as slo


@shared_task
def loop_pass() -> None:
    loop.run_pass(timezone.now())


@shared_task
def deliver_due() -> None:
    alerts.deliver_due(timezone.now())


@shared_task
def prune() -> None:
    slo.readings_prune(timezone.now())
