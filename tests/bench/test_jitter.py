from __future__ import annotations

import numpy as np
import pytest


def test_the_fit_finds_the_constants_and_causes_that_made_the_data() -> None:
    import jitter

    rng = np.random.default_rng(1)
    launch, idle = rng.uniform(100, 900, 60), rng.uniform(0.05, 0.9, 60)
    exact = jitter.Data(
        0.5 * launch * idle**2.0, launch, idle, rng.uniform(1e8, 1e9, 60), rng.uniform(16, 512, 60)
    )
    assert jitter.law(exact) == pytest.approx((0.5, 2.0))
    assert jitter.explained(exact, 0.5, 2.0) == pytest.approx(1.0)
    assert jitter.explained(exact, jitter.ALPHA, jitter.BETA) < 0.9


def test_shares_are_those_of_the_causes_and_add_up() -> None:
    import jitter

    rng = np.random.default_rng(2)
    launch, bandwidth, context = (np.exp(rng.standard_normal(500)) for _ in range(3))
    made = jitter.Data(launch**2 * bandwidth, launch, launch / 10, bandwidth, context)
    found, r2 = jitter.shares(made)
    assert r2 == pytest.approx(1.0)
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["launch latency"] == pytest.approx(0.8, abs=0.1)
    assert found["context length"] == pytest.approx(0.0, abs=0.05)
