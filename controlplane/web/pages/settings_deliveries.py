"""/settings/deliveries/: what was said to whom, and what came of it."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse

from controlplane.alerts.models import Delivery
from controlplane.alerts.selectors import channels_of, deliveries_of
from controlplane.alerts.services import NAME_CHARS_MAX
from controlplane.web.access import TenantRequest, page, send
from controlplane.web.filters import BadFilter, one_of, rows_after, text_of


@page
def delivery_list(request: TenantRequest) -> HttpResponse:
    """Answers 400 with the reason when a filter cannot be read; nothing is listed then."""
    raw = {key: str(text) for key, text in request.GET.items() if key != "part"}
    context: dict[str, Any] = {
        "raw": raw,
        "states": Delivery.State.choices,
        "events": Delivery.Event.choices,
        "channels": channels_of(request.tenant).values_list("name", flat=True),
        "filtered": any(raw.get(name) for name in ("state", "event", "channel")),
        "page_state": "none",
    }
    try:
        asked = {
            "state": one_of(raw, "state", _words(Delivery.State.values)),
            "event": one_of(raw, "event", _words(Delivery.Event.values)),
            "channel__name": text_of(raw, "channel", NAME_CHARS_MAX),
        }
        given = {name: value for name, value in asked.items() if value}
        rows = deliveries_of(request.tenant).filter(**given)
        found = rows_after(rows, raw, by=("-created_at", "-id"))
    except BadFilter as error:
        context["problem"] = str(error)
        return send(request, "settings/deliveries.html", context, status=400)
    failed = any(row.state == Delivery.State.FAILED for row in found.rows)
    context |= {
        "rows": found.rows,
        "next": found.next,
        "page_state": "warn" if failed else "ok" if found.rows else "none",
    }
    return send(request, "settings/deliveries.html", context, parts=("list",))


def _words(values: list[str]) -> dict[str, str]:
    return {"": "", **{value: value for value in values}}
