"""What the router measures, under `router:`; histograms have the engine's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.buckets import REQUEST_S, TTFT_S
from engine.knobs import Knob
from engine.reconfig import RuntimeStore
from engine.router.breaker import State
from engine.router.choice import By, Choice
from engine.router.fleet import Fleet
from engine.router.knobs import RouterSettings


class Outcome(StrEnum):
    """What became of a request at one engine."""

    OK = "ok"
    REFUSED = "refused"  # 429 or 503: it said no in good order
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
        disable_created_metrics()  # a second series for each, as the engine's have none
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
        self._gauges(fleet, runtime)
        registry.register(Counts(fleet, choice, spans_dropped))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _gauges(self, fleet: Fleet, runtime: RuntimeStore[RouterSettings]) -> None:
        def gauge(name: str, text: str, labels: list[str]) -> Gauge:
            return Gauge(name, text, labels, registry=self.registry)

        in_flight = gauge("router:in_flight", "Requests at an engine now.", ["engine"])
        elsewhere = gauge("router:elsewhere", "Requests of others it has.", ["engine"])
        up = gauge("router:engine_up", "1: answers /health.", ["engine"])
        state = gauge("router:breaker_state", "1: is in this state.", ["engine", "state"])
        for engine in fleet.engines:
            in_flight.labels(engine.name).set_function(lambda e=engine: e.in_flight)
            elsewhere.labels(engine.name).set_function(lambda e=engine: e.elsewhere)
            up.labels(engine.name).set_function(lambda e=engine: not e.ill)
            for each in State:
                state.labels(engine.name, each).set_function(
                    lambda e=engine, s=each: e.breaker.state is s
                )
        knob = gauge(
            "router:knob", "Running value; of words the place among them: off 0, on 1.", ["knob"]
        )
        for each in runtime.initial.knobs.values():
            knob.labels(each.name).set_function(lambda k=each: number(k, runtime.running.config))
        version = gauge("router:config_version", "Version of the running config.", [])
        version.set_function(lambda: runtime.running.config_version)


class Counts(Collector):
    """Counted elsewhere, as plain numbers."""

    def __init__(self, fleet: Fleet, choice: Choice, spans_dropped: Callable[[], int]) -> None:
        self.fleet, self.choice, self.spans_dropped = fleet, choice, spans_dropped

    def collect(self) -> Iterator[Metric]:
        openings = CounterMetricFamily(
            "router:breaker_openings", "Times it was taken out for its errors.", labels=["engine"]
        )
        for engine in self.fleet.engines:
            openings.add_metric([engine.name], engine.breaker.openings)
        yield openings
        for name, text, value in (
            ("router:prefix_blocks", "Blocks of prompts looked up.", self.choice.blocks),
            ("router:prefix_blocks_matched", "Of these, sent before.", self.choice.matched),
            ("router:spans_dropped", "Spans that were not delivered.", self.spans_dropped()),
        ):
            yield CounterMetricFamily(name, text, value=value)


def number(knob: Knob, settings: RouterSettings) -> float:
    value = settings.chosen[knob.name]
    return float(knob.ladder.index(value) if isinstance(value, str) else value)
