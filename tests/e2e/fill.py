"""`python -m tests.e2e.fill`: fills TRIMTAB_HOME with the world while its action is being verified.

With --empty only a person who can sign in. Prints what has an address of its own, as JSON.
"""

from __future__ import annotations

import json
import sys
from urllib.parse import urlsplit

import django

django.setup()

from django.core.management import call_command  # noqa: E402

from controlplane.accounts.members import member_add, password_link  # noqa: E402
from controlplane.accounts.models import Membership, Tenant  # noqa: E402
from controlplane.accounts.services import tenant_create  # noqa: E402
from controlplane.actions.links import link_path  # noqa: E402
from tests.controlplane.web.furnished import furnish, grow_old, rule  # noqa: E402
from tests.controlplane.web.measured import judge, send  # noqa: E402
from tests.controlplane.web.story import incident  # noqa: E402
from tests.controlplane.web.world import World, hand, member, world  # noqa: E402
from tracing import wiring  # noqa: E402


def filled(made: World) -> dict[str, str]:
    judge(made)
    send(made)
    hand(made)
    found = incident(made)
    furnish(made)
    rule(made)
    grow_old(made)
    action = found.actions.get()
    return {
        "incident": str(found.pk),
        "channel": str(made.tenant.channels.get(name="relay").pk),
        "link": link_path(action, "rollback", made.now),
        "welcome": welcome(made.tenant),
    }


def welcome(tenant: Tenant) -> str:
    """The address where somebody who was let in chooses a password."""
    joan = member_add(tenant=tenant, name="joan", role=Membership.Role.VIEWER, actor="ada")
    return urlsplit(password_link(member=joan, actor="ada")).path


call_command("migrate", run_syncdb=True, verbosity=0, interactive=False)
things: dict[str, str] = {}
if "--empty" in sys.argv:
    tenant = tenant_create(slug="default", name="Default")
    member(tenant, staff=True, role=Membership.Role.OWNER)
else:
    made = world()
    member(made.tenant, staff=True, role=Membership.Role.OWNER)
    things = filled(made)
    wiring.close()
print(json.dumps(things))
