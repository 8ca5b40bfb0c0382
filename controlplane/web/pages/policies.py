"""/policies/: how far the autopilot may go, engine by engine, and the button that stops it all."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.actions.models import Policy
from controlplane.actions.policies import PolicyError, freeze, unfreeze
from controlplane.actions.policy import Rules, freezes_of, rules_of_each, undo_failed_each
from controlplane.actions.words import translated
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engines_of
from controlplane.web.access import TenantRequest, order, page, send
from controlplane.web.forms import FREEZES, FreezeForm
from controlplane.web.pages.policy import policy_shown, scope_asked
from controlplane.web.policy import (
    Scope,
    Term,
    freeze_said,
    held_words,
    origin_words,
    own_terms,
    scopes_of,
)

ENGINES_MAX = 200


@dataclass(frozen=True)
class Row:
    """One engine with the policy in force. `held` says why nothing may be changed now, or ""."""

    engine: Engine
    rules: Rules
    origin: str
    held: str

    @property
    def scope(self) -> Scope:
        return Scope(engine=self.engine.name)


@dataclass(frozen=True)
class Written:
    """A scope and what it says itself; `frozen` says why nothing is changed in it, or ""."""

    scope: Scope
    terms: list[Term]
    frozen: str


@page
def policies(request: TenantRequest) -> HttpResponse:
    return _shown(request, FreezeForm())


def _shown(request: TenantRequest, form: FreezeForm, status: int = 200) -> HttpResponse:
    now = timezone.now()
    engines = engines_of(request.tenant)
    freezes = freezes_of(request.tenant, now)
    shown = engines[:ENGINES_MAX]
    rules, failed = rules_of_each(shown), undo_failed_each(shown)
    context = {
        "rows": [
            _row(engine, rules[engine.pk], now, failed.get(engine.pk, "")) for engine in shown
        ],
        "more": max(0, len(engines) - ENGINES_MAX),
        "freezes": [(policy, freeze_said(policy, now)) for policy in freezes],
        "written": _written(request.tenant, engines, now),
        "form": form,
        "page_state": "warn" if freezes else "ok",
    }
    return send(request, "policies.html", context, parts=("all",), status=status)


@order
def freeze_order(request: TenantRequest) -> HttpResponse:
    """Freezes the scope the address names. Answers 400 with its page, and what is wrong beside the
    field. Raises Http404 for a scope this tenant does not have."""
    scope, now = scope_asked(request), timezone.now()
    form = FreezeForm(request.POST, id_prefix="id" if scope == Scope() else "freeze")
    if form.is_valid():
        lasts = FREEZES[form.cleaned_data["minutes"]][0]
        try:
            freeze(
                tenant=request.tenant,
                actor=request.user.get_username(),
                now=now,
                reason=form.cleaned_data["reason"],
                until=now + lasts if lasts else None,
                **scope.names,
            )
            return redirect("policies")
        except PolicyError as error:
            form.refuse(error.param, translated(error.words))
    if scope != Scope():
        return policy_shown(request, scope, freeze=form, status=400)
    return _shown(request, form, 400)


@order
def unfreeze_order(request: TenantRequest, policy_id: UUID) -> HttpResponse:
    """Raises Http404 for another tenant's policy as for one that never was."""
    policy = Policy.objects.filter(tenant=request.tenant, pk=policy_id).first()
    if policy is None:
        raise Http404(f"policy {policy_id} is not one of {request.tenant}")
    unfreeze(policy=policy, actor=request.user.get_username(), now=timezone.now())
    return redirect("policies")


def _row(engine: Engine, rules: Rules, now: datetime, failed: str) -> Row:
    return Row(
        engine=engine,
        rules=rules,
        origin=origin_words(rules, "mode", engine),
        held=held_words(engine, rules, now, failed=failed),
    )


def _written(tenant: Tenant, engines: list[Engine], now: datetime) -> list[Written]:
    rows = {Scope(row.service, row.engine): row for row in Policy.objects.filter(tenant=tenant)}
    return [
        Written(
            scope=scope,
            terms=own_terms(rows.get(scope)),
            frozen=freeze_said(rows[scope], now) if scope in rows else "",
        )
        for scope in scopes_of(tenant, engines)
    ]
