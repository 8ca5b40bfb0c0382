"""The form of one scope's policy: REST's columns as fields, what is wrong beside each.

It only reads. What is allowed is said by the checks of actions.policies, as for REST.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django import forms
from django.forms import BoundField
from django.utils.translation import gettext_lazy as _

from controlplane.actions.knob import STEPS_MAX, Knob, knobs
from controlplane.actions.models import Mode, Policy
from controlplane.actions.policies import CHECKS, PolicyError, policy_values
from controlplane.web.forms import PageForm
from controlplane.web.policy import DAY_WORDS

TEXT_CHARS_MAX = 60
# The columns of PolicyError → fields, where they are not called the same.
FIELDS = {
    "quiet_hours": "quiet_from",
    "quiet_hours.from": "quiet_from",
    "quiet_hours.until": "quiet_until",
    "quiet_hours.days": "quiet_days",
    "quiet_hours.time_zone": "quiet_zone",
}
WIDER = _("as the wider scope says")


class Whole(forms.Field):
    """A whole number, or what was typed instead, for the check to refuse by name."""

    widget = forms.NumberInput

    def __init__(self, **options: Any) -> None:
        super().__init__(required=False, **options)

    def to_python(self, value: Any) -> Any:
        text = str(value or "").strip()[:TEXT_CHARS_MAX]
        try:
            return int(text) if text else None
        except ValueError:
            return text


@dataclass(frozen=True)
class BoundRow:
    """A knob with the fields that bound it: two, or the choices."""

    knob: Knob
    minimum: BoundField | None = None
    maximum: BoundField | None = None
    choices: BoundField | None = None


class PolicyForm(PageForm):
    mode = forms.ChoiceField(
        label=_("Mode"),
        required=False,
        choices=[("", WIDER), *Mode.choices],
        widget=forms.RadioSelect,
    )
    cool_down_harmful_s = Whole(
        label=_("Cool-down, harmful"),
        help_text=_("seconds until a change that did harm is tried again"),
    )
    cool_down_unproven_s = Whole(
        label=_("Cool-down, unproven"),
        help_text=_("seconds until one that could not be proved is tried again"),
    )
    steps_max = forms.TypedChoiceField(
        label=_("Largest step"),
        required=False,
        coerce=int,
        empty_value=None,
        choices=[("", WIDER), *((step, step) for step in range(1, STEPS_MAX + 1))],
        help_text=_("rungs of a knob's ladder in one change"),
    )
    failures_per_hour_max = Whole(
        label=_("Failures per hour"),
        help_text=_("from so many failed or undone changes of an engine on, a person decides"),
    )
    barrier = forms.TypedChoiceField(
        label=_("Barrier knobs"),
        required=False,
        coerce=lambda text: text == "true",
        empty_value=None,
        choices=[("", WIDER), ("true", _("as hot ones")), ("false", _("a person decides"))],
        help_text=_("those that hold up the engine while they are swapped"),
    )
    quiet_from = forms.CharField(
        label=_("From"),
        required=False,
        max_length=TEXT_CHARS_MAX,
        widget=forms.TextInput({"placeholder": "22:00"}),
    )
    quiet_until = forms.CharField(
        label=_("Until"),
        required=False,
        max_length=TEXT_CHARS_MAX,
        widget=forms.TextInput({"placeholder": "07:00"}),
    )
    quiet_days = forms.MultipleChoiceField(
        label=_("Days"),
        required=False,
        choices=list(DAY_WORDS.items()),
        widget=forms.CheckboxSelectMultiple,
        help_text=_("none chosen: every day; over midnight, the day it begins on"),
    )
    quiet_zone = forms.CharField(
        label=_("Time zone"),
        required=False,
        max_length=TEXT_CHARS_MAX,
        initial="UTC",
        help_text=_("its IANA name, as Europe/Berlin"),
    )

    def __init__(self, data: Any = None, **options: Any) -> None:
        super().__init__(data, **options)
        for slug, knob in sorted(knobs().items()):
            for name, field in _bound_fields(knob).items():
                self.fields[f"{name}_{slug}"] = field

    @property
    def bounds(self) -> Iterator[BoundRow]:
        for slug, knob in sorted(knobs().items()):
            yield BoundRow(knob, **{name: self[f"{name}_{slug}"] for name in _bound_fields(knob)})

    def values(self) -> dict[str, Any]:
        """What was filled in, column by column, as REST has it."""
        given = self.cleaned_data
        plain = {name: given[name] for name in CHECKS if name in given}
        return {**plain, "quiet_hours": _quiet(given), "bounds": _bounds(given)}

    def check(self) -> bool:
        """Whether every column fits; what is wrong with one goes beside its field."""
        values = self.values()
        for name, fits in CHECKS.items():
            try:
                fits(name, values[name])
            except PolicyError as error:
                self.refuse(error.param, str(error))
        return not self.errors

    def refuse(self, param: str | None, message: str) -> None:
        column, _dot, rest = (param or "").partition(".")
        if column == "bounds":
            slug, _dot, side = rest.partition(".")
            param = f"{side or next(iter(_bound_fields(knobs()[slug])))}_{slug}"
        super().refuse(FIELDS.get(param or "", param), message)


def initial_of(policy: Policy | None) -> dict[str, Any]:
    """The policy as the form shows it."""
    if policy is None:
        return {}
    shown = policy_values(policy)
    hours, bounds = shown.pop("quiet_hours") or {}, shown.pop("bounds")
    if shown["barrier"] is not None:
        shown["barrier"] = "true" if shown["barrier"] else "false"
    if hours:
        shown |= {f"quiet_{name}": hours[name] for name in ("from", "until", "days")}
        shown["quiet_zone"] = hours["time_zone"]
    for slug, bound in bounds.items():
        shown |= {f"{side}_{slug}": limit for side, limit in bound.items()}
    return shown


def _bound_fields(knob: Knob) -> dict[str, forms.Field]:
    if knob.choices:
        field = forms.MultipleChoiceField(
            label=_("Allowed"),
            required=False,
            choices=[(choice, choice) for choice in knob.choices],
            widget=forms.CheckboxSelectMultiple,
        )
        return {"choices": field}
    return {
        "minimum": Whole(label=_("Minimum"), widget=_limit(knob.minimum)),
        "maximum": Whole(label=_("Maximum"), widget=_limit(knob.maximum)),
    }


def _limit(usual: int) -> forms.NumberInput:
    return forms.NumberInput({"placeholder": usual})


def _quiet(given: dict[str, Any]) -> dict[str, Any] | None:
    """None when nothing of it is said; the zone, which has a value from the start, says nothing."""
    begin, end, days = given["quiet_from"], given["quiet_until"], given["quiet_days"]
    if not (begin or end or days):
        return None
    return {"from": begin, "until": end, "days": days, "time_zone": given["quiet_zone"] or "UTC"}


def _bounds(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    said: dict[str, dict[str, Any]] = {}
    for slug, knob in knobs().items():
        sides = ("choices",) if knob.choices else ("minimum", "maximum")
        own = {side: given[f"{side}_{slug}"] for side in sides}
        own = {side: limit for side, limit in own.items() if limit not in (None, [])}
        if own:
            said[slug] = own
    return said
