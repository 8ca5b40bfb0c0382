"""The benches are scripts beside each other; their checks must see what they are there to see."""

from __future__ import annotations

import pytest

from tests.integration.houses import ROOT


@pytest.fixture(autouse=True)
def beside_the_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
