"""What a fresh house needs before its processes start: owner, tokens, objectives, a channel.

`python -m controlplane.demo.prepare WEBHOOK_URL [OBJECTIVES]` prints the secrets as JSON;
TRIMTAB_HOME says for which house, OBJECTIVES is a JSON list of more than the usual. Running it
again keeps what is there. Secrets are kept in TRIMTAB_HOME/demo.json (mode 600), because the
database holds only their hashes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured

from controlplane.demo.scenarios import SCENARIOS

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

# What the demo's service promises. The thresholds are edges of vLLM's own histograms and round
# numbers a person would write; nothing here was fitted to the demo's load.
OBJECTIVES: list[dict[str, Any]] = [
    {
        "slug": "chat-ttft",
        "name": "First token within 500 ms",
        "service": "chat",
        "indicator": "latency",
        "spec": {
            "source": "metric",
            "metric": "vllm:time_to_first_token_seconds",
            "threshold_ms": 500,
        },
        "target": 0.99,
    },
    {
        "slug": "chat-tpot",
        "name": "Time per output token within 100 ms",
        "service": "chat",
        "indicator": "latency",
        "spec": {
            "source": "metric",
            "metric": "vllm:request_time_per_output_token_seconds",
            "threshold_ms": 100,
        },
        "target": 0.99,
    },
    {
        "slug": "chat-success",
        "name": "Requests answered",
        "service": "chat",
        "indicator": "success",
        "spec": {"source": "metric"},
        "target": 0.995,
    },
]


def prepare(webhook_url: str, more: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    from django.conf import settings
    from django.core.management import call_command

    from controlplane.accounts.first_run import first_owner, keep_secret
    from controlplane.accounts.models import Token
    from controlplane.accounts.selectors import token_find
    from controlplane.accounts.services import token_create
    from controlplane.alerts.models import Channel
    from slo.models import Objective
    from slo.services import objective_apply

    call_command("migrate", verbosity=0, interactive=False)
    login = first_owner(settings.TRIMTAB_HOME)
    kept_at = settings.TRIMTAB_HOME / "demo.json"
    kept: dict[str, str] = json.loads(kept_at.read_text()) if kept_at.exists() else {}
    for kind in Token.Kind.values:
        if token_find(kept.get(kind, ""), kinds={kind}) is None:
            _, kept[kind] = token_create(tenant=login.tenant, kind=kind, name="demo")
    keep_secret(kept_at, json.dumps(kept))
    for spec in (*OBJECTIVES, *more):
        objective_apply(tenant=login.tenant, spec=spec)
    # What only another story promised, played in this house before, is promised no longer.
    others = {promise["slug"] for each in SCENARIOS.values() for promise in each.promises}
    others -= {spec["slug"] for spec in more}
    Objective.objects.filter(tenant=login.tenant, slug__in=others).update(enabled=False)
    Channel.objects.update_or_create(
        tenant=login.tenant, name="terminal", defaults={"kind": "webhook", "url": webhook_url}
    )
    return {**kept, "login": login.name, "password": Path(login.path).read_text().strip()}


if __name__ == "__main__":
    try:
        django.setup()
    except ImproperlyConfigured as error:
        sys.exit(str(error))
    promised = json.loads(sys.argv[2]) if len(sys.argv) > 2 else []
    json.dump(prepare(sys.argv[1], promised), sys.stdout)
