"""/actions/: every change of knobs, what was expected of it and what came of it; /actions/new/: a
person's own."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.accounts.models import Tenant
from controlplane.actions.facts import AUTOPILOT
from controlplane.actions.knob import knobs
from controlplane.actions.models import IN_FLIGHT, Action, State
from controlplane.actions.orders import OrderError, action_ask, verbs_open
from controlplane.actions.policy import rules_of
from controlplane.actions.selectors import actions_all
from controlplane.actions.words import translated
from controlplane.diagnosis.selectors import cause_label
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engine_state, engines_of
from controlplane.web.access import TenantRequest, form_page, page, send
from controlplane.web.filters import BadFilter, one_of, rows_after, text_of
from controlplane.web.forms import ChangeForm
from controlplane.web.knobs import KnobRow, configuration
from controlplane.web.pages.actions import STATUS_OF
from controlplane.web.pages.incidents import Compared, compared
from controlplane.web.policy import stopped_words
from controlplane.web.templatetags.ui import state_word

ROWS = 50
NAME_CHARS_MAX = 100
DECISIONS = (State.APPROVED, State.REJECTED)
FILTERS = {"state": "state", "engine": "engine__name", "service": "engine__service"}


@dataclass(frozen=True)
class LedgerRow:
    """One action; `decided_by` is the person who said yes or no to another's change, or ""."""

    action: Action
    cause: str
    compared: Compared | None
    verbs: tuple[str, ...]
    decided_by: str


@page
def actions(request: TenantRequest) -> HttpResponse:
    """Answers 400 with the reason when a filter cannot be read; nothing is listed then."""
    raw = {key: str(text) for key, text in request.GET.items() if key != "part"}
    engines = engines_of(request.tenant)
    context: dict[str, Any] = {
        "raw": raw,
        "states": State.choices,
        "engines": _offered([engine.name for engine in engines], raw.get("engine", "")),
        "services": _offered([engine.service for engine in engines], raw.get("service", "")),
        "filtered": any(raw.get(name) for name in FILTERS),
        "changeable": bool(engines),
        "page_state": "none",
    }
    try:
        found = rows_after(
            _narrowed(request.tenant, raw), raw, by=("-created_at", "id"), limit=ROWS
        )
    except BadFilter as error:
        return send(request, "actions.html", context | {"problem": str(error)}, status=400)
    running = any(action.state in IN_FLIGHT for action in found.rows)
    context |= {
        "rows": [_row(action) for action in found.rows],
        "next": found.next,
        "page_state": "act" if running else "ok" if found.rows else "none",
    }
    return send(request, "actions.html", context, parts=("list",))


@form_page
def action_new(request: TenantRequest) -> HttpResponse:
    """Raises Http404 for an engine that is not the tenant's, and while there is none."""
    engines = engines_of(request.tenant)
    wanted = request.GET.get("engine") or (engines[0].name if engines else "")
    engine = next((each for each in engines if each.name == wanted), None)
    if engine is None:
        raise Http404(f"engine {wanted!r} is not one of {request.tenant}")
    rows = [row for row in configuration(engine, ()).rows if row.supported and row.name in knobs()]
    status = 200
    if request.method == "POST":
        form = _form(rows, request.POST)
        if form.is_valid():
            try:
                _ask(request, engine, form.cleaned_data)
                return redirect("actions")
            except OrderError as error:
                form.refuse(error.param, translated(error.words))
                status = STATUS_OF[error.code]
        status = status if status != 200 else 400
    else:
        initial = {"expected_config_version": engine.config_version, "key": str(uuid.uuid4())}
        form = _form(rows, initial=initial)
    context = {
        "engine": engine,
        "engines": [each.name for each in engines],
        "rows": rows,
        "form": form,
        "held": _held(engine),
        "page_state": "none",
    }
    return send(request, "action-new.html", context, status=status)


def _narrowed(tenant: Tenant, raw: dict[str, str]) -> Any:
    asked = {
        "state": one_of(raw, "state", {"": "", **{state: state for state in State.values}}),
        "engine": text_of(raw, "engine", NAME_CHARS_MAX),
        "service": text_of(raw, "service", NAME_CHARS_MAX),
    }
    given = {FILTERS[name]: value for name, value in asked.items() if value}
    return actions_all(tenant).filter(**given)


def _offered(names: Sequence[str], chosen: str) -> list[str]:
    return sorted({*names, chosen} - {""})


def _row(action: Action) -> LedgerRow:
    said = [step.actor for step in action.transitions.all() if step.to_state in DECISIONS]
    persons = [actor for actor in said if actor not in (action.actor, AUTOPILOT)]
    return LedgerRow(
        action=action,
        cause=cause_label(action.cause) if action.cause else "",
        compared=compared(action),
        verbs=verbs_open(action),
        decided_by=persons[-1] if persons else "",
    )


def _held(engine: Engine) -> str:
    """Why nothing can be changed now, whoever asks; "" when it can."""
    now = timezone.now()
    if held := stopped_words(engine, rules_of(engine), now):
        return held
    state = engine_state(engine, now)
    if state == "ok":
        return ""
    words = _("No change would arrive: %(name)s is %(state)s.")
    return words % {"name": engine.name, "state": state_word(state)}


def _form(rows: Sequence[KnobRow], data: Any = None, **options: Any) -> ChangeForm:
    form = ChangeForm(data, **options)
    form.fields["knob"].choices = [(row.name, row.name) for row in rows]  # type: ignore[attr-defined]
    return form


def _ask(request: TenantRequest, engine: Engine, given: dict[str, Any]) -> Action:
    knob = knobs()[given["knob"]]
    value: str | int = given["value"].strip()
    # A word that is no number goes on as it is, so that the refusal can name it.
    if not knob.choices and str(value).removeprefix("-").isdecimal():
        value = int(value)
    return action_ask(
        engine=engine,
        values={knob.slug: value},
        actor=request.user.get_username(),
        now=timezone.now(),
        trial=given["how"] == "trial",
        why=given["why"],
        expected_config_version=given["expected_config_version"],
        key=given["key"],
    )
