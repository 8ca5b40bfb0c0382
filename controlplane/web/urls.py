"""Every page by name; nouns as addresses."""

from __future__ import annotations

from django.contrib.auth.views import LoginView
from django.urls import include, path
from django.views.generic import RedirectView
from django.views.i18n import set_language

from controlplane.web.access import SignOut
from controlplane.web.forms import SignInForm
from controlplane.web.live import events
from controlplane.web.pages.actions import action_link, action_order
from controlplane.web.pages.contracts import contract, contracts
from controlplane.web.pages.fleet import fleet, node
from controlplane.web.pages.incidents import incident, incidents
from controlplane.web.pages.ledger import action_new, actions
from controlplane.web.pages.objectives import objective, objectives
from controlplane.web.pages.overview import overview
from controlplane.web.pages.policies import freeze_order, policies, unfreeze_order
from controlplane.web.pages.policy import policy_delete_order, policy_edit
from controlplane.web.pages.series import series
from controlplane.web.pages.settings_audit import audit_log
from controlplane.web.pages.settings_channels import (
    channel_list,
    channel_one,
    channel_remove_order,
    channel_test_order,
)
from controlplane.web.pages.settings_deliveries import delivery_list
from controlplane.web.pages.settings_members import (
    member_active_order,
    member_link_order,
    member_list,
    member_remove_order,
    member_role_order,
)
from controlplane.web.pages.settings_password import ChoosePassword, password
from controlplane.web.pages.settings_silences import silence_end_order, silence_list
from controlplane.web.pages.settings_tokens import token_list, token_revoke_order
from controlplane.web.pages.traces import trace, traces
from controlplane.web.pages.ui import ui, ui_series

SETTINGS = [
    path("channels/", channel_list, name="settings-channels"),
    path("channels/<uuid:channel_id>/", channel_one, name="settings-channel"),
    path("channels/<uuid:channel_id>/test/", channel_test_order, name="settings-channel-test"),
    path(
        "channels/<uuid:channel_id>/remove/", channel_remove_order, name="settings-channel-remove"
    ),
    path("deliveries/", delivery_list, name="settings-deliveries"),
    path("silences/", silence_list, name="settings-silences"),
    path("silences/<uuid:silence_id>/end/", silence_end_order, name="settings-silence-end"),
    path("tokens/", token_list, name="settings-tokens"),
    path("tokens/<uuid:token_id>/revoke/", token_revoke_order, name="settings-token-revoke"),
    path("members/", member_list, name="settings-members"),
    path("members/<int:member_id>/role/", member_role_order, name="settings-member-role"),
    path("members/<int:member_id>/link/", member_link_order, name="settings-member-link"),
    *(
        path(
            f"members/<int:member_id>/{verb}/",
            member_active_order,
            {"verb": verb},
            name=f"settings-member-{verb}",
        )
        for verb in ("activate", "deactivate")
    ),
    path("members/<int:member_id>/remove/", member_remove_order, name="settings-member-remove"),
    path("password/", password, name="settings-password"),
    path("audit/", audit_log, name="settings-audit"),
]
urlpatterns = [
    path("", overview, name="overview"),
    path(
        "login/",
        LoginView.as_view(authentication_form=SignInForm, redirect_authenticated_user=True),
        name="login",
    ),
    path("welcome/<str:uidb64>/<str:token>/", ChoosePassword.as_view(), name="password-choose"),
    path("logout/", SignOut.as_view(), name="logout"),
    path("language/", set_language, name="language"),
    path("objectives/", objectives, name="objectives"),
    path("objectives/<slug:slug>/", objective, name="objective"),
    path("incidents/", incidents, name="incidents"),
    path("incidents/<uuid:incident_id>/", incident, name="incident"),
    path("actions/", actions, name="actions"),
    path("actions/new/", action_new, name="action-new"),
    path("actions/<uuid:action_id>/<slug:verb>/", action_order, name="action-order"),
    path("a/<str:token>/", action_link, name="action-link"),
    path("policies/", policies, name="policies"),
    path("policies/edit/", policy_edit, name="policy"),
    path("policies/delete/", policy_delete_order, name="policy-delete"),
    path("policies/freeze/", freeze_order, name="freeze"),
    path("policies/<uuid:policy_id>/unfreeze/", unfreeze_order, name="unfreeze"),
    path("traces/", traces, name="traces"),
    path("traces/<slug:trace_id>/", trace, name="trace"),
    path("fleet/", fleet, name="fleet"),
    path("fleet/<path:name>/", node, name="node"),
    path("contracts/", contracts, name="contracts"),
    path("contracts/<slug:slug>/", contract, name="contract"),
    path("settings/", RedirectView.as_view(pattern_name="settings-channels"), name="settings"),
    path("settings/", include(SETTINGS)),
    path("ui/", ui, name="ui"),
    path("ui/series/", ui_series, name="ui-series"),
    path("events/", events, name="events"),
    path("series/<slug:slug>/", series, name="series"),
]
