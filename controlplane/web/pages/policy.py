"""/policies/edit/: what one scope says, and for an engine what holds and which scope says so."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.actions.models import Policy
from controlplane.actions.policies import PolicyError, policy_delete, policy_set
from controlplane.actions.policy import rules_of, undo_failed
from controlplane.actions.words import translated
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engines_of
from controlplane.web.access import TenantRequest, form_page, order, send
from controlplane.web.forms import FreezeForm
from controlplane.web.policy import (
    Scope,
    freeze_said,
    held_words,
    own_terms,
    scopes_of,
    terms_in_force,
)
from controlplane.web.policy_form import PolicyForm, initial_of


@form_page
def policy_edit(request: TenantRequest) -> HttpResponse:
    """A POST writes the scope's policy, through the same checks as REST; answers 400 with what is
    wrong beside each field. Raises Http404 for a scope this tenant does not have."""
    scope = scope_asked(request)
    if request.method != "POST":
        return policy_shown(request, scope)
    form = PolicyForm(request.POST)
    if form.is_valid() and form.check():
        try:
            policy_set(
                tenant=request.tenant,
                actor=request.user.get_username(),
                now=timezone.now(),
                values=form.values(),
                **scope.names,
            )
            return redirect("policies")
        except PolicyError as error:
            form.refuse(error.param, translated(error.words))
    return policy_shown(request, scope, form=form, status=400)


@order
def policy_delete_order(request: TenantRequest) -> HttpResponse:
    """Answers 409 with the page while the scope is frozen."""
    scope = scope_asked(request)
    policy = policy_of(request.tenant, scope)
    if policy is None:
        raise Http404(f"{scope} has no policy")
    try:
        policy_delete(policy=policy, actor=request.user.get_username(), now=timezone.now())
        return redirect("policies")
    except PolicyError as error:
        form = PolicyForm(initial=initial_of(policy))
        return policy_shown(request, scope, form=form, problem=translated(error.words), status=409)


def policy_shown(
    request: TenantRequest,
    scope: Scope,
    *,
    form: PolicyForm | None = None,
    freeze: FreezeForm | None = None,
    problem: str = "",
    status: int = 200,
) -> HttpResponse:
    """The page of a scope; forms that are given have something wrong in them."""
    now, policy = timezone.now(), policy_of(request.tenant, scope)
    engines = engines_of(request.tenant)
    context: dict[str, Any] = {
        "scope": scope,
        "policy": policy,
        "terms": own_terms(policy),
        "frozen": freeze_said(policy, now) if policy else "",
        "concerned": [engine for engine in engines if _concerned(scope, engine)],
        "form": form or PolicyForm(initial=initial_of(policy)),
        "freeze": freeze or FreezeForm(id_prefix="freeze"),
        "problem": problem,
        "page_state": "none",
    }
    engine = next((each for each in engines if each.name == scope.engine), None)
    if engine is not None:
        rules = rules_of(engine)
        context |= {
            "engine": engine,
            "in_force": terms_in_force(rules, engine),
            "held": held_words(engine, rules, now, failed=undo_failed(engine)),
        }
    return send(request, "policy.html", context, status=status)


def scope_asked(request: TenantRequest) -> Scope:
    """The scope the address names, the tenant if none. Raises Http404 for one there is not."""
    scope = Scope(request.GET.get("service", ""), request.GET.get("engine", ""))
    engines = engines_of(request.tenant)
    known = {*scopes_of(request.tenant, engines), *(Scope(engine=e.name) for e in engines)}
    if scope not in known:
        raise Http404(f"{scope} is nothing of {request.tenant}")
    return scope


def policy_of(tenant: Tenant, scope: Scope) -> Policy | None:
    return Policy.objects.filter(tenant=tenant, **scope.names).first()


def _concerned(scope: Scope, engine: Engine) -> bool:
    if scope.engine:
        return engine.name == scope.engine
    return not scope.service or engine.service == scope.service
