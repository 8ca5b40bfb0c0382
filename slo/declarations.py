"""Objectives and contracts declared together: all of them or none, and what would change first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction

from controlplane.accounts.models import Tenant
from slo.changes import Declared
from slo.contracts import contract_declare
from slo.fields import FieldError
from slo.models import Contract, Objective
from slo.services import objective_declare

DECLARED_MAX = 200


@dataclass(frozen=True)
class Declaration:
    """What became of each, in the order given."""

    objectives: tuple[Declared[Objective], ...]
    contracts: tuple[Declared[Contract], ...]


def declare(
    *,
    tenant: Tenant,
    objectives: Sequence[Mapping[str, Any]],
    contracts: Sequence[Mapping[str, Any]],
    actor: str,
    now: datetime,
    dry_run: bool = False,
) -> Declaration:
    """Creates and updates by slug, objectives first; a dry run is the same and then undone.

    Raises FieldError whose param says which one: `objectives[2].spec.threshold_ms`.
    """
    with transaction.atomic():
        made = Declaration(
            tuple(
                _placed(f"objectives[{i}]", objective_declare, tenant=tenant, spec=s, actor=actor)
                for i, s in enumerate(objectives)
            ),
            tuple(
                _placed(
                    f"contracts[{i}]", contract_declare, tenant=tenant, spec=s, actor=actor, now=now
                )
                for i, s in enumerate(contracts)
            ),
        )
        if dry_run:
            transaction.set_rollback(True)
    return made


def _placed(where: str, write: Any, **arguments: Any) -> Any:
    try:
        return write(**arguments)
    except FieldError as error:
        raise FieldError(f"{where}.{error.param}", str(error)) from None
