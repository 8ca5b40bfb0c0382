"""One `llm_request` span per request, as vLLM names it, and below it where its time went.

    tokenize   its body was there, its tokens were
    queue      until its first step
    prefill    each chunk of its prompt
    decode     its answer, in windows that end at sampled steps (every half second, steps.py)
    detokenize its last token was there, its text was
    engine.step  a sampled step, below one of the requests that it ran for; chunks and windows that
                 end with it link to it, whosever they are

Windows of time, not of tokens: they are for finding where a long answer slowed down, and their
number then follows from how long it took, not from how fast the engine is. What is more than
WINDOWS_MAX, or CHUNKS_MAX, is joined with its neighbours, so a request has a bounded number of
spans.

The step thread queues sampled steps, the event loop the requests that ended; a thread of its own
makes the spans and sends them (OTLP/HTTP). There is one queue, so there is one place where spans
are lost, and they are counted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine import otlp
from engine.config import EngineConfig
from engine.sched.request import Finish, Request
from engine.steps import PHASES, StepTimes

QUEUE_MAX = 8192  # requests and sampled steps
EXPORT_MAX = 128  # of them, in one export
WINDOWS_MAX = 32
CHUNKS_MAX = 64
STEPS_MAX = 4096  # sampled ones that can be linked to
EXPORT_EVERY_S = 1.0
FLUSH_S_MAX = 3.0


Part = tuple[float, float, int]
"""A chunk or a window: began, ended (monotonic seconds), tokens."""
T = TypeVar("T")


@dataclass
class Sampled:
    """A step that spans may link to; `context` once it has a span itself."""

    step: StepTimes
    context: SpanContext | None = None


class Ended(SpanProcessor):
    """Keeps the spans that ended until they are sent; of one thread."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class Tracing:
    """`record` from any thread, never blocks; `close` sends what is left, within FLUSH_S_MAX.

    `dropped` counts requests whose spans found the queue full or were not taken by the receiver.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.model_name = config.model_name
        self.dropped = 0
        self.epoch_ns = 0
        self.provider = otlp.provider(service=config.service, name=config.name, node=config.node)
        self.exporter = otlp.exporter(config.otlp_endpoint, config.ingest_token)
        self.ended = Ended()
        self.provider.add_span_processor(self.ended)
        self.tracer = self.provider.get_tracer("engine")
        self.steps: OrderedDict[float, Sampled] = OrderedDict()  # by when their tokens were there
        self.queue: queue.Queue[Request | StepTimes | None] = queue.Queue(QUEUE_MAX)
        self.thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self.thread.start()

    def record(self, item: Request | StepTimes) -> None:
        try:
            self.queue.put_nowait(item)
        except queue.Full:
            self.dropped += isinstance(item, Request)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put(None, timeout=FLUSH_S_MAX)
        self.thread.join(FLUSH_S_MAX)
        self.exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        going = True
        while going:
            batch = self._batch()
            going = batch[-1] is not None
            # Steps first: a request may have been queued before the step that ended it.
            for item in batch:
                if isinstance(item, StepTimes):
                    self._keep(item)
            requests = [item for item in batch if isinstance(item, Request)]
            for request in requests:
                self._request(request)
            self._export(len(requests))

    def _batch(self) -> list[Request | StepTimes | None]:
        """At least one item; None, the last there will be, is the last of it."""
        batch = [self.queue.get()]
        deadline = time.monotonic() + EXPORT_EVERY_S
        while batch[-1] is not None and len(batch) < EXPORT_MAX:
            try:
                batch.append(self.queue.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        return batch

    def _keep(self, step: StepTimes) -> None:
        self.steps[step.sampled] = Sampled(step)
        if len(self.steps) > STEPS_MAX:
            self.steps.popitem(last=False)

    def _export(self, requests: int) -> None:
        spans, self.ended.spans = self.ended.spans, []
        if spans and self.exporter.export(spans) is not SpanExportResult.SUCCESS:
            self.dropped += requests

    def _ns(self, monotonic_s: float) -> int:
        return self.epoch_ns + int(monotonic_s * 1e9)

    def _request(self, request: Request) -> None:
        # Anew for each request: the wall clock may have been set since the last one.
        self.epoch_ns = time.time_ns() - time.monotonic_ns()
        parent = None
        if request.parent:
            parent = TraceContextTextMapPropagator().extract({"traceparent": request.parent})
        span = self.tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=self._ns(request.arrived),
            attributes={
                "gen_ai.request.id": request.id,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.response.model": self.model_name,
                "gen_ai.usage.prompt_tokens": request.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
                "gen_ai.usage.completion_tokens": request.generated,
                "gen_ai.response.finish_reasons": [str(request.finish)],
                "trimtab.config_version": request.config_version,
                **latencies(request),
            },
        )
        if not span.is_recording():
            return  # whoever asked does not sample this trace, and no step is to be lost with it
        if request.finish is Finish.ERROR:
            span.set_status(Status(StatusCode.ERROR, request.error))
        below = set_span_in_context(span)
        if request.queued > request.arrived:
            self._child("tokenize", below, request.arrived, request.queued)
        self._child("queue", below, request.queued, request.scheduled or request.finished)
        for chunks in joined(request.chunks, CHUNKS_MAX):
            self._parts("prefill", below, chunks, "trimtab.chunk_tokens")
        for parts in joined(windows(request), WINDOWS_MAX):
            self._parts("decode", below, parts, "trimtab.window_tokens")
        if request.written:
            self._child("detokenize", below, request.finished, request.written)
        span.end(self._ns(max(request.finished, request.written)))

    def _parts(self, name: str, below: Context, parts: Sequence[Part], tokens: str) -> None:
        """One span for neighbouring parts, linked to those of their steps that are sampled."""
        steps = [self.steps[ended] for _, ended, _ in parts if ended in self.steps]
        attributes = {tokens: sum(part[2] for part in parts)}
        if len(parts) > 1:
            attributes["trimtab.joined"] = len(parts)
        if steps:
            attributes["trimtab.step"] = steps[-1].step.number
        links = [Link(self._step(sampled, below)) for sampled in steps]
        self._child(name, below, parts[0][0], parts[-1][1], attributes, links)

    def _step(self, sampled: Sampled, below: Context) -> SpanContext:
        """The step's own span, made for the first request that has to do with it."""
        if sampled.context is None:
            step = sampled.step
            attributes: dict[str, int | float | str] = {
                "trimtab.step": step.number,
                "trimtab.step.requests": step.decode_requests + step.prompt_chunks,
                "trimtab.step.decode_tokens": step.decode_requests,
                "trimtab.step.prompt_tokens": step.prompt_tokens,
                "trimtab.step.waiting": step.waiting,
                "trimtab.step.mode": step.mode,
                "trimtab.config_version": step.config_version,
            }
            for phase, seconds in zip(PHASES, step.phases_s, strict=True):
                attributes[f"trimtab.step.{phase}_s"] = seconds
            sampled.context = self._child(
                "engine.step", below, step.began, step.handed_out, attributes
            )
        return sampled.context

    def _child(
        self,
        name: str,
        context: Context,
        began: float,
        ended: float,
        attributes: Mapping[str, int | float | str] | None = None,
        links: Sequence[Link] = (),
    ) -> SpanContext:
        span = self.tracer.start_span(
            name, context=context, start_time=self._ns(began), attributes=attributes, links=links
        )
        span.end(self._ns(ended))
        return span.get_span_context()


def windows(request: Request) -> list[Part]:
    """The answer between its first token and its last, cut at its marks; empty without a token."""
    if not request.first_token:
        return []
    edges = [(request.first_token, 1), *request.marks, (request.finished, request.generated)]
    return [(began, ended, all_ - some) for (began, some), (ended, all_) in pairwise(edges)]


def joined(parts: Sequence[T], most: int) -> list[Sequence[T]]:
    """The parts in their order, in at most so many groups of neighbours."""
    size = max(1, -(-len(parts) // most))
    return [parts[i : i + size] for i in range(0, len(parts), size)]


def latencies(request: Request) -> dict[str, float]:
    """vLLM's gen_ai.latency attributes, in seconds; those that do not exist are left out."""
    values = {
        "e2e": request.finished - request.arrived,
        "time_in_queue": request.queue_s,
    }
    if request.scheduled:
        values["time_in_model_prefill"] = request.prefill_s
        values["time_in_model_inference"] = request.finished - request.scheduled
    if request.first_token:
        values["time_to_first_token"] = request.first_token - request.arrived
        values["time_in_model_decode"] = request.decode_s
    if request.generated > 1:
        values["time_per_output_token"] = request.time_per_output_token_s
    return {f"gen_ai.latency.{name}": value for name, value in values.items()}
