"""The order of the whole run."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests last: Playwright leaves an event loop running in the main thread, under which
    no test after it could start its own."""
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)
