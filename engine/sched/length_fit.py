"""How long prompts are: two distributions fitted to the last of them, and how well each fits.

A Weibull alone says nothing (it fits whatever it is given, well or not): it always stands beside a
log-normal, each with its distance from what was seen, and the nearer one is believed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

SHAPE_MIN, SHAPE_MAX = 0.05, 50.0  # of a Weibull; outside, lengths hardly vary or have no scale
HALVINGS = 50  # of the interval in which the shape is sought
NORMAL = NormalDist()


@dataclass(frozen=True)
class Weibull:
    """P(length > x) = exp(−(x ÷ scale)^shape); `scale` in tokens."""

    shape: float
    scale: float
    name = "weibull"

    def share_below(self, tokens: np.ndarray) -> np.ndarray:
        """P(length ≤ x) of each x (float64, any shape)."""
        below: np.ndarray = -np.expm1(-((tokens / self.scale) ** self.shape))
        return below

    def quantile(self, share: float) -> float:
        """The length, in tokens, that `share` (above 0, below 1) of the prompts do not pass."""
        return float(self.scale * (-math.log1p(-share)) ** (1 / self.shape))


@dataclass(frozen=True)
class LogNormal:
    """The logarithm of a length is normal; `median` in tokens, `deviation` of the logarithm."""

    median: float
    deviation: float
    name = "lognormal"

    def share_below(self, tokens: np.ndarray) -> np.ndarray:
        """P(length ≤ x) of each x (float64, one dimension)."""
        z = np.log(tokens / self.median) / self.deviation
        return np.array([NORMAL.cdf(value) for value in z.tolist()])

    def quantile(self, share: float) -> float:
        """The length, in tokens, that `share` (above 0, below 1) of the prompts do not pass."""
        return self.median * math.exp(self.deviation * NORMAL.inv_cdf(share))


Distribution = Weibull | LogNormal


@dataclass(frozen=True)
class Fit:
    """`distances`: of each distribution by name, Kolmogorov-Smirnov's: the greatest difference
    between the share of prompts below a length that was seen and the one it gives (0 to 1)."""

    best: Distribution
    distances: dict[str, float]

    @property
    def distance(self) -> float:
        return self.distances[self.best.name]


def fit(lengths: np.ndarray) -> Fit | None:
    """Both by maximum likelihood to `lengths` (tokens, one dimension, each at least 1).

    None when they do not vary, which no distribution describes.
    """
    seen, counts = np.unique(np.asarray(lengths, np.float64), return_counts=True)
    if len(seen) < 2:
        return None
    logs, shares = np.log(seen), counts / counts.sum()
    mean = float(shares @ logs)
    deviation = math.sqrt(float(shares @ (logs - mean) ** 2))
    found: tuple[Distribution, ...] = (
        _weibull(seen, shares),
        LogNormal(math.exp(mean), deviation),
    )
    distances = {each.name: _distance(each, seen, shares) for each in found}
    return Fit(min(found, key=lambda each: distances[each.name]), distances)


def _weibull(seen: np.ndarray, shares: np.ndarray) -> Weibull:
    """The shape is where the derivative of the likelihood, which only rises in it, is 0."""
    logs = np.log(seen / seen[-1])  # of lengths of at most 1, whose powers cannot overflow
    mean = float(shares @ logs)
    low, high = SHAPE_MIN, SHAPE_MAX
    for _ in range(HALVINGS):
        shape = (low + high) / 2
        powers = shares * np.exp(shape * logs)
        rises = float(powers @ logs) / float(powers.sum()) - mean - 1 / shape
        low, high = (low, shape) if rises > 0 else (shape, high)
    power = float(shares @ np.exp(high * logs))
    return Weibull(high, float(seen[-1] * power ** (1 / high)))


def _distance(of: Distribution, seen: np.ndarray, shares: np.ndarray) -> float:
    after = np.cumsum(shares)
    given = of.share_below(seen)
    return float(max((after - given).max(), (given - (after - shares)).max()))
