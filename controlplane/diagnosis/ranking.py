"""Which of the causes' findings are named, and which are rivals. Pure.

A finding that carries and whose signs follow from another one that carries is no second fault: the
slow host is named, not the queue it makes (the cause graph of LOOP 3.5). Two that carry and do not
explain each other are two faults, and both are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.diagnosis.cause import SCORE_MIN, UNKNOWN, Finding, label
from controlplane.diagnosis.facts import support

NAMED_MAX = 2


@dataclass(frozen=True)
class Ranking:
    """`named`, best first, is empty when the cause is unknown; `rivals` are all the others."""

    named: tuple[Finding, ...]
    rivals: tuple[Finding, ...]

    @property
    def best(self) -> Finding:
        """The first that is named, else `unknown` with what the nearest fails on."""
        if self.named:
            return self.named[0]
        nearest = self.rivals[0]
        missing = next((f.sentence for f in nearest.evidence if f.required and not f.supports), "")
        because = f"the nearest, {label(nearest.cause)}, fails on: {missing}"
        return Finding(UNKNOWN, nearest.score, f"no cause examined explains it; {because}")

    @property
    def because(self) -> str:
        """The sentence of the first, and of what else is wrong beside it."""
        first, *more = self.named or (self.best,)
        what, because, _ = first.because.partition("because ")  # what is said once
        said = what + because if because else ""
        return "; besides, ".join([first.because, *(f.because.removeprefix(said) for f in more)])


def rank(findings: Sequence[Finding]) -> Ranking:
    """The findings by score; at least one is needed.

    Of those that are refuted, and score alike, the one that more speaks for is nearer; what cannot
    be the cause of such an objective's misses is never near.
    """
    ordered = sorted(
        findings,
        key=lambda f: (not f.applies, -f.score, -support(f.evidence), f.cause),
    )
    carry = [finding for finding in ordered if finding.score >= SCORE_MIN]
    roots = [
        finding
        for finding in carry
        if not any(finding.cause in other.explains for other in carry if other is not finding)
    ]
    named = tuple((roots or carry)[:NAMED_MAX])
    return Ranking(named, tuple(finding for finding in ordered if finding not in named))
