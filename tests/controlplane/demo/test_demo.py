"""What the demo prints, hears and remembers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.demo import measuring
from controlplane.demo.__main__ import (
    house_for,
    in_the_way,
    kept_from_before,
    nothing_missed,
    set_back,
    told_load,
    watched_from_elsewhere,
)
from controlplane.demo.house import Ports, in_use
from controlplane.demo.options import options
from controlplane.demo.processes import (
    STORIES,
    Died,
    Processes,
    closing_line,
    running,
    started_at,
    stop_recorded,
    uninterrupted,
)
from controlplane.demo.processes import main as stop_all
from controlplane.demo.receiver import BODY_BYTES_MAX, Receiver
from controlplane.demo.scenarios import SCENARIOS
from controlplane.demo.story import Story, steps_told
from controlplane.screen import WIDTH, Gone, Screen


def test_a_box_is_as_wide_as_the_screen_and_breaks_no_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    link = "http://127.0.0.1:8000/incidents/" + "0" * 90 + "/"
    Screen().box("a title", ["word " * 60, "", link])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines if link not in line] == [WIDTH] * (len(lines) - 1)
    assert any(link in line for line in lines)


def test_lines_are_as_wide_as_a_narrow_terminal_and_go_on_below_their_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    screen = Screen()
    screen.event("word " * 20)
    screen.box("a title " * 20, ["   +5 s  told   " + "word " * 20], hang=16)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 50
    assert lines[1].startswith(" " * 10 + "word")
    assert lines[5].startswith("│ " + " " * 16 + "word")


def test_what_happened_is_printed_in_utc_and_children_log_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    eight = timezone(timedelta(hours=8))
    Screen().event("it broke", datetime(2026, 1, 1, 8, 0, 1, tzinfo=eight))
    assert capsys.readouterr().out == "00:00:01  it broke\n"
    processes = Processes(tmp_path)
    processes.start("agent", [sys.executable, "-c", "import time; print(time.tzname[0])"], {})
    processes.children["agent"].wait(30)
    assert processes.log_of("agent").read_text() == "UTC\n"


def test_on_few_cpus_one_is_told_how_to_keep_the_browser_off_them() -> None:
    (told,) = watched_from_elsewhere(8001, 2)
    assert "ssh -N -L 8001:127.0.0.1:8001 HOST" in told
    assert watched_from_elsewhere(8001, 16) == []


def test_the_live_line_is_rewritten_without_escape_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = Screen()
    screen.terminal = True
    screen.progress(61, "going well " * 9)
    screen.say("news")
    screen.settle()
    live = ("01:01  " + "going well " * 9)[:40]
    blank = f"\r{' ' * 40}\r"
    assert capsys.readouterr().out == f"{live}{blank}news\n{live}{blank}"


def test_a_step_is_not_begun_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    screen.gone = True
    with pytest.raises(Gone):
        screen.step("measuring")


def test_who_stops_reading_ends_the_demo_without_an_error(tmp_path: Path) -> None:
    script = (
        "from controlplane.screen import Gone, Screen\n"
        "import sys\n"
        "screen = Screen(every_s=0)\n"
        "try:\n"
        "    for at in range(100_000):\n"
        "        screen.progress(float(at), 'going well')\n"
        "except Gone:\n"
        "    screen.say('Stopping.')\n"
        "    sys.exit(3)\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", script], stdout=writer,
                          stderr=subprocess.PIPE) as child:  # fmt: skip
        os.close(writer)
        os.read(reader, 100)
        os.close(reader)
        assert child.stderr is not None
        assert (child.stderr.read(), child.wait(30)) == (b"", 3)


def test_threads_print_no_line_into_a_box_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    boxes = [threading.Thread(target=screen.box, args=(f"{n}", ["x"] * 20)) for n in range(8)]
    for each in boxes:
        each.start()
    for each in boxes:
        each.join()
    edges = "".join(line[0] for line in capsys.readouterr().out.splitlines())
    assert edges == ("┌" + "│" * 20 + "└") * 8


def test_a_chat_message_is_printed_with_its_links(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().chat({"title": "late", "text": "because of this", "incident_url": "http://x/i/1/"})
    Screen().chat({"title": "9 late", "text": "9 late. Because of this."})
    shown = capsys.readouterr().out
    assert "chat: late" in shown
    assert shown.count("9 late") == 1
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
        "state": "closed", "closed_at": "2026-01-01T00:05:00Z",
        "objective_name": "First token within 500 ms",
        "part_of": None, "explained_at": "2026-01-01T00:01:02Z",
        "episodes": [{"opened_at": "2026-01-01T00:01:00Z"}],
    }  # fmt: skip
    action = change("verified", "2026-01-01T00:03:00Z")
    told = steps_told([incident], [action])
    assert [f"{one.at:%H:%M:%S} {one.words[0]}" for one in told] == [
        "00:01:00 ▲", "00:01:02  ", "00:03:00 ◆", "00:05:00 ●"
    ]  # fmt: skip
    assert told[-1].words == "● over: “First token within 500 ms” is met again"
    runs = [*incident["episodes"], {"opened_at": "2026-01-01T00:07:00Z"}]
    back = steps_told([incident | {"state": "open", "episodes": runs}], [])[-1]
    assert (back.key, back.words) == (("i", "opened 2"), "▲ detected again: 9 of 10 late")
    assert f"{back.at:%H:%M:%S}" == "00:07:00"
    because = [
        one.key[1]
        for found in (runs[:1], runs)
        for one in steps_told([incident | {"episodes": found}], [])
        if one.key[1].startswith("because")
    ]
    assert because == ["because 1 running_cap_too_small", "because 2 running_cap_too_small"]
    part = incident | {"id": "p", "part_of": "i"}
    words = [one.words[0] for one in steps_told([part, incident], [])]
    assert words == ["▲", "▲", " ", "●", "●"]


def change(state: str, at: str) -> dict[str, Any]:
    return {
        "id": "a", "state": state, "sentence": "Kept max_num_seqs at 32 (was 8)",
        "created_at": "2026-01-01T00:01:02Z", "applied_at": "2026-01-01T00:01:04Z",
        "transitions": [{"at": at}],
    }  # fmt: skip


def test_the_story_has_the_times_of_the_pages_and_not_those_of_its_looks() -> None:
    """The agent had read it back at 1:04, the pass noted that at 1:07, and the look is later."""
    (told,) = steps_told([], [change("verifying", "2026-01-01T00:01:07Z")])
    assert f"{told.at:%H:%M:%S}" == "00:01:04"
    (told,) = steps_told([], [change("dispatched", "2026-01-01T00:01:03Z")])
    assert f"{told.at:%H:%M:%S}" == "00:01:02"


def test_a_change_on_its_way_is_one_step_of_the_story_until_it_is_done() -> None:
    keys = {
        state: steps_told([], [change(state, "2026-01-01T00:01:07Z")])[0].key[1]
        for state in ("proposed", "dispatched", "applied", "verifying", "verified")
    }
    assert list(keys.values()) == ["proposed", "proposed", "applied", "applied", "verified"]


def test_free_ports_are_distinct_and_none_a_client_may_be_lent() -> None:
    receiver = Receiver(0, lambda message: None)
    try:
        ports = [port for _ in range(20) for port in vars(Ports.free()).values()]
        assert len(set(ports)) == len(ports)
        assert max(ports) < 32_768
        assert in_use(receiver.server.server_port)
    finally:
        receiver.close()


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    receiver = Receiver(0, lambda message: None)
    port = receiver.server.server_port
    try:
        assert replace(Ports.free(), receiver=port).taken() == {"receiver": port}
    finally:
        receiver.close()


def test_a_demo_that_runs_and_a_taken_port_are_named_with_the_way_out(tmp_path: Path) -> None:
    receiver = Receiver(0, lambda message: None)
    ports = replace(Ports.free(), otlp_grpc=receiver.server.server_port)
    chosen = options(["--home", str(tmp_path)])
    children = Processes(tmp_path / STORIES / "burst")
    try:
        told = in_the_way(chosen, ports)
        assert f"Ports in use: otlp_grpc {ports.otlp_grpc}. Free them, or take others" in told
        (other,) = re.findall(r"make run ARGS='--otlp-grpc-port (\d+)'", told)
        assert not in_use(int(other))
        children.start("engine", [sys.executable, "-c", "import time; time.sleep(60)"], {})
        told = in_the_way(chosen, ports)
        assert f"A demo runs over {tmp_path} already (engine). `make stop` ends it" in told
    finally:
        children.stop()
        receiver.close()
    assert in_the_way(chosen, Ports.free()) == ""


def test_what_a_second_run_inherits_is_told_with_how_to_forget_it(tmp_path: Path) -> None:
    assert kept_from_before(tmp_path) == []
    (tmp_path / "db.sqlite3").touch()
    (told,) = kept_from_before(tmp_path)
    assert "incidents and budgets of the last run, and what is open goes on" in told
    assert told.endswith("; another --home begins afresh")


def test_what_a_demo_sets_back_is_told_knob_by_knob() -> None:
    assert set_back({}) == []
    (told,) = set_back({"max_num_seqs": {"value": 128, "default": 32, "unit": "requests"}})
    assert told == (
        "Set back  to the engine's defaults, whatever the last run kept: max_num_seqs 128 → 32"
    )


def test_who_sees_nothing_missed_is_told_how_to_get_more_load(tmp_path: Path) -> None:
    house = house_for(None, options(["--home", str(tmp_path)]), Ports())
    opened = {"episodes": [{"opened_at": "2026-01-01T00:01:00+00:00"}]}
    began = datetime.fromisoformat(opened["episodes"][0]["opened_at"]).timestamp()
    earlier = Story(house, lambda words, at: None, since=began + 1, incidents=[opened])
    assert nothing_missed(earlier, 0.4).endswith("make run ARGS='--load 0.5'")
    assert nothing_missed(earlier, 4.0).endswith("make run ARGS='--load 4'")
    assert nothing_missed(replace(earlier, since=began - 1), 0.4) == ""


def test_the_load_is_told_with_its_crowds_and_longer_answers() -> None:
    assert told_load(SCENARIOS["burst"], 100.0, 180.0) == (
        "35 requests/s, after 3 minutes 35 in crowds, answers up to 6 times as long "
        "(35% and 35% of this machine's 100)"
    )
    assert told_load(SCENARIOS["hand-edit"], 100.0, 45.0) == (
        "50 requests/s, after 45 s 50 (50% and 50% of this machine's 100)"
    )


def test_a_story_begins_in_a_house_of_its_own_with_nothing_of_the_last(tmp_path: Path) -> None:
    chosen = options(["--home", str(tmp_path), "--scenario", "burst", "--pace", "fast"])
    scenario = SCENARIOS["burst"]
    first = house_for(scenario, chosen, Ports())
    (first.home / "db.sqlite3").write_text("old")
    again = house_for(scenario, chosen, Ports())
    assert again.home == tmp_path / STORIES / "burst"
    assert not (again.home / "db.sqlite3").exists()
    assert again.settings["TRIMTAB_CONTROL_WINDOW_S"] == "3.75"
    assert house_for(None, chosen, Ports()).home == tmp_path


def test_a_child_is_written_down_before_a_signal_ends_its_parent() -> None:
    done = []

    def start() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("started and written down")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["started and written down"]


def test_who_stops_a_demo_is_told_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "Sent 9 requests: 9 answered, 0 lost."
    closing_line(tmp_path).parent.mkdir()
    closing_line(tmp_path).write_text(f"{line}\n")
    assert stop_all(tmp_path) == 0
    assert capsys.readouterr().out == "Nothing of the demo was running.\n"
    processes = Processes(tmp_path)
    processes.start("demo", [sys.executable, "-c", "import time; time.sleep(60)"], {})
    assert stop_all(tmp_path) == 0
    processes.children["demo"].wait()
    assert capsys.readouterr().out == f"{line}\nStopped: demo.\n"


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        (
            "os.kill(os.getpid(), 9)",
            "was killed (signal 9), by hand or because the machine",
        ),
        ("os.abort()", "was ended by signal 6 (Aborted)"),
        ("sys.exit(3)", "ended with status 3"),
    ],
)
def test_of_a_child_that_ended_it_is_said_how_and_what_it_printed_this_time(
    tmp_path: Path, ends: str, how: str
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/engine.log").write_text("ready, in an earlier run\n")
    processes = Processes(tmp_path)
    script = f"import os, sys; print('this run', flush=True); {ends}"
    processes.start("engine", [sys.executable, "-c", script], {})
    processes.children["engine"].wait(30)
    with pytest.raises(Died, match="make run") as died:
        processes.check()
    told = str(died.value)
    assert told.startswith(f"engine {how}")
    assert told.endswith(f"{tmp_path}/log/engine.log:\n    this run")


def test_while_it_measures_the_live_line_moves_and_ends_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "SHOWN_EVERY_S", 0.01)
    screen = Screen()
    screen.terminal = True
    with measuring.shown("look 1 of 3", screen) as tell:
        wait_until(lambda: "look 1 of 3" in screen.live)
        tell("look 2 of 3, 55 requests/s so far")
        wait_until(lambda: "look 2 of 3, 55 requests/s so far" in screen.live)
    assert screen.live == ""
    assert "00:00  look 1 of 3" in capsys.readouterr().out


def wait_until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
