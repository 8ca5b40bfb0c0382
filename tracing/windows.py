"""Samples to windows: increase, gauges and histograms as pure array arithmetic.

All arrays are sorted by series, then time, without duplicates. Times are milliseconds; window w of
a grid is (start + w step, start + (w + 1) step]. NaN marks a window in which nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracing.types import Grid

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Samples:
    """Samples of several series: `series` uint64 ids, `time_ms` int64, `value` float64."""

    series: npt.NDArray[np.uint64]
    time_ms: Ints
    value: Floats

    def firsts(self) -> Bools:
        """True where a series begins."""
        begins = np.ones(len(self.series), dtype=bool)
        begins[1:] = self.series[1:] != self.series[:-1]
        return begins

    def take(self, parts: Sequence[slice | Bools]) -> Samples:
        """Those parts, one after the other."""
        columns = (self.series, self.time_ms, self.value)
        return Samples(*(np.concatenate([column[part] for part in parts]) for column in columns))


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def window_of(time_ms: Ints, grid: Grid) -> Ints:
    """The index of the window of each time; −1 where it is outside the grid."""
    start_ms = milliseconds(grid.start.timestamp())
    step_ms = max(1, milliseconds(grid.step_s))
    index = -((start_ms - time_ms) // step_ms) - 1  # ceiling division: windows are left-open
    index[(index < 0) | (index >= grid.count)] = -1
    return index


def reduced(samples: Samples, grid: Grid, over: str) -> Samples:
    """One sample per series and window, at the time of the newest: their avg, max, min or last."""
    window = window_of(samples.time_ms, grid)
    begins = samples.firsts()
    begins[1:] |= window[1:] != window[:-1]
    first = np.flatnonzero(begins)
    if not len(first):
        return samples
    last = np.append(first[1:], len(window)) - 1
    if over == "avg":
        value = np.add.reduceat(samples.value, first) / (last - first + 1)
    elif over == "last":
        value = samples.value[last]
    else:
        value = {"max": np.maximum, "min": np.minimum}[over].reduceat(samples.value, first)
    return Samples(samples.series[first], samples.time_ms[last], value)


def steps(samples: Samples, before: Mapping[int, float]) -> Floats:
    """What each sample adds to its counter since the one before it; NaN where that is unknown.

    A counter that falls was reset and adds what it shows (Prometheus). `before` holds, for the
    first sample of a series, the value it grew from: 0 for a series known to be new.
    """
    step = np.empty(len(samples.value))
    step[1:] = samples.value[1:] - samples.value[:-1]
    begins = np.flatnonzero(samples.firsts())
    known = [before.get(int(series), math.nan) for series in samples.series[begins]]
    step[begins] = samples.value[begins] - np.array(known)
    fell = step < 0
    step[fell] = samples.value[fell]
    return step


def add_up(values: Floats, row: Ints, window: Ints, shape: tuple[int, int]) -> Floats:
    """values summed into (row, window) cells; NaN where no measured value fell."""
    use = (window >= 0) & ~np.isnan(values)
    cell = row[use] * shape[1] + window[use]
    size = shape[0] * shape[1]
    total = np.bincount(cell, weights=values[use], minlength=size).astype(np.float64)
    total[np.bincount(cell, minlength=size) == 0] = math.nan
    return total.reshape(shape)


def split_buckets(cumulative: Floats) -> Floats:
    """Counts per bucket (windows × buckets) from counts ≤ bound, (buckets × windows)."""
    counts = np.diff(cumulative, axis=0, prepend=0.0)
    return np.clip(counts, 0.0, None).T
