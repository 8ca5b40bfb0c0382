"""Contract of an indicator (SLI): good and total events over time. Found in slo/indicators/.

A module there defines `indicator`, an object of this shape whose slug is the module's name. It
imports this contract and tracing.types and nothing else; an objective stores the slug, so a new
kind is one new file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeGuard

from slo.plugins import plugins
from tracing.types import Grid, Reader, ShareSeries

NAME_CHARS_MAX = 200
THRESHOLD_MS_MAX = 3_600_000.0


class SpecError(ValueError):
    """A parameter that does not fit: names the field, the value and what is allowed."""

    def __init__(self, param: str, value: object, allowed: str) -> None:
        super().__init__(f"{param}={value!r}: allowed: {allowed}")
        self.param = param


def gettext_noop(message: str) -> str:
    """Marks a message for makemessages; it is translated where it is shown."""
    return message


class Unit(NamedTuple):
    """What the events of an indicator are, in English: a word for one of them and for several."""

    one: str
    many: str

    def word(self, count: float) -> str:
        """The one that is said after a count, as it is written: without decimals."""
        return self.one if round(count) == 1 else self.many


REQUESTS = Unit(gettext_noop("request"), gettext_noop("requests"))
GAPS = Unit(gettext_noop("gap between tokens"), gettext_noop("gaps between tokens"))
SPANS = Unit(gettext_noop("span"), gettext_noop("spans"))
MEASUREMENTS = Unit(gettext_noop("measurement"), gettext_noop("measurements"))

# Part of a metric's or a span's name → what is counted there (vLLM's names); the first that fits.
UNIT_OF = {
    "inter_token_latency": GAPS,
    "vllm:time_per_output_token": GAPS,
    "request": REQUESTS,
    "time_to_first_token": REQUESTS,
    "time_per_output_token": REQUESTS,
}


def unit_of(name: str, *, unknown: Unit) -> Unit:
    """What a metric or a span of that name counts; `unknown` where the name does not say."""
    return next((unit for part, unit in UNIT_OF.items() if part in name), unknown)


class Indicator(Protocol):
    """One way to count good and total events of a service."""

    slug: str
    label: str

    def clean(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The spec with its defaults filled in. Raises SpecError."""
        ...

    def families(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        """The metrics it reads, whose age decides `stale` and `missing`; empty for spans."""
        ...

    def span(self, spec: Mapping[str, Any]) -> str:
        """The name of the spans it reads; empty for metrics."""
        ...

    def unit(self, spec: Mapping[str, Any]) -> Unit:
        """What it counts: requests, or other events."""
        ...

    def read(
        self, reader: Reader, *, service: str, spec: Mapping[str, Any], grid: Grid
    ) -> list[ShareSeries]:
        """Good and total per window, one series per engine (label `instance`).

        NaN where nothing was measured. Raises SpecError when the data cannot answer the spec, as
        with a threshold that is no bucket edge.
        """
        ...

    def describe(self, spec: Mapping[str, Any]) -> str:
        """What a good event is, in half a sentence: "time to first token ≤ 500 ms"."""
        ...


@cache
def indicators() -> dict[str, Indicator]:
    """Every indicator by slug, in order of slug."""
    return plugins("slo.indicators", "indicator")


def spec_keys_check(spec: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raises SpecError for a key that means nothing here, most likely a slip of the pen."""
    for key in spec:
        if key not in allowed:
            raise SpecError(key, spec[key], f"no such parameter, only {', '.join(sorted(allowed))}")


def spec_choice(spec: Mapping[str, Any], key: str, allowed: Collection[str]) -> str:
    value = spec.get(key)
    if not isinstance(value, str) or value not in allowed:
        raise SpecError(key, value, ", ".join(allowed))
    return value


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= NAME_CHARS_MAX and value.isprintable()


def spec_name(spec: Mapping[str, Any], key: str, default: str) -> str:
    value = spec.get(key, default)
    if not _is_name(value):
        raise SpecError(key, value, f"a name of 1 to {NAME_CHARS_MAX} printable characters")
    return value


def spec_threshold_ms(spec: Mapping[str, Any]) -> float:
    value = spec.get("threshold_ms")
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not 0 < float(value) <= THRESHOLD_MS_MAX:  # type: ignore[arg-type]
        raise SpecError(
            "threshold_ms", value, f"milliseconds, more than 0, at most {THRESHOLD_MS_MAX:g}"
        )
    return float(value)  # type: ignore[arg-type]


def spec_names(spec: Mapping[str, Any], key: str, default: list[str], *, least: int) -> list[str]:
    value = spec.get(key, default)
    names_max = 8
    if (
        not isinstance(value, list)
        or not least <= len(value) <= names_max
        or not all(_is_name(v) for v in value)
    ):
        raise SpecError(key, value, f"a list of {least} to {names_max} names")
    return list(value)
