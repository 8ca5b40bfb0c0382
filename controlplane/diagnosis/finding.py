"""What a cause answers: its opinion of a scene, and what it would like done about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from controlplane.diagnosis.facts import Fact

# Verdict of a cause no knob can cure: what is wished for only limits the harm (LOOP 3.6 g).
INFEASIBLE = "infeasible"


@dataclass(frozen=True)
class Wish:
    """A value the cause would like a knob to have; the knob's ladder and bounds have the say.

    `to` is a number, or the word of a choice ("on"). `limit` is a value not to pass, where the
    cause knows what would break beyond it. `exact`: this very value, not a rung on the way to it;
    it has been in force before. `whole`: all the way or not at all, as part of it does harm.
    """

    knob: str
    to: float | str
    why: str
    limit: float | None = None
    exact: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Finding:
    """A cause's opinion. `because` continues the sentence "… because"; `facts` are its numbers.

    `remedy` is ordered: the first wish that can be taken is. `no_remedy` says why there is none.
    `verdict` is empty or INFEASIBLE. `explains` lists the causes whose signs follow from this one
    in this scene, so that they are no second fault (LOOP 3.5, the cause graph). `applies`: whether
    an objective of this kind can be missed because of it at all.
    """

    cause: str
    score: float
    because: str
    facts: dict[str, Any] = field(default_factory=dict)
    evidence: tuple[Fact, ...] = ()
    remedy: tuple[Wish, ...] = ()
    no_remedy: str = ""
    verdict: str = ""
    explains: tuple[str, ...] = ()
    applies: bool = True
