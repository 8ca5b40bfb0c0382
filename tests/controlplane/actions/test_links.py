"""Links of chat messages: what they offer, that they work once, end, and cannot be made up."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings

from controlplane.accounts.models import AuditEntry
from controlplane.actions.links import LIFE, LinkError, link_open, link_path, link_use, links_of
from controlplane.actions.models import Action, Mode, State
from controlplane.actions.orders import OrderError, action_approve
from controlplane.actions.policies import policy_set
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_propose import propose

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, 3)
    mode(made, Mode.APPROVE)
    return made


def mode(world: World, word: str) -> None:
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": word})


@pytest.fixture
def action(world: World) -> Action:
    made, said = propose(world)
    assert made is not None, said
    return made


def token(world: World, action: Action, verb: str = "approve") -> str:
    return link_path(action, verb, world.now).rstrip("/").rpartition("/")[2]


def use(world: World, secret: str, *, actor: str = "Ada") -> Action:
    seen = {"address": "203.0.113.7"}
    return link_use(secret, actor=actor, now=world.now, signed_in=False, seen=seen)


def test_a_person_is_asked_where_the_policy_says_so(world: World, action: Action) -> None:
    links = links_of(action, world.now)
    assert set(links) == {"approve", "reject"}
    assert links["approve"].startswith(f"{settings.TRIMTAB_PUBLIC_URL}/a/approve.")
    mode(world, Mode.PROPOSE)
    assert links_of(action, world.now) == {}


@pytest.mark.parametrize(
    ("state", "verbs"),
    [
        (State.APPROVED, {"reject"}),
        (State.VERIFYING, {"rollback"}),
        (State.VERIFIED, {"rollback"}),
        (State.ROLLBACK_FAILED, {"clear"}),
        (State.ROLLING_BACK, set()),
        (State.EXPIRED, set()),
    ],
)
def test_what_is_offered_is_what_can_be_done(
    state: str, verbs: set[str], world: World, action: Action
) -> None:
    action.state = state
    assert set(links_of(action, world.now)) == verbs


def test_a_link_works_once_and_the_log_says_who_used_it(world: World, action: Action) -> None:
    secret = token(world, action)
    use(world, secret)
    action.refresh_from_db()
    assert action.state == State.APPROVED
    used = AuditEntry.objects.get(noun="link")
    assert used.actor == "Ada, not signed in, by link"
    assert used.detail["address"] == "203.0.113.7"
    assert secret not in str(used.detail)
    assert AuditEntry.objects.get(verb="approved").actor == used.actor
    with pytest.raises(LinkError, match=r"this link was used at 2026-03-01 .* by Ada") as error:
        use(world, secret)
    assert error.value.kind == "used"


def test_looking_at_a_link_changes_nothing(world: World, action: Action) -> None:
    assert link_open(token(world, action), world.now).verb == "approve"
    assert link_open(token(world, action), world.now).action == action
    action.refresh_from_db()
    assert action.state == State.PROPOSED


def test_a_link_ends(world: World, action: Action) -> None:
    secret = token(world, action)
    world.now += LIFE + timedelta(seconds=1)
    with pytest.raises(LinkError, match="this link ended at") as error:
        use(world, secret)
    assert error.value.kind == "expired"


@pytest.mark.parametrize("change", ["verb", "signature", "short", "long", "nonsense"])
def test_a_link_made_up_or_changed_is_foreign(change: str, world: World, action: Action) -> None:
    secret = token(world, action, "reject")
    forged = {
        "verb": secret.replace("reject", "approve"),
        "signature": secret[:-1] + ("A" if secret[-1] != "A" else "B"),
        "short": secret[: len(secret) // 2],
        "long": "a" * 10_000,
        "nonsense": "🙂",
    }[change]
    with pytest.raises(LinkError, match="was not made here") as error:
        link_open(forged, world.now)
    assert error.value.kind == "foreign"


def test_a_link_to_what_has_moved_on_does_nothing_and_stays_unused(
    world: World, action: Action
) -> None:
    secret = token(world, action)
    action_approve(action=action, actor="bob", now=world.now)
    with pytest.raises(OrderError, match="does not wait for a person: it is approved"):
        use(world, secret)
    assert not AuditEntry.objects.filter(noun="link").exists()
    assert link_open(secret, world.now)
