"""What the router measures, under `router:`; histograms have the engine's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.families import REQUEST_S, TTFT_S, counter, gauge
from engine.knobs import Knob
from engine.reconfig import RuntimeStore
from engine.router.breaker import State
from engine.router.choice import By, Choice
from engine.router.fleet import Fleet
from engine.router.knobs import RouterSettings


class Outcome(StrEnum):
    """What became of a request at one engine."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503: it said no in good order, or this router could not ask
    REJECTED = "rejected"  # another 4xx: the request was wrong
    ERROR = "error"  # 5xx, no whole answer, or an answer that says error
    ABORTED = "aborted"  # its client left
    AGAIN = "again"  # it provably did not begin: sent to another engine, if there is one


UNROUTED = ("no_engine", "max_in_flight", "shutting_down")


class Metrics:
    """Of one router, with a registry of its own; `render` gives the exposition."""

    def __init__(
        self, fleet: Fleet, choice: Choice, runtime: RuntimeStore[RouterSettings],
        spans_dropped: Callable[[], int],
    ) -> None:  # fmt: skip
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, as the engine's have none
        self.registry = registry = CollectorRegistry()
        text = "Requests at an engine that ended, by what became of them."
        self.requests = Counter("router:requests", text, ["engine", "outcome"], registry=registry)
        self.retries = Counter(
            "router:retries", "Requests sent to another engine, by the first and why.",
            ["engine", "reason"], registry=registry,
        )  # fmt: skip
        self.unrouted = Counter(
            "router:requests_unrouted", "Requests no engine was asked for, by reason.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.choices = Counter(
            "router:choices", "Engines chosen, by why.", ["engine", "by"], registry=registry
        )
        self.first_byte = Histogram(
            "router:time_to_first_byte_seconds", "From the request's arrival at the router.",
            ["engine"], buckets=TTFT_S, registry=registry,
        )  # fmt: skip
        self.e2e = Histogram(
            "router:e2e_request_latency_seconds", "From its arrival to the answer's last byte.",
            ["engine"], buckets=REQUEST_S, registry=registry,
        )  # fmt: skip
        # All there from the start: a counter that appears with its first event shows no rise.
        for engine in fleet.engines:
            for outcome in Outcome:
                self.requests.labels(engine.name, outcome)
            for by in By:
                self.choices.labels(engine.name, by)
            self.first_byte.labels(engine.name)
            self.e2e.labels(engine.name)
        for reason in UNROUTED:
            self.unrouted.labels(reason)
        registry.register(Reading(fleet, choice, runtime, spans_dropped))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Reading(Collector):
    """What is counted elsewhere, or stands, when /metrics is asked for."""

    def __init__(
        self, fleet: Fleet, choice: Choice, runtime: RuntimeStore[RouterSettings],
        spans_dropped: Callable[[], int],
    ) -> None:  # fmt: skip
        self.fleet, self.choice, self.runtime = fleet, choice, runtime
        self.spans_dropped = spans_dropped

    def collect(self) -> Iterator[Metric]:
        engines = [({"engine": engine.name}, engine) for engine in self.fleet.engines]
        for name, text, values in (
            ("in_flight", "Requests at an engine now.", [e.in_flight for _, e in engines]),
            ("elsewhere", "Requests of others it has.", [e.elsewhere for _, e in engines]),
            ("engine_up", "1: answers /health.", [int(not e.ill) for _, e in engines]),
        ):
            samples = [(k, float(v)) for (k, _), v in zip(engines, values, strict=True)]
            yield gauge(f"router:{name}", text, samples)
        yield gauge(
            "router:breaker_state",
            "1: is in this state.",
            [({**k, "state": s}, e.breaker.state is s) for k, e in engines for s in State],
        )
        yield counter(
            "router:breaker_openings",
            "Times it was taken out for its errors.",
            [(k, e.breaker.openings) for k, e in engines],
        )
        version = self.runtime.running
        yield gauge(
            "router:knob",
            "Running value; of words the place among them: off 0, on 1.",
            [({"knob": name}, number(knob, version.config))
             for name, knob in version.config.knobs.items()],
        )  # fmt: skip
        yield gauge(
            "router:config_version", "Of the running config.", [({}, version.config_version)]
        )
        for name, text, value in (
            ("router:prefix_blocks", "Blocks of prompts looked up.", self.choice.blocks),
            ("router:prefix_blocks_matched", "Of these, sent before.", self.choice.matched),
            ("router:spans_dropped", "Spans that were not delivered.", self.spans_dropped()),
        ):
            yield counter(name, text, [({}, value)])


def number(knob: Knob, settings: RouterSettings) -> float:
    value = settings.chosen[knob.name]
    return float(knob.ladder.index(value) if isinstance(value, str) else value)
