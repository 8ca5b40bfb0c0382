from __future__ import annotations

import pytest

from controlplane.diagnosis.amounts import ms, several


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "?"), (0.0123, "12.3 ms"), (0.818, "818 ms"), (0.9996, "1 s"), (1.2345, "1.23 s")],
)
def test_below_a_second_it_is_milliseconds(seconds: float | None, said: str) -> None:
    assert ms(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 requests wait"), (1.2, "1 request waits"), (31, "31 requests wait")]
)
def test_one_is_said_as_one(count: float, said: str) -> None:
    assert several(count, "request waits", "requests wait", ".0f") == said
