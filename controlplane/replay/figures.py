"""What a replay is summed up in: latencies by quantile, and what met its promises (goodput)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.replay import Record, Status, Summary, summarise

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
# A quantile is told where order statistics bound it on both sides with 95 % confidence: where the
# largest of n values lies below it (probability q^n), or the least above it, at most so often.
OUTSIDE_MAX = 0.025


def answers_needed(q: float) -> int:
    """How many values carry the quantile `q`: 6 the median, 3,688 P99.9."""
    return math.ceil(math.log(OUTSIDE_MAX) / math.log(max(q, 1 - q)))


def quantiles(values: Iterable[float]) -> list[float | None]:
    """Those of QUANTILES, of the values that are numbers; None where they are too few for it."""
    known = np.array([value for value in values if not math.isnan(value)])
    return [
        float(np.quantile(known, q)) if len(known) >= answers_needed(q) else None for q in QUANTILES
    ]


@dataclass(frozen=True)
class Slo:
    """Times in milliseconds that an answer has to keep to be good; inf: any will do."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf

    def met(self, record: Record) -> bool:
        """Of an answer of one token there is no TPOT to miss."""
        return (
            record.status is Status.OK
            and record.ttft_s * 1000 <= self.ttft
            and not record.tpot_s * 1000 > self.tpot
            and record.e2e_s * 1000 <= self.e2e
        )

    @property
    def limits_ms(self) -> dict[str, float]:
        """Those there are."""
        return {name: limit for name, limit in vars(self).items() if limit < math.inf}

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} ≤ {limit:g} ms" for name, limit in self.limits_ms.items())


@dataclass(frozen=True)
class Figures:
    """`summary` has the counts; latencies are seconds, by QUANTILES, of what was answered.

    `late_max_s`: the client's longest delay in sending. `short`: answers of fewer tokens than were
    asked for. `good`: requests that kept the SLO.
    """

    summary: Summary
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    e2e_s: list[float | None]
    late_s: list[float | None]
    late_max_s: float
    sent_over_s: float
    answered_over_s: float
    prompt_tokens_per_s: float
    short: int
    good: int

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return self.good / self.answered_over_s if self.answered_over_s else 0.0


def figures(records: Sequence[Record], slo: Slo, unsolicited: int) -> Figures:
    ok = [record for record in records if record.status is Status.OK]
    sent = [record for record in records if not math.isnan(record.sent_s)]
    began = min((record.sent_s for record in sent), default=0.0)
    over = max((record.end_s for record in ok), default=began) - began
    return Figures(
        summary=summarise(records, unsolicited),
        ttft_s=quantiles(record.ttft_s for record in ok),
        tpot_s=quantiles(record.tpot_s for record in ok),
        e2e_s=quantiles(record.e2e_s for record in ok),
        late_s=quantiles(record.late_s for record in sent),
        late_max_s=max((record.late_s for record in sent), default=0.0),
        sent_over_s=max((record.sent_s for record in sent), default=began) - began,
        answered_over_s=over,
        prompt_tokens_per_s=sum(r.request.prompt_tokens for r in ok) / over if over else 0.0,
        short=sum(record.tokens < record.request.output_tokens for record in ok),
        good=sum(map(slo.met, ok)),
    )
