"""What was acknowledged is there after kill -9; one process owns the store."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from controlplane.demo.house import free_port
from tests.tracing.otlp import span, trace_request
from tracing.store.store import Store

ROOT = Path(__file__).resolve().parents[2]
SPANS_PER_REQUEST = 20
SENDERS = 4

COUNT = """
import sys
from pathlib import Path
from tracing.store.chdb import ChdbStore
store = ChdbStore(Path(sys.argv[1]))
for row in store.query(
    "SELECT hex(trace_id) AS trace, uniqExact(span_id) AS n FROM spans GROUP BY trace"
).to_pylist():
    print(int(row["trace"], 16), row["n"])
store.close()
"""


@contextmanager
def server(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    command = [sys.executable, "-m", "tests.tracing.server", str(port), str(directory)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "the server stopped before it served"
                time.sleep(0.05)
        yield process, port
    finally:
        process.kill()
        process.wait()


def send_until_it_dies(port: int, first: int, acknowledged: list[int], sent: list[int]) -> None:
    """Requests of one trace each, numbered from `first`; notes what was acknowledged."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {"Authorization": "Bearer t", "Content-Type": "application/x-protobuf"}
    for number in range(first, first + 100_000):
        spans = [span(i, trace=number) for i in range(1, SPANS_PER_REQUEST + 1)]
        try:
            sent.append(number)
            body = trace_request(spans).SerializeToString()
            connection.request("POST", "/v1/traces", body, headers)
            response = connection.getresponse()
            response.read()
        except (OSError, HTTPException):
            return
        assert response.status == 200
        acknowledged.append(number)


def counted(directory: Path) -> dict[int, int]:
    """Spans per trace, read by a process of its own (this one holds another store)."""
    found = subprocess.run(
        [sys.executable, "-c", COUNT, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(tuple(map(int, line.split())) for line in found.stdout.splitlines())  # type: ignore[misc]


@pytest.mark.processes
def test_acknowledged_spans_survive_kill_9_and_no_batch_is_partial(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    sent: list[int] = []
    first = 1
    for _ in range(2):
        with server(tmp_path / "chdb") as (process, port):
            senders = [
                threading.Thread(
                    target=send_until_it_dies,
                    args=(port, first + i * 1_000_000, acknowledged, sent),
                )
                for i in range(SENDERS)
            ]
            for sender in senders:
                sender.start()
            time.sleep(0.7 + random.random() / 2)
            os.kill(process.pid, signal.SIGKILL)
            for sender in senders:
                sender.join()
        first += SENDERS * 1_000_000
    found = counted(tmp_path / "chdb")
    assert len(acknowledged) > 20
    assert set(acknowledged) <= set(found) <= set(sent)
    assert set(found.values()) == {SPANS_PER_REQUEST}


@pytest.mark.processes
def test_a_store_open_elsewhere_is_refused_by_name(store: Store) -> None:
    from django.conf import settings

    path = settings.TRIMTAB_HOME / "chdb"
    failed = subprocess.run(
        [sys.executable, "-c", COUNT, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    last = failed.stderr.strip().splitlines()
    assert failed.returncode == 1
    assert any(
        f"StoreLocked: The telemetry store {path} is open in another process (PID: {os.getpid()})"
        in line
        for line in last
    )


@pytest.mark.processes
def test_commands_beside_a_live_server_leave_the_store_alone(store: Store) -> None:
    from django.conf import settings

    environment = {**os.environ, "TRIMTAB_HOME": str(settings.TRIMTAB_HOME)}
    script = (
        "import django; django.setup(); import tracing.query, tracing.wiring, sys;"
        "assert tracing.wiring._store is None; assert 'chdb' not in sys.modules"
    )
    environment["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)
