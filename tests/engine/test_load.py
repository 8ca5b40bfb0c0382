from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.load import OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, arrivals, bursts, read_azure_csv


def gaps_cv(times: np.ndarray) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    phases = [(10.0, 20.0), (5.0, 60.0)]
    assert arrivals(3, phases) == arrivals(3, phases)
    assert arrivals(3, phases) != arrivals(4, phases)


def test_arrivals_have_the_mean_asked_and_the_variation_of_the_trace() -> None:
    load = arrivals(1, [(3500.0, 5.53)])
    times = np.array([one.at_s for one in load])
    assert len(load) == pytest.approx(3500 * 5.53, rel=0.03)
    assert gaps_cv(times) == pytest.approx(1.09, abs=0.06)
    per_minute = np.bincount((times // 60).astype(int))[:-1]
    assert per_minute.std() / per_minute.mean() == pytest.approx(0.22, abs=0.07)
    assert (np.diff(times) >= 0).all()


def test_lengths_have_the_means_of_the_scaled_trace_and_keep_their_caps() -> None:
    load = arrivals(2, [(400.0, 50.0)])
    prompts = np.array([one.prompt_tokens for one in load])
    outputs = np.array([one.output_tokens for one in load])
    assert prompts.mean() == pytest.approx(118, rel=0.03)
    assert outputs.mean() == pytest.approx(26.4, rel=0.03)
    assert 1 <= prompts.min() <= prompts.max() == PROMPT_TOKENS_MAX
    assert 1 <= outputs.min() <= outputs.max() <= OUTPUT_TOKENS_MAX


def test_every_phase_has_its_own_rate_and_ids_are_unique() -> None:
    load = arrivals(5, [(50.0, 10.0), (50.0, 0.0), (50.0, 40.0)])
    counts = np.histogram([one.at_s for one in load], bins=[0, 50, 100, 150])[0]
    assert counts[0] == pytest.approx(500, rel=0.15)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(2000, rel=0.1)
    assert len({one.id for one in load}) == len(load)


def test_a_phase_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"phase \(0, 5\.0\): allowed: seconds above 0"):
        arrivals(0, [(0, 5.0)])


def test_bursts_keep_the_mean_and_come_in_a_quarter_of_the_time() -> None:
    phases = bursts(1, 2000.0, 10.0)
    assert sum(seconds for seconds, _ in phases) == pytest.approx(2000.0)
    assert sum(s * rate for s, rate in phases) / 2000.0 == pytest.approx(10.0, rel=0.05)
    high = sum(seconds for seconds, rate in phases if rate > 10.0)
    assert high / 2000.0 == pytest.approx(0.25, rel=0.05)
    assert phases != bursts(2, 2000.0, 10.0)


def test_the_published_csv_is_read_scaled_and_capped(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,14050,2\n"
    )
    first, second = read_azure_csv(path, scale=2.0)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 47, 6)
    assert (second.at_s, second.prompt_tokens, second.output_tokens) == (2.0, 256, 1)


def test_a_csv_that_does_not_fit_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv, line 2"):
        read_azure_csv(path)
