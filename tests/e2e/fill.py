"""`python -m tests.e2e.fill`: fills TRIMTAB_HOME with the world while its action is being verified.

With --empty only a person who can sign in. Prints the id of the incident.
"""

from __future__ import annotations

import sys

import django

django.setup()

from django.core.management import call_command  # noqa: E402

from controlplane.accounts.models import Membership  # noqa: E402
from controlplane.accounts.services import tenant_create  # noqa: E402
from tests.controlplane.web.furnished import furnish  # noqa: E402
from tests.controlplane.web.world import hand, incident, judge, member, send, world  # noqa: E402
from tracing import wiring  # noqa: E402

call_command("migrate", run_syncdb=True, verbosity=0, interactive=False)
if "--empty" in sys.argv:
    tenant = tenant_create(slug="default", name="Default")
    member(tenant, staff=True, role=Membership.Role.OWNER)
else:
    made = world()
    member(made.tenant, staff=True, role=Membership.Role.OWNER)
    judge(made)
    send(made)
    hand(made)
    found = incident(made)
    furnish(made)
    print(found.pk)
    wiring.close()
