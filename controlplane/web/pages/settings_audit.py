"""/settings/audit/: who did what, and whether anybody tampered with that."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.utils import timezone

from controlplane.accounts.audit import ACTOR_CHARS_MAX, audit_all, verify, verify_seldom
from controlplane.web.access import TenantRequest, page, send
from controlplane.web.filters import BadFilter, rows_after, text_of

# Up to here the whole chain is read with every look at the page, in about a fifth of a second;
# a longer one when asked to, and at most once a minute.
CHECKED_AT_ONCE_MAX = 5_000


@page
def audit_log(request: TenantRequest) -> HttpResponse:
    """Answers 400 with the reason when a filter cannot be read; nothing is listed then."""
    raw = {key: str(text) for key, text in request.GET.items() if key != "part"}
    entries = audit_all(request.tenant)
    newest = entries.first()
    count = newest.number if newest else 0
    asked_for = raw.get("check") == "1" and count > CHECKED_AT_ONCE_MAX
    now = timezone.now()
    done = verify_seldom(request.tenant, now) if asked_for else None
    if done is None and count <= CHECKED_AT_ONCE_MAX:
        done = verify(request.tenant), now
    check = done[0] if done else None
    context: dict[str, Any] = {
        "raw": raw,
        "check": check,
        "checked_at": done[1] if done else None,
        "checking": asked_for and done is None,
        "count": count,
        "nouns": entries.order_by("noun").values_list("noun", flat=True).distinct(),
        "filtered": any(raw.get(name) for name in ("noun", "actor", "subject")),
        "page_state": "none" if check is None else "ok" if check.holds else "bad",
    }
    try:
        asked = {
            "noun": text_of(raw, "noun", ACTOR_CHARS_MAX),
            "actor": text_of(raw, "actor", ACTOR_CHARS_MAX),
            "subject": text_of(raw, "subject", ACTOR_CHARS_MAX),
        }
        given = {name: value for name, value in asked.items() if value}
        found = rows_after(entries.filter(**given), raw, by=("-number",))
        context |= {"rows": found.rows, "next": found.next}
        return send(request, "settings/audit.html", context)
    except BadFilter as error:
        context["problem"] = str(error)
        return send(request, "settings/audit.html", context, status=400)
