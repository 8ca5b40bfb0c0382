"""REST of objectives and contracts: list, read, declare and delete them by their slugs."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from django.urls import path
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.audit import actor_of
from controlplane.accounts.authentication import ApiError, request_tenant
from controlplane.accounts.rest import (
    ListQuery,
    Page,
    body_of,
    documented,
    list_of,
    listed,
    page_of,
)
from slo import contracts, selectors, services, shapes
from slo.accruals import accrued, contract_get
from slo.declarations import DECLARED_MAX, declare
from slo.fields import FieldError, field_error
from slo.models import Contract, Objective


class Objectives(APIView):
    """The objectives by slug, and how each stands."""

    @documented(query=shapes.ObjectiveQuery, answer=list_of("objectives", shapes.ObjectiveShape))
    def get(self, request: Request) -> Response:
        """List objectives"""
        asked = shapes.ObjectiveQuery.of(request)
        given = {name: asked[name] for name in ("service", "enabled") if name in asked}
        rows = Objective.objects.filter(tenant=request_tenant(request), **given)
        page, now = page_of(rows, asked, by=("slug",)), timezone.now()
        standings = [selectors.standing(objective, now) for objective in page.rows]
        return listed("objectives", Page(standings, page.next), shapes.ObjectiveShape)


class ObjectiveBySlug(APIView):
    """One objective and how it stands."""

    @documented(answer=shapes.ObjectiveShape)
    def get(self, request: Request, slug: str) -> Response:
        """Read an objective"""
        return Response(objective_json(objective_found(request, slug)))

    @documented(
        body=shapes.ObjectiveSpec,
        answer=shapes.ObjectiveShape,
        also={201: shapes.ObjectiveShape},
    )
    def put(self, request: Request, slug: str) -> Response:
        """Create an objective (201) or replace it (200)

        What is left out takes its default. When service, indicator or spec change, the readings so
        far are dropped: they count something else.
        """
        spec = spec_of(request, slug)
        tenant, actor = request_tenant(request), actor_of(request)
        try:
            made = services.objective_declare(tenant=tenant, spec=spec, actor=actor)
        except FieldError as error:
            raise api_error(error) from None
        return Response(objective_json(made.row), status=201 if made.created else 200)

    @documented(answer=None, status=204)
    def delete(self, request: Request, slug: str) -> Response:
        """Delete an objective with its readings and incidents

        409 while a contract names it.
        """
        found = objective_found(request, slug)
        try:
            services.objective_delete(objective=found, actor=actor_of(request))
        except services.Promised as error:
            raise ApiError(409, "conflict", str(error)) from None
        return Response(status=204)


class Contracts(APIView):
    """The contracts by slug, and what the period that runs has come to."""

    @documented(query=shapes.ContractQuery, answer=list_of("contracts", shapes.ContractShape))
    def get(self, request: Request) -> Response:
        """List contracts"""
        asked = shapes.ContractQuery.of(request)
        given: dict[str, Any] = {
            name: asked[name] for name in ("provider", "consumer") if name in asked
        }
        if "objective" in asked:
            given["objectives__slug"] = asked["objective"]
        rows = Contract.objects.filter(tenant=request_tenant(request), **given)
        page = page_of(rows.prefetch_related("objectives"), asked, by=("slug",))
        found = [contract_row(contract) for contract in page.rows]
        return listed("contracts", Page(found, page.next), shapes.ContractShape)


class ContractBySlug(APIView):
    """One contract and what the period that runs has come to."""

    @documented(answer=shapes.ContractShape)
    def get(self, request: Request, slug: str) -> Response:
        """Read a contract"""
        return Response(contract_json(contract_found(request, slug)))

    @documented(
        body=shapes.ContractSpec, answer=shapes.ContractShape, also={201: shapes.ContractShape}
    )
    def put(self, request: Request, slug: str) -> Response:
        """Create a contract (201) or replace it (200)

        Changed terms hold for the whole of the period that runs; ended periods stay as settled.
        """
        spec = spec_of(request, slug)
        tenant, actor = request_tenant(request), actor_of(request)
        try:
            made = contracts.contract_declare(
                tenant=tenant, spec=spec, actor=actor, now=timezone.now()
            )
        except FieldError as error:
            raise api_error(error) from None
        return Response(contract_json(made.row), status=201 if made.created else 200)

    @documented(answer=None, status=204)
    def delete(self, request: Request, slug: str) -> Response:
        """Delete a contract with its settlements

        The audit log keeps what they came to.
        """
        found = contract_found(request, slug)
        contracts.contract_delete(contract=found, actor=actor_of(request))
        return Response(status=204)


class Settlements(APIView):
    """What the ended periods of a contract came to, newest first."""

    @documented(query=ListQuery, answer=list_of("settlements", shapes.SettlementShape))
    def get(self, request: Request, slug: str) -> Response:
        """List a contract's settlements"""
        rows = contract_found(request, slug).settlements.all()
        page = page_of(rows, ListQuery.of(request), by=("-period_start",))
        return listed("settlements", page, shapes.SettlementShape)


class Declarations(APIView):
    """Objectives and contracts declared together."""

    @documented(body=shapes.DeclarationBody, answer=shapes.DeclarationShape)
    def post(self, request: Request) -> Response:
        """Declare objectives and contracts, all of them or none

        Creates and updates by slug, objectives first. With `dry_run` it says what would change.
        """
        body = body_of(request)
        try:
            objectives, names = _specs(body, "objectives"), _specs(body, "contracts")
            dry_run = body.pop("dry_run", False)
            if not isinstance(dry_run, bool):
                raise field_error("dry_run", dry_run, "true, false")
            for key in body:
                raise field_error(key, body[key], "objectives, contracts, dry_run")
            made = declare(
                tenant=request_tenant(request),
                objectives=objectives,
                contracts=names,
                actor=actor_of(request),
                now=timezone.now(),
                dry_run=dry_run,
            )
        except FieldError as error:
            raise api_error(error) from None
        answer = {"objectives": made.objectives, "contracts": made.contracts, "dry_run": dry_run}
        return Response(shapes.DeclarationShape(answer).data)


def _specs(body: dict[str, Any], noun: str) -> list[dict[str, Any]]:
    found = body.pop(noun, [])
    fits = isinstance(found, list) and len(found) <= DECLARED_MAX
    if not fits or not all(isinstance(spec, dict) for spec in found):
        raise field_error(noun, found, _("a list of at most %d objects") % DECLARED_MAX)
    return list(found)


def spec_of(request: Request, slug: str) -> dict[str, Any]:
    """The body, its slug the address's. Raises ApiError 400."""
    spec = body_of(request)
    if spec.setdefault("slug", slug) != slug:
        words = _("slug=%(given)r: allowed: %(slug)r, as in the address, or leave it out")
        message = words % {"given": spec["slug"], "slug": slug}
        raise ApiError(400, "invalid", message, param="slug")
    return spec


def objective_found(request: Request, slug: str) -> Objective:
    """Raises Http404, for another tenant's as for one that never was."""
    objective = selectors.objective_get(tenant=request_tenant(request), slug=slug)
    if objective is None:
        raise Http404(_("No objective has the slug %(slug)s.") % {"slug": slug})
    return objective


def contract_found(request: Request, slug: str) -> Contract:
    """Raises Http404, for another tenant's as for one that never was."""
    contract = contract_get(tenant=request_tenant(request), slug=slug)
    if contract is None:
        raise Http404(_("No contract has the slug %(slug)s.") % {"slug": slug})
    return contract


def objective_json(objective: Objective) -> dict[str, Any]:
    return dict(shapes.ObjectiveShape(selectors.standing(objective, timezone.now())).data)


def contract_row(contract: Contract) -> dict[str, Any]:
    return {"contract": contract, "accrued": accrued(contract, timezone.now())}


def contract_json(contract: Contract) -> dict[str, Any]:
    return dict(shapes.ContractShape(contract_row(contract)).data)


def api_error(error: FieldError) -> ApiError:
    return ApiError(400, "invalid", str(error), param=error.param)


urlpatterns = [
    path("objectives/", Objectives.as_view(), name="api-objectives"),
    path("objectives/<slug:slug>/", ObjectiveBySlug.as_view(), name="api-objective"),
    path("contracts/", Contracts.as_view(), name="api-contracts"),
    path("contracts/<slug:slug>/", ContractBySlug.as_view(), name="api-contract"),
    path("contracts/<slug:slug>/settlements/", Settlements.as_view(), name="api-settlements"),
    path("declarations/", Declarations.as_view(), name="api-declarations"),
]
