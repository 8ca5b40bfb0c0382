"""One exchange with a control plane, good and bad."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpu_agent.protocol import SyncReply, SyncRequest, WireError
from gpu_agent.transport import ANSWER_BYTES_MAX, Connection, SyncLoop, _retry_after_s, reply_of

from .conftest import apply_command
from .servers import ControlPlane, Quiet, Server


class Said(Server):
    """Answers every request the same."""

    def __init__(self, status: int, body: bytes, **headers: str) -> None:
        super().__init__()
        self.said = (status, body, headers)
        self.connections: set[object] = set()

    def serve(self, request: Quiet, method: str) -> None:
        request.body()
        self.connections.add(request.client_address)
        status, body, headers = self.said
        request.answer(status, body, **headers)


def request(stopping: bool = False) -> SyncRequest:
    return SyncRequest("id", "boot", "node", "1", "2026-01-01T00:00:00Z", stopping=stopping)


class Caller:
    """A sync loop to one server, and the replies it heard."""

    def __init__(self, url: str, token: str = "t") -> None:
        self.heard: list[SyncReply] = []
        self.connection = Connection(url, timeout_s=2.0)
        self.loop = SyncLoop(
            self.connection,
            token=token,
            request=request,
            handle=lambda _, reply: self.heard.append(reply),
        )

    def sync(self) -> tuple[float, bool]:
        try:
            return self.loop.sync()
        finally:
            self.connection.close()


def test_commands_come_and_the_poll_interval_is_the_servers(control_plane: ControlPlane) -> None:
    control_plane.commands = [apply_command()]
    caller = Caller(control_plane.url)
    assert caller.sync() == (0.1, False)
    assert caller.heard[0].commands == control_plane.commands
    assert caller.loop.standing.state == "good"
    assert abs(caller.loop.offset_s) < 1.0


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, b"oops", "HTTP 500: oops"),
        (401, b'{"error": {"message": "no"}}', "HTTP 401"),
        (200, b"<html>", "Expecting value"),
        (200, b"[]", "SyncReply: got list, want an object"),
        (200, b'{"server_time": "soon"}', "got 'soon', want RFC 3339"),
        (200, b" " * (ANSWER_BYTES_MAX + 1), f"answer above {ANSWER_BYTES_MAX} bytes"),
    ],
)
def test_a_bad_answer_is_named_and_backed_off(status: int, body: bytes, words: str) -> None:
    with Said(status, body) as server:
        caller = Caller(server.url)
        wait_s, failed = caller.sync()
    assert failed
    assert 0 <= wait_s <= 1.0
    assert words in caller.loop.standing.error
    assert caller.heard == []


def test_retry_after_is_honoured() -> None:
    with Said(503, b"", Retry_After="7") as server:
        assert Caller(server.url).sync() == (7.0, True)
    later = (datetime.now(UTC) + timedelta(seconds=30)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    found = _retry_after_s(later)
    assert found is not None
    assert 25 < found <= 30
    assert _retry_after_s("soon") is None
    assert _retry_after_s("²") is None


def test_one_connection_is_kept_and_a_closed_one_opened_again(control_plane: ControlPlane) -> None:
    with Said(200, b"{}") as server:
        connection = Connection(server.url, timeout_s=2.0)
        for _ in range(3):
            assert connection.post("/", b"x", {}).body == b"{}"
        assert len(server.connections) == 1
        assert connection._open is not None
        connection._open.sock.shutdown(socket.SHUT_RDWR)
        assert connection.post("/", b"x", {}).status == 200
        assert len(server.connections) == 2
        connection.close()


def test_a_server_that_does_not_answer_is_given_up_on() -> None:
    class Silent(Server):
        def serve(self, request: Quiet, method: str) -> None:
            time.sleep(1.0)
            request.close_connection = True

    with Silent() as server, pytest.raises(OSError, match="timed out"):
        Connection(server.url, timeout_s=0.1).post("/", b"", {})


def test_a_command_nobody_can_read_does_not_stop_the_others() -> None:
    good = apply_command().to_json()
    reply = reply_of({"server_time": "t", "commands": [{**good, "kind": "dance"}, 3, good]})
    assert [command.command_id for command in reply.commands] == ["apply-1"]
    with pytest.raises(WireError, match="commands: got 3, want a list"):
        reply_of({"server_time": "t", "commands": 3})


def test_a_reply_is_json_of_the_protocol(control_plane: ControlPlane) -> None:
    connection = Connection(control_plane.url, timeout_s=2.0)
    body = json.dumps(request(stopping=True).to_json()).encode()
    answer = connection.post("/api/v1/agent/sync", body, {"Authorization": "Bearer t"})
    assert SyncReply.from_json(json.loads(answer.body)).poll_after_s == 0.1
    assert control_plane.requests[0].stopping
    connection.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that no system trusts, with its key in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl: no certificate can be made")
    both = tmp_path / "both.pem"
    arguments = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=t"
    subprocess.run(
        [
            *(openssl, *arguments.split(), "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text((tmp_path / "cert.pem").read_text() + (tmp_path / "key.pem").read_text())
    return both


def test_a_certificate_is_verified_against_the_ca_file_and_never_skipped(
    certificate: Path,
) -> None:
    server = Said(200, b"{}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    url = server.url.replace("http://", "https://")
    with server:
        trusting = Connection(url, timeout_s=2.0, ca_file=certificate.parent / "cert.pem")
        assert trusting.post("/", b"x", {}).body == b"{}"
        trusting.close()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            Connection(url, timeout_s=2.0).post("/", b"x", {})
