"""Spans per CPU-second of all server processes, from OTLP with gzip to durable.

    python bench/ingest.py [--over http|json|grpc] [--app MODULE:APP] [--requests N]
                           [--connections N]

A real uvicorn process serves the control plane as deployed, Celery's worker and beat included
(`--app ingest:application` serves the receiver alone); this process sends distinct gzip bodies of
1,000 spans with 12 attributes (7 of them different in every span) over several connections, then
stops the server and counts what the store holds. CPU time is read from /proc for the server's
process tree, and includes what it does for 2 s after the last acknowledgement (merging parts).
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from controlplane.demo.house import free_port

ROOT = Path(__file__).resolve().parent.parent

TARGETS = {"http": 60_000, "json": 0, "grpc": 0}  # 0: to know, not to meet
SPANS = 1_000
SETTLE_S = 2.0
PROTOBUF, JSON = "application/x-protobuf", "application/json"
Send = Callable[[bytes], None]
TICKS = os.sysconf("SC_CLK_TCK")
# Makes a tenant with an ingest token in the control plane's database; the last line is the token.
MAKE_TOKEN = """
import django
django.setup()
from controlplane.accounts.services import tenant_create, token_create
tenant = tenant_create(slug="bench", name="Bench")
print(token_create(tenant=tenant, kind="ingest", name="bench")[1])
"""


def export(seed: int) -> ExportTraceServiceRequest:
    """SPANS llm_request spans; no two seeds share a span."""
    draw = random.Random(seed)
    now = time.time_ns()
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    identity = {
        "service.name": "chat",
        "service.instance.id": f"engine-{seed % 8}",
        "host.name": f"node-{seed % 2}",
        "service.version": "0.1.0",
        "telemetry.sdk.language": "python",
    }
    for key, value in identity.items():
        resource_spans.resource.attributes.add(key=key).value.string_value = value
    spans = resource_spans.scope_spans.add().spans
    for _ in range(SPANS):
        end = now - draw.randrange(10**9)
        wait, prefill, decode = (draw.expovariate(1 / mean) for mean in (0.01, 0.05, 1.0))
        span = spans.add(
            trace_id=draw.randbytes(16),
            span_id=draw.randbytes(8),
            name="llm_request",
            kind=2,
            start_time_unix_nano=end - int((wait + prefill + decode) * 1e9),
            end_time_unix_nano=end,
        )
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": f"cmpl-{draw.getrandbits(64):016x}",
            "gen_ai.latency.e2e": wait + prefill + decode,
            "gen_ai.latency.time_in_queue": wait,
            "gen_ai.latency.time_to_first_token": wait + prefill,
            "gen_ai.latency.time_in_model_prefill": prefill,
            "gen_ai.latency.time_in_model_decode": decode,
            "gen_ai.latency.time_in_model_inference": prefill + decode,
            "gen_ai.usage.prompt_tokens": draw.randrange(1, 2_000),
            "gen_ai.usage.completion_tokens": draw.randrange(1, 500),
            "gen_ai.request.max_tokens": 512,
            "gen_ai.response.model": "llama-1.3m",
            "trimtab.config_version": 7,
        }
        for key, value in attributes.items():
            any_value = span.attributes.add(key=key).value
            if isinstance(value, str):
                any_value.string_value = value
            elif isinstance(value, int):
                any_value.int_value = value
            else:
                any_value.double_value = value
    return request


def in_json(request: ExportTraceServiceRequest) -> bytes:
    """As OTLP/JSON: protobuf's own mapping, but ids in hexadecimal and enums as integers."""
    found = MessageToDict(request, use_integers_for_enums=True)
    for span in found["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId"):
            span[name] = b64decode(span[name]).hex()
    return json.dumps(found, separators=(",", ":")).encode()


def body(seed: int, over: str) -> bytes:
    """What is sent; gRPC compresses by itself."""
    request = export(seed)
    if over == "grpc":
        return request.SerializeToString()
    plain = in_json(request) if over == "json" else request.SerializeToString()
    return gzip.compress(plain, 6)


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += tree(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the process tree."""
    total = 0
    for process in tree(pid):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def memory_mib(pid: int) -> float:
    """Resident memory of the process tree."""
    lines = [
        line
        for process in tree(pid)
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def control_plane_token(environment: dict[str, str]) -> str:
    """Migrate a fresh control plane and make an ingest token in it."""
    manage = [sys.executable, "manage.py", "migrate", "--verbosity=0"]
    subprocess.run(manage, cwd=ROOT, env=environment, check=True)
    made = subprocess.run(
        [sys.executable, "-c", MAKE_TOKEN],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return made.stdout.strip().splitlines()[-1]


def start(app: str, home: Path) -> tuple[subprocess.Popen[bytes], int, int, str]:
    """The server process, its ports for HTTP and gRPC, and a token it accepts."""
    port, grpc_port = free_port(), free_port()
    environment = {
        **os.environ,
        "TRIMTAB_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "TRIMTAB_OTLP_GRPC_PORT": str(grpc_port),
    }
    if app == "ingest:application":
        token = environment["BENCH_TOKEN"] = secrets.token_urlsafe(16)
    else:
        environment["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
        token = control_plane_token(environment)
    command = [sys.executable, "-m", "uvicorn", app, "--app-dir", str(ROOT / "bench")]
    command += ["--port", str(port), "--no-access-log", "--log-level", "warning"]
    server = subprocess.Popen(command, cwd=ROOT, env=environment)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"{app} stopped with code {server.returncode} before it served")
        try:
            over_http(port, token, PROTOBUF)(gzip.compress(b""))
        except ConnectionError:
            time.sleep(0.1)
        else:
            return server, port, grpc_port, token
    raise SystemExit(f"{app} did not serve within 30 s")


def over_http(port: int, token: str, media_type: str) -> Send:
    """Sends one export, again while the server asks for patience; SystemExit when refused."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {
        "Content-Type": media_type,
        "Content-Encoding": "gzip",
        "Authorization": f"Bearer {token}",
    }

    def send(payload: bytes) -> None:
        while True:
            connection.request("POST", "/v1/traces", payload, headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status == 200 and answer in (b"", b"{}"):
                return
            if response.status not in (429, 503):
                raise SystemExit(f"HTTP {response.status}: {answer!r}")
            time.sleep(float(response.headers["Retry-After"]))

    return send


def over_grpc(port: int, token: str) -> Send:
    """As `over_http`, on a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options, grpc.Compression.Gzip)
    call = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
    metadata = (("authorization", f"Bearer {token}"),)

    def send(payload: bytes) -> None:
        while True:
            try:
                answer = call(payload, metadata=metadata, timeout=60)
            except grpc.RpcError as error:
                failed: Any = error
                retry = dict(failed.trailing_metadata()).get("google.rpc.retryinfo-bin")
                if retry is None:
                    raise SystemExit(f"{failed.code()}: {failed.details()}") from error
                time.sleep(RetryInfo.FromString(retry).retry_delay.seconds)
            else:
                if answer:
                    raise SystemExit(f"not all was accepted: {answer!r}")
                return

    return send


def send_all(connect: Callable[[], Send], bodies: list[bytes], connections: int) -> None:
    """Every body once, over that many connections at the same time."""
    waiting: Queue[bytes] = Queue()
    for payload in bodies:
        waiting.put(payload)

    def drain() -> None:
        send = connect()
        while True:
            try:
                send(waiting.get_nowait())
            except Empty:
                return

    threads = [threading.Thread(target=drain) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stored(home: Path) -> int:
    """Distinct spans in the store of the server that has stopped."""
    from tracing.store.chdb import ChdbStore

    store = ChdbStore(home / "chdb")
    rows = store.query("SELECT uniqExact(trace_id, span_id) AS spans FROM spans").to_pylist()
    store.close()
    return int(rows[0]["spans"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--app", default="controlplane.asgi:application", help="what uvicorn serves"
    )
    parser.add_argument(
        "--over", default="http", choices=["http", "json", "grpc"], help="http: protobuf"
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--connections", type=int, default=16)
    arguments = parser.parse_args()

    print(f"building {arguments.requests} bodies of {SPANS} spans", flush=True)
    bodies = [body(seed, arguments.over) for seed in range(arguments.requests)]
    warm_up, bodies = bodies[:16], bodies[16:]
    size_kib = sum(map(len, bodies)) / len(bodies) / 1024
    print(f"built: {size_kib:.0f} KiB each; load {os.getloadavg()[0]:.2f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        home = Path(folder)
        server, port, grpc_port, token = start(arguments.app, home)

        def connect() -> Send:
            if arguments.over == "grpc":
                return over_grpc(grpc_port, token)
            return over_http(port, token, JSON if arguments.over == "json" else PROTOBUF)

        try:
            idle_mib = memory_mib(server.pid)
            send_all(connect, warm_up, arguments.connections)
            time.sleep(SETTLE_S)
            cpu, began = cpu_seconds(server.pid), time.monotonic()
            send_all(connect, bodies, arguments.connections)
            acknowledged, wall_s = cpu_seconds(server.pid), time.monotonic() - began
            busy_mib = memory_mib(server.pid)
            time.sleep(SETTLE_S)
            settled = cpu_seconds(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        found = stored(home)
    spans = len(bodies) * SPANS
    sent = spans + len(warm_up) * SPANS
    rate = spans / (settled - cpu)
    print(f"sent {sent} spans, found {found}")
    print(
        f"wall {wall_s:.1f} s, {spans / wall_s:,.0f} spans/s; CPU {acknowledged - cpu:.2f} s until "
        f"acknowledged, {settled - cpu:.2f} s with {SETTLE_S:.0f} s of settling"
    )
    print(f"server memory: {idle_mib:.0f} MiB idle, {busy_mib:.0f} MiB under load")
    target = TARGETS[arguments.over]
    passed = found == sent and rate >= target
    print(f"ingest spans_per_cpu_second {rate:.0f} target {target} {'PASS' if passed else 'FAIL'}")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
else:
    # What `--app ingest:application` serves: the receiver alone, over a store in TRIMTAB_HOME.
    from tracing import wiring
    from tracing.receivers import otlp_http

    wiring.configure(Path(os.environ["TRIMTAB_HOME"]) / "chdb", retention_days=30)

    async def one_token(token: str) -> str | None:
        return "bench" if secrets.compare_digest(token, os.environ["BENCH_TOKEN"]) else None

    receiver = otlp_http.application(one_token, wiring.door)

    async def application(
        scope: otlp_http.Scope, receive: otlp_http.Receive, send: otlp_http.Send
    ) -> None:
        if scope["type"] == "http":
            await receiver(scope, receive, send)
            return
        while scope["type"] == "lifespan":
            message = await receive()
            if message["type"] == "lifespan.startup":
                wiring.door()
            else:
                wiring.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
