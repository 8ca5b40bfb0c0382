from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.demo.house import House

from .houses import new_house


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_torch = importlib.util.find_spec("torch") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)
            if no_torch:
                item.add_marker(pytest.mark.skip(reason="no torch: the engine cannot run"))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One running house for a file; each test leaves its processes running."""
    house = new_house(tmp_path_factory.mktemp("house"), TRIMTAB_LOG_LEVEL="INFO")
    try:
        house.start()
        yield house
    finally:
        house.stop()
