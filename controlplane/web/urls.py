"""Every page by name; nouns as addresses."""

from __future__ import annotations

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from controlplane.web.live import events
from controlplane.web.pages.incidents import incident, incidents
from controlplane.web.pages.objectives import objective, objectives
from controlplane.web.pages.overview import overview
from controlplane.web.pages.series import series
from controlplane.web.pages.traces import trace

urlpatterns = [
    path("", overview, name="overview"),
    path("login/", LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("objectives/", objectives, name="objectives"),
    path("objectives/<slug:slug>/", objective, name="objective"),
    path("incidents/", incidents, name="incidents"),
    path("incidents/<uuid:incident_id>/", incident, name="incident"),
    path("traces/<slug:trace_id>/", trace, name="trace"),
    path("events/", events, name="events"),
    path("series/<slug:slug>/", series, name="series"),
]
