"""Tells the telemetry room, at start-up, where its data lives (TRIMTAB_HOME/chdb)."""

from __future__ import annotations

from pathlib import Path

from django.apps import AppConfig
from django.conf import settings
from django.utils.translation import gettext_lazy as _

from tracing import wiring


class TracingConfig(AppConfig):
    name = "tracing"
    label = "tracing"
    verbose_name = _("Telemetry")

    def ready(self) -> None:
        wiring.configure(
            Path(settings.TRIMTAB_HOME) / "chdb",
            retention_days=getattr(settings, "TRIMTAB_RETENTION_DAYS", 30),
        )
