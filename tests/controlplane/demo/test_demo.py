"""What the demo prints, hears and remembers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.demo.house import Ports
from controlplane.demo.processes import Processes, running, started_at, stop_recorded
from controlplane.demo.receiver import BODY_BYTES_MAX, Receiver
from controlplane.demo.screen import WIDTH, Screen
from controlplane.demo.story import sentences


def test_a_box_is_as_wide_as_the_screen_and_breaks_no_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    link = "http://127.0.0.1:8000/incidents/" + "0" * 90 + "/"
    Screen().box("a title", ["word " * 60, "", link])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines if link not in line] == [WIDTH] * (len(lines) - 1)
    assert any(link in line for line in lines)


def test_a_chat_message_is_printed_with_its_links(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().chat({"title": "late", "text": "because of this", "incident_url": "http://x/i/1/"})
    shown = capsys.readouterr().out
    assert "chat: late" in shown
    assert "because of this" in shown
    assert "http://x/i/1/" in shown


def test_a_message_delivered_twice_is_heard_once() -> None:
    heard: list[dict[str, Any]] = []
    receiver = Receiver(0, heard.append)
    try:
        for _ in range(2):
            answer = httpx.post(
                receiver.url, json={"title": "late"}, headers={"Trimtab-Delivery-Id": "7"}
            )
            assert answer.status_code == 204
        assert httpx.post(receiver.url, content=b"{").status_code == 400
        assert httpx.post(receiver.url, content=b" " * (BODY_BYTES_MAX + 1)).status_code == 413
    finally:
        receiver.close()
    assert heard == [{"title": "late"}]


def test_the_story_tells_detection_cause_action_and_end_in_order() -> None:
    incident = {
        "id": "i", "what": "9 of 10 late", "because": "a cap", "cause": "running_cap_too_small",
        "state": "closed", "closed_at": "2026-01-01T00:05:00Z", "objective": "chat-ttft",
    }  # fmt: skip
    action = {"id": "a", "state": "verified", "sentence": "Kept max_num_seqs from 8 to 32"}
    told = [sentence for _, sentence in sentences([incident], [action])]
    assert [line[0] for line in told] == ["▲", " ", "◆", "●"]


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    receiver = Receiver(0, lambda message: None)
    port = receiver.server.server_port
    try:
        assert Ports(receiver=port).taken()[-1] == f"receiver {port}"
    finally:
        receiver.close()


def test_a_recorded_process_is_ended_and_a_recycled_pid_is_left_alone(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.start("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], {})
    assert running(tmp_path) == ["sleeper"]
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = tmp_path / "run" / "stranger.json"
        record.write_text(json.dumps({"pid": stranger.pid, "started": "another time"}))
        assert not stop_recorded(record)
        assert started_at(stranger.pid) is not None
    finally:
        stranger.kill()
        stranger.wait()
    processes.stop()
    assert running(tmp_path) == []
