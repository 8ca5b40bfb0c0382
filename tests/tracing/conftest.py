"""One store per test process (chDB allows one directory), a fresh tenant for every test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from tracing import wiring
from tracing.ingest import Door
from tracing.query import StoreReader
from tracing.store.store import Store


@pytest.fixture(scope="session")
def store() -> Store:
    return wiring.store()


@pytest.fixture
def tenant() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def door(store: Store) -> Iterator[Door]:
    door = Door(store, registry=CollectorRegistry())
    yield door
    door.close()


@pytest.fixture
def reader(store: Store, tenant: str) -> StoreReader:
    return StoreReader(store, tenant)
