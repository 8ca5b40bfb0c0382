"""A span exporter that keeps a ledger: what it sent, and what was acknowledged.

It behaves as OTLP/HTTP asks an exporter to: a batch is sent again, with the same ids, after a
lost connection and after 429, 502, 503 and 504 (waiting as long as Retry-After says); any other
answer is final. A batch that was on its way when the receiver died may be stored already: that is
what makes "stored once" a promise worth checking.
"""

from __future__ import annotations

import gzip
import http.client
import random
import threading
import time
from collections import defaultdict

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

BATCH_SPANS = 40
BATCHES_PER_TRACE = 20  # a trace is read back whole, and a reader returns at most 10,000 spans
EVERY_S = 0.25
TIMEOUT_S = 10.0  # of OTLP exporters
RETRY_S_MAX = 2.0
AGAIN = (429, 502, 503, 504)


class SpanSender(threading.Thread):
    """Sends until `finish`; then every batch it began has been acknowledged or refused.

    `acknowledged` maps trace id → span ids (hex). `retried` counts repeated sends, `refused` holds
    the answers that were final and not 200.
    """

    def __init__(self, port: int, token: str, seed: int) -> None:
        super().__init__(name=f"spans-{seed}", daemon=True)
        self.port, self.token = port, token
        self.draw = random.Random(seed)
        self.acknowledged: dict[str, list[str]] = defaultdict(list)
        self.sent = self.retried = 0
        self.refused: list[str] = []
        self.ending = threading.Event()
        self.connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        batches = 0
        while not self.ending.wait(EVERY_S):
            if batches % BATCHES_PER_TRACE == 0:
                trace_id = self.draw.randbytes(16)
            batches += 1
            span_ids = [self.draw.randbytes(8) for _ in range(BATCH_SPANS)]
            self.sent += len(span_ids)
            if self.deliver(body(trace_id, span_ids)):
                self.acknowledged[trace_id.hex()] += [span_id.hex() for span_id in span_ids]

    def finish(self, wait_s: float) -> bool:
        """Stops; False when the batch in hand could not be delivered within `wait_s`."""
        self.ending.set()
        self.join(wait_s)
        return not self.is_alive()

    def deliver(self, payload: bytes) -> bool:
        """The same bytes until they are acknowledged (True) or refused for good (False)."""
        wait_s = 0.1
        while True:
            try:
                status, answer, retry_after = self.post(payload)
            except (OSError, http.client.HTTPException):
                self.connection = None
                status, answer, retry_after = 0, b"", ""
            if status == 200 and not answer:
                return True
            if status and status not in AGAIN:
                self.refused.append(f"HTTP {status}: {answer[:200]!r}")
                return False
            self.retried += 1
            wait_s = min(2 * wait_s, RETRY_S_MAX)
            time.sleep(float(retry_after) if retry_after else self.draw.uniform(0, wait_s))

    def post(self, payload: bytes) -> tuple[int, bytes, str]:
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
            "Authorization": f"Bearer {self.token}",
        }
        self.connection.request("POST", "/v1/traces", payload, headers)
        response = self.connection.getresponse()
        return response.status, response.read(), response.headers.get("Retry-After", "")


def body(trace_id: bytes, span_ids: list[bytes]) -> bytes:
    """A gzip export. Service `ledger`: no objective looks at it."""
    now = time.time_ns()
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.add(key="service.name").value.string_value = "ledger"
    spans = resource_spans.scope_spans.add().spans
    for number, span_id in enumerate(span_ids):
        spans.add(
            trace_id=trace_id,
            span_id=span_id,
            name="ledger",
            kind=2,
            start_time_unix_nano=now - 1_000_000,
            end_time_unix_nano=now + number,
        )
    return gzip.compress(request.SerializeToString(), 1)
