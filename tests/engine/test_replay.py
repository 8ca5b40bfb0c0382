from __future__ import annotations

import asyncio

import pytest

from controlplane.demo.house import free_port
from engine.load import Request, arrivals
from engine.replay import Connection, Record, Replayer, Status, calibrate, summarise


def test_a_summary_counts_every_request_once_and_duplicates_apart() -> None:
    asked = Request(0.0, 10, 3, "x")
    records = [
        Record(asked, 0.0, 0.1, 0.3, tokens=3, answers=1, status=Status.OK),
        Record(asked, 0.0, 0.2, 0.4, tokens=3, answers=2, status=Status.OK),
        Record(asked, 0.0, end_s=0.1, http_status=429, status=Status.REJECTED),
        Record(asked, status=Status.LOST),
    ]
    summary = summarise(records)
    assert sum(summary.counts.values()) == summary.sent == 4
    assert (summary.counts["ok"], summary.counts["lost"], summary.duplicated) == (2, 1, 1)
    assert summary.ttft_p50_s == pytest.approx(0.15)
    assert summary.tpot_p50_s == pytest.approx(0.1)


def test_requests_to_nobody_are_interrupted_and_not_lost() -> None:
    async def run() -> list[Record]:
        return await Replayer(f"http://127.0.0.1:{free_port()}").run(arrivals(1, [(0.1, 50.0)]))

    records = asyncio.run(run())
    assert records
    assert {record.status for record in records} == {Status.INTERRUPTED}


def test_calibrating_nobody_is_an_error_that_names_the_address() -> None:
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:\d+: no engine answers there"):
        asyncio.run(calibrate(f"http://127.0.0.1:{free_port()}", seconds=1.0))


@pytest.mark.parametrize("usage", ['{"completion_tokens": 44}', '{"completion_tokens":44,"x":1}'])
def test_the_tokens_of_an_answer_are_read_however_its_json_is_spaced(usage: str) -> None:
    replayer = Replayer("http://127.0.0.1:1")
    connection = Connection(replayer)
    connection.record = record = replayer.record(Request(0.5, 10, 44, "x"))
    record.sent_s = 0.75
    body = f'data: {{"choices": [], "usage": {usage}}}\n\ndata: [DONE]\n\n'
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.data_received((head + body).encode())
    assert (record.status, record.tokens, record.late_s) == (Status.OK, 44, 0.25)
