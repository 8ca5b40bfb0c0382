"""Sends load to an engine open loop, and measures it at the client; `calibrate` what it sustains.

Imports no torch: the control plane's demo uses this module.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

import numpy as np

from engine.load import PROMPT_TOKENS_MAX, Request, arrivals

LETTERS = "abcdefghijklmnopqrstuvwxyz "
ANSWER_S_MAX = 60.0
LATELY_S = 15.0


class Status(StrEnum):
    """What became of a request, as its client saw it."""

    PENDING = "pending"
    OK = "ok"
    REJECTED = "rejected"  # 429 or 503: the engine said no
    INTERRUPTED = "interrupted"  # no connection, or it died before the answer's end
    FAILED = "failed"  # an answer that says error
    LOST = "lost"  # neither answer nor error within ANSWER_S_MAX


@dataclass
class Record:
    """One request at the client; times in seconds after the start, NaN while not seen."""

    request: Request
    sent_s: float = math.nan
    first_s: float = math.nan
    end_s: float = math.nan
    tokens: int = 0
    answers: int = 0
    http_status: int = 0
    status: Status = Status.PENDING

    @property
    def late_s(self) -> float:
        """How long after its time it was sent: the client's delay, and its connection's."""
        return self.sent_s - self.request.at_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean gap after the first token; NaN with fewer than two tokens."""
        return (self.end_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else math.nan

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one request at a time; reads just enough of a streamed answer."""

    def __init__(self, replayer: Replayer) -> None:
        self.replayer = replayer
        self.transport: asyncio.Transport | None = None
        self.record: Record | None = None
        self.head = b""
        self.tail = b""
        self.body_bytes = -1  # still to come of a body with a length; -1: chunked
        self.reading = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, record: Record) -> None:
        assert self.transport is not None
        self.record, self.head, self.tail, self.reading = record, b"", b"", False
        record.sent_s = self.replayer.now()
        self.transport.write(self.replayer.message(record.request))

    def data_received(self, data: bytes) -> None:
        record = self.record
        if record is None:
            self.replayer.unsolicited += 1
            return
        if not self.reading:
            self.head += data
            head, blank, data = self.head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._read_head(head.lower(), record)
        if not data:
            return
        if record.http_status == 200 and math.isnan(record.first_s):
            record.first_s = self.replayer.now()
        seen = self.tail + data
        if b"data: [DONE]" in seen:
            record.answers += seen.count(b"data: [DONE]")
            record.end_s = self.replayer.now()
        # A marker cut in two is found with the next part; a whole one must not be found again.
        self.tail = seen[-512:].replace(b"data: [DONE]", b"data: [done]")
        if self.body_bytes >= 0:
            self.body_bytes -= len(data)
            if self.body_bytes <= 0:
                self._finish(record)
        elif seen.endswith(b"\r\n0\r\n\r\n"):
            self._finish(record)

    def _read_head(self, head: bytes, record: Record) -> None:
        self.reading = True
        record.http_status = int(head[9:12])
        self.body_bytes = -1
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name == b"content-length":
                self.body_bytes = int(value)
            elif name == b"x-request-id" and value.strip() != record.request.id.lower().encode():
                self.replayer.unsolicited += 1

    def _finish(self, record: Record) -> None:
        if record.answers:
            mark = self.tail.rfind(b'"completion_tokens":')
            if mark >= 0:
                record.tokens = int(self.tail[mark + 20 :].split(b",", 1)[0].split(b"}", 1)[0])
            status = Status.OK
        else:
            record.end_s = self.replayer.now()
            rejected = record.http_status in (429, 503)
            status = Status.REJECTED if rejected else Status.FAILED
        self.record = None
        self.replayer.idle.append(self)
        self.replayer.settle(record, status)

    def connection_lost(self, error: Exception | None) -> None:
        record, self.record = self.record, None
        if self in self.replayer.idle:
            self.replayer.idle.remove(self)
        if record is not None:
            record.end_s = self.replayer.now()
            self.replayer.settle(record, Status.INTERRUPTED)


class Replayer:
    """Sends requests to one engine at their times, whatever becomes of the ones before.

    `records` may be read while it runs. Every request is counted exactly once: its status is
    PENDING until it is settled, LOST when nothing came within `answer_s_max`.
    """

    def __init__(self, url: str, *, model: str = "", answer_s_max: float = ANSWER_S_MAX) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"url: got {url!r}, want http://host:port")
        self.host, self.port = parts.hostname, parts.port or 80
        self.model = model
        self.answer_s_max = answer_s_max
        self.records: list[Record] = []
        self.idle: list[Connection] = []
        self.unsolicited = 0
        self.pending = 0
        self.started = time.monotonic()
        self.settled = asyncio.Event()
        self.text = "".join(np.random.default_rng(0).choice(list(LETTERS), 16_384).tolist())

    def now(self) -> float:
        return time.monotonic() - self.started

    async def run(self, requests: Iterable[Request]) -> list[Record]:
        """Sends all, in order of `at_s`, and waits until each is settled or lost."""
        self.started = time.monotonic()
        launches: set[asyncio.Task[None]] = set()
        for request in requests:
            delay = request.at_s - self.now()
            if delay > 0:
                await asyncio.sleep(delay)
            launches.add(task := asyncio.create_task(self.launch(self.record(request))))
            task.add_done_callback(launches.discard)
        deadline = self.now() + self.answer_s_max
        while self.pending and self.now() < deadline:
            await self.wait_settled(deadline - self.now())
        for record in self.records:
            if record.status is Status.PENDING:
                record.status = Status.LOST
        self.close()
        return self.records

    def record(self, request: Request) -> Record:
        record = Record(request)
        self.records.append(record)
        self.pending += 1
        return record

    async def launch(self, record: Record) -> None:
        """Sends one request on an idle connection, or on a new one."""
        record.sent_s = self.now()
        if self.idle:
            self.idle.pop().send(record)
            return
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: Connection(self), self.host, self.port
            )
        except OSError:
            record.end_s = self.now()
            self.settle(record, Status.INTERRUPTED)
            return
        connection.send(record)

    def settle(self, record: Record, status: Status) -> None:
        assert record.status is Status.PENDING
        record.status = status
        self.pending -= 1
        self.settled.set()

    async def wait_settled(self, timeout_s: float) -> None:
        self.settled.clear()
        try:
            await asyncio.wait_for(self.settled.wait(), timeout_s)
        except TimeoutError:
            return

    def close(self) -> None:
        for connection in self.idle:
            assert connection.transport is not None
            connection.transport.close()

    def message(self, request: Request) -> bytes:
        """The HTTP request."""
        body = {
            "prompt": request.prompt() or self.letters(request),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model:
            body["model"] = self.model
        payload = json.dumps(body).encode()
        priority = f"X-Priority: {request.priority}\r\n" if request.priority else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            f"X-Request-Id: {request.id}\r\n{priority}\r\n"
        )
        return head.encode() + payload

    def letters(self, request: Request) -> str:
        """A byte is a token, and the engine adds one to begin the sequence."""
        longest = max(PROMPT_TOKENS_MAX, request.prompt_tokens)
        offset = zlib.crc32(request.id.encode()) % (len(self.text) - longest)
        return self.text[offset : offset + request.prompt_tokens - 1]


def lately(replayer: Replayer) -> str:
    """How the last seconds went, seen from the client."""
    over_s = min(LATELY_S, replayer.now())
    since = replayer.now() - over_s
    recent: list[Record] = []
    for each in reversed(replayer.records):
        if each.sent_s < since - over_s:
            break
        if each.first_s > since or (each.status is Status.REJECTED and each.end_s > since):
            recent.append(each)
    if not recent:
        return "no answers yet"
    ttft = sorted(r.ttft_s for r in recent if r.first_s > since)
    refused = sum(r.status is Status.REJECTED for r in recent)
    p99 = f"{ttft[int(0.99 * (len(ttft) - 1))] * 1000:,.0f} ms" if ttft else "–"
    return (
        f"{len(recent) / over_s:.0f} req/s · TTFT p99 {p99} · "
        f"{replayer.pending} in flight · {refused} refused"
    )


@dataclass(frozen=True)
class Summary:
    """Counts by status, and the latencies of those answered (seconds, NaN without any)."""

    sent: int
    counts: dict[str, int]
    duplicated: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    tokens_per_s: float
    requests_per_s: float


def summarise(records: Sequence[Record], unsolicited: int = 0) -> Summary:
    ok = [record for record in records if record.status is Status.OK]

    def quantile(values: Iterator[float], q: float) -> float:
        finite = [value for value in values if not math.isnan(value)]
        return float(np.quantile(finite, q)) if finite else math.nan

    span = max((r.end_s for r in ok), default=0.0) - min((r.sent_s for r in ok), default=0.0)
    return Summary(
        sent=len(records),
        counts={status: sum(r.status is status for r in records) for status in Status},
        duplicated=unsolicited + sum(max(0, r.answers - 1) for r in records),
        ttft_p50_s=quantile((r.ttft_s for r in ok), 0.5),
        ttft_p95_s=quantile((r.ttft_s for r in ok), 0.95),
        ttft_p99_s=quantile((r.ttft_s for r in ok), 0.99),
        tpot_p50_s=quantile((r.tpot_s for r in ok), 0.5),
        tpot_p95_s=quantile((r.tpot_s for r in ok), 0.95),
        tpot_p99_s=quantile((r.tpot_s for r in ok), 0.99),
        e2e_p50_s=quantile((r.e2e_s for r in ok), 0.5),
        e2e_p99_s=quantile((r.e2e_s for r in ok), 0.99),
        tokens_per_s=sum(r.tokens for r in ok) / span if span > 0 else 0.0,
        requests_per_s=len(ok) / span if span > 0 else 0.0,
    )


@dataclass(frozen=True)
class Capacity:
    """What an engine sustains when it is never short of work."""

    requests_per_s: float
    tokens_per_s: float


async def calibrate(
    url: str,
    *,
    seconds: float = 4.0,
    concurrency: int = 64,
    requests: Iterable[Request] | None = None,
) -> Capacity:
    """Closed loop: `concurrency` requests are always in flight; the first quarter is warm-up.

    Of `requests`, an endless supply, only the lengths count; without it they are the trace's. What
    is told at the edges of the time counts in part, so that long answers do not come in waves.
    Raises RuntimeError when nothing listens there or nothing was answered.
    """
    replayer = Replayer(url)
    # Far more than any engine here answers in that time; `next` says so should it ever run dry.
    supply = iter(requests or arrivals(0, [(seconds, 2000.0)], name="calibrate"))
    while replayer.now() < seconds:
        while replayer.pending < concurrency:
            record = replayer.record(next(supply))
            await replayer.launch(record)
            if record.status is Status.INTERRUPTED:
                replayer.close()
                raise RuntimeError(f"{url}: no engine answers there")
        await replayer.wait_settled(1.0)
    ended = replayer.now()
    while replayer.pending and replayer.now() < ended + ANSWER_S_MAX:
        await replayer.wait_settled(1.0)
    replayer.close()
    warm = ended / 4
    parts = [
        (part, r.tokens) for r in replayer.records if (part := _part_within(r, warm, ended)) > 0
    ]
    if not parts:
        raise RuntimeError(f"{url}: no request was answered within {seconds} s")
    span = ended - warm
    return Capacity(
        sum(part for part, _ in parts) / span, sum(part * tokens for part, tokens in parts) / span
    )


def _part_within(record: Record, begin_s: float, end_s: float) -> float:
    """What part of its answer came in that time: long ones that cross its edges count in part."""
    if record.status is not Status.OK:
        return 0.0
    if record.end_s <= record.first_s:
        return float(begin_s <= record.end_s <= end_s)
    inside_s = min(record.end_s, end_s) - max(record.first_s, begin_s)
    return max(0.0, inside_s) / (record.end_s - record.first_s)
