from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client
from django.utils import translation

from controlplane.accounts.models import Membership
from tests.controlplane.web.measured import judge, send
from tests.controlplane.web.story import incident
from tests.controlplane.web.world import World, member, world


@pytest.fixture(autouse=True)
def own_language() -> Iterator[None]:
    """What a page was last asked for in stays the thread's language."""
    yield
    translation.deactivate()


@pytest.fixture
def empty(db: None) -> World:
    """A tenant with an engine and objectives, nothing measured, nothing wrong."""
    return world()


@pytest.fixture
def full(db: None) -> World:
    """The same with an hour of data, and an incident being acted upon."""
    made = world()
    judge(made)
    send(made)
    incident(made)
    return made


@pytest.fixture
def ada(client: Client) -> Any:
    """Signs a member of the given world in and returns the client."""

    def sign_in(of: World, name: str = "ada") -> Client:
        client.force_login(member(of.tenant, name))
        return client

    return sign_in


@pytest.fixture
def owner(ada: Any, full: World) -> Client:
    client: Client = ada(full)
    Membership.objects.update(role=Membership.Role.OWNER)
    return client
