"""What the REST of objectives and contracts takes and answers."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.accounts.rest import ListQuery, Shape, text
from slo.indicator import indicators
from slo.models import Contract, Objective
from slo.penalty import PARAMETERS, PERIODS
from slo.selectors import State
from tracing.types import Signal


def number(help_text: str = "", **options: Any) -> serializers.FloatField:
    """A number that is null while there is nothing to know."""
    return serializers.FloatField(allow_null=True, help_text=help_text, **options)


# --- objectives -----------------------------------------------------------------------------------


class ObjectiveQuery(ListQuery):
    service = text()
    enabled = serializers.BooleanField(required=False)


class ObjectiveSpec(Shape):
    """An objective as it is declared: all of it, by its slug."""

    slug = serializers.CharField(required=False, help_text="the address's, if given")
    name = serializers.CharField(required=False, help_text="for people; the slug without it")
    service = serializers.CharField()
    indicator = serializers.ChoiceField(choices=list(indicators()))
    spec = serializers.DictField(required=False, help_text="the indicator's own parameters")
    target = serializers.FloatField(help_text="share of good events, 0.5 to 0.99999")
    window_days = serializers.IntegerField(required=False, help_text="1 to 90, 30 without it")
    fast_burn = serializers.FloatField(required=False, help_text="1 to 1,000, 14.4 without it")
    enabled = serializers.BooleanField(required=False)


class PairShape(Shape):
    name = serializers.CharField()
    severity = serializers.CharField()
    long_s = serializers.FloatField()
    short_s = serializers.FloatField()
    factor = serializers.FloatField()
    burn_long = number()
    burn_short = number()
    covered = serializers.FloatField(help_text="share of the long window there is history for")
    can_fire = serializers.BooleanField()
    firing = serializers.BooleanField()


class StandingShape(Shape):
    """How the objective stands over its window; null where nothing was measured."""

    state = serializers.ChoiceField(choices=State.choices)
    attained = number("share of good events")
    budget_left = number("share of the error budget; below 0 when overdrawn")
    burn_1h = number()
    good = serializers.FloatField(source="counts.good")
    total = serializers.FloatField(source="counts.total")
    signal = serializers.ChoiceField(choices=[signal.value for signal in Signal])
    stale_s = number()
    fast_burn_now = serializers.BooleanField()
    last_window_end = serializers.DateTimeField(
        source="last_reading.window_end", default=None, allow_null=True
    )
    pairs = PairShape(many=True)


class ObjectiveShape(Shape):
    """An objective and how it stands. Made from a selectors.Standing."""

    slug = serializers.CharField(source="objective.slug")
    name = serializers.CharField(source="objective.name")
    service = serializers.CharField(source="objective.service")
    indicator = serializers.CharField(source="objective.indicator")
    spec = serializers.DictField(source="objective.spec")
    target = serializers.FloatField(source="objective.target")
    window_days = serializers.IntegerField(source="objective.window_days")
    fast_burn = serializers.FloatField(source="objective.fast_burn")
    enabled = serializers.BooleanField(source="objective.enabled")
    good_event = serializers.SerializerMethodField(help_text="what a good event is, in words")
    problem = serializers.CharField(
        source="objective.problem", help_text="why the data cannot answer it; empty: they can"
    )
    standing = StandingShape(source="*")

    def get_good_event(self, standing: Any) -> str:
        objective: Objective = standing.objective
        return indicators()[objective.indicator].describe(objective.spec)


# --- contracts ------------------------------------------------------------------------------------


class ContractQuery(ListQuery):
    objective = text()
    provider = text()
    consumer = text()


class TierShape(Shape):
    below = serializers.FloatField(help_text="attained share")
    percent = serializers.FloatField(help_text="of the fee")


class TermsShape(Shape):
    """The penalty clause; which fields it has depends on its basis."""

    basis = serializers.ChoiceField(choices=list(PARAMETERS))
    percent = serializers.FloatField(required=False, help_text="of the fee, a step or an hour")
    step_percent = serializers.FloatField(required=False, help_text="percentage points")
    tiers = TierShape(many=True, required=False)
    cap_percent = serializers.FloatField(required=False, help_text="100 without it")


class ContractSpec(Shape):
    """A contract as it is agreed: all of it, by its slug."""

    slug = serializers.CharField(required=False, help_text="the address's, if given")
    name = serializers.CharField(required=False, help_text="for people; the slug without it")
    provider = serializers.CharField()
    consumer = serializers.CharField()
    objectives = serializers.ListField(child=serializers.CharField(), help_text="slugs")
    period = serializers.ChoiceField(choices=PERIODS, required=False, help_text="or month")
    fee = number("what the consumer pays per period", required=False)
    currency = serializers.CharField(required=False, help_text="EUR, with a fee only")
    terms = TermsShape()
    starts_on = serializers.DateField(required=False, help_text="or the day it is created")


class ObjectiveAccrualShape(Shape):
    objective = serializers.CharField(help_text="slug")
    target = serializers.FloatField()
    attained = number()
    good = serializers.FloatField()
    total = serializers.FloatField()
    hours_missed = serializers.IntegerField(allow_null=True, help_text="terms by the hour only")
    percent = number("of the fee, before the cap; null: nothing was measured")


class AccrualShape(Shape):
    """What the period that runs has come to, as if it ended now."""

    period_start = serializers.DateTimeField()
    period_end = serializers.DateTimeField()
    until = serializers.DateTimeField()
    percent = number("of the fee, after the cap; null: nothing was measured")
    capped = serializers.BooleanField()
    amount = number("in the contract's currency; null without a fee")
    objectives = ObjectiveAccrualShape(many=True)


class ContractShape(Shape):
    """A contract and what it has come to. Made from {"contract", "accrued"}."""

    slug = serializers.CharField(source="contract.slug")
    name = serializers.CharField(source="contract.name")
    provider = serializers.CharField(source="contract.provider")
    consumer = serializers.CharField(source="contract.consumer")
    objectives = serializers.SerializerMethodField()
    period = serializers.ChoiceField(choices=PERIODS, source="contract.period")
    fee = number(source="contract.fee")
    currency = serializers.CharField(source="contract.currency")
    terms = serializers.SerializerMethodField()
    starts_on = serializers.DateField(source="contract.starts_on")
    accrued = AccrualShape(allow_null=True, help_text="null before it starts")

    def get_objectives(self, row: Any) -> list[str]:
        contract: Contract = row["contract"]
        return sorted(objective.slug for objective in contract.objectives.all())

    @extend_schema_field(TermsShape)
    def get_terms(self, row: Any) -> dict[str, Any]:
        terms: dict[str, Any] = row["contract"].terms
        return terms


class SettlementShape(Shape):
    """What a period that has ended came to."""

    period_start = serializers.DateTimeField()
    period_end = serializers.DateTimeField()
    percent = number("of the fee, after the cap; null: nothing was measured")
    capped = serializers.BooleanField()
    amount = number()
    currency = serializers.CharField()
    terms = serializers.DictField(help_text="as they were when it was settled")
    objectives = ObjectiveAccrualShape(many=True)
    settled_at = serializers.DateTimeField()


# --- both at once ---------------------------------------------------------------------------------


class DeclarationBody(Shape):
    """Objectives first, then contracts; each list of at most 200, all of them or none."""

    objectives = ObjectiveSpec(many=True, required=False)
    contracts = ContractSpec(many=True, required=False)
    dry_run = serializers.BooleanField(required=False, help_text="say what would change, only")


class ChangeShape(Shape):
    field = serializers.CharField(help_text="spec.threshold_ms for one inside another")
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)


class DeclaredShape(Shape):
    slug = serializers.CharField(source="row.slug")
    outcome = serializers.ChoiceField(choices=["created", "changed", "unchanged"])
    changes = ChangeShape(many=True)
    note = serializers.CharField(help_text="a consequence to know of; empty: none")


class DeclarationShape(Shape):
    """What became of each, in the order given."""

    objectives = DeclaredShape(many=True)
    contracts = DeclaredShape(many=True)
    dry_run = serializers.BooleanField()
