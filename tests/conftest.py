"""What tests of several rooms start from, and the order of the whole run."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Triton reads this once, when it is first imported; torch may be the one who imports it.
os.environ["TRITON_INTERPRET"] = "1"

import pytest

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import tenant_create
from tracing import wiring

PLACES = {"integration": -1, "e2e": 1}


@pytest.fixture
def tenant(db: None) -> Tenant:
    return tenant_create(slug="acme", name="Acme")


@pytest.fixture(scope="session", autouse=True)
def store_closed() -> Iterator[None]:
    """chDB must be closed before its process ends."""
    yield
    wiring.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole houses first, a browser last: two workers begin at the first half and in the middle,
    so one waits for windows to pass while the other computes, and they end together."""
    items.sort(key=lambda item: PLACES.get(item.path.parent.name, 0))
