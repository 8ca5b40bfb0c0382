"""Where every address leads: pages from web, `/api/v1/` from each noun's own room."""

from __future__ import annotations

from django.urls import include, path

from controlplane.web.pages import health, reference

urlpatterns = [
    path("health", health.health, name="health"),
    path("metrics", health.metrics, name="metrics"),
    path("api/v1/", reference.reference, name="reference"),
    path("api/v1/schema/", reference.schema, name="schema"),
    path("api/v1/", include("controlplane.accounts.api")),
    path("api/v1/", include("tracing.api")),
    path("api/v1/", include("slo.api")),
    path("api/v1/", include("controlplane.fleet.api")),
    path("api/v1/", include("controlplane.diagnosis.api")),
    path("api/v1/", include("controlplane.actions.api")),
    path("api/v1/", include("controlplane.alerts.api")),
    path("", include("controlplane.web.urls")),
]
handler400 = "controlplane.web.pages.errors.bad_request"
handler403 = "controlplane.web.pages.errors.permission_denied"
handler404 = "controlplane.web.pages.errors.page_not_found"
handler500 = "controlplane.web.pages.errors.server_error"
