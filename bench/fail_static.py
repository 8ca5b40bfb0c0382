"""The control plane falls silent in the middle of a trial: does the node go on alone?

    python bench/fail_static.py [--minutes N] [--load SHARE] [--seed N]

Three houses serve the same seeded arrivals side by side. A person puts the same change on trial in
each. A third of the way through the trial one control plane is killed and stays away, one is
stopped where it stands (SIGSTOP: its sockets stay open and nobody answers), and one runs on. After
`--minutes` both come back.

Measured at the engine, which notes when its configuration changed: how long after the change it
ran the former values again, against the trial's own time. Measured at the client: what was served
meanwhile, against the house whose control plane ran. Then: how the action ended, and whether what
the node measured in the meantime arrived, window for window.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
from plant import ConfigWatch, Load, Version, capacity_here, house, say, share_inside, verdict

from controlplane.demo.house import House
from controlplane.demo.pace import NORMAL, Pace
from controlplane.demo.supervisor import answers
from engine.load import Request, arrivals
from engine.replay import Record, Status

CHANGE = {"max_num_seqs": 64}  # from 32: what is served does not depend on it at this load
WARM_WINDOWS = 4  # of traffic before the change: its trial is judged against them
MID_TRIAL = 1 / 3
REVERT_LATE_S_MAX = 1.0
SERVED_MIN = 0.99
BACK_S_MAX = 60.0
SETTLE_S_MAX = 120.0
REQUESTS = "engine:requests_received_total"


def killed(built: House) -> None:
    built.processes.kill("control-plane")


def stopped(built: House) -> None:
    os.killpg(built.processes.children["control-plane"].pid, signal.SIGSTOP)


def go_on(built: House) -> None:
    os.killpg(built.processes.children["control-plane"].pid, signal.SIGCONT)


@dataclass
class Arm:
    """One house. `away` and `back`: what happens to its control plane; None: nothing."""

    name: str
    house: House
    load: Load
    away: Callable[[House], None] | None = None
    back: Callable[[House], None] | None = None
    action: str = ""
    state: str = ""
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = ConfigWatch(self.house.engine_url, every_s=0.25)

    def change_of(self, step: str) -> Version | None:
        """The configuration the agent made in this step, "apply" or "revert"; None: not yet."""
        by = f"trimtab-agent {step} "
        return next((v for v in self.watch.seen if v.by.startswith(by)), None)

    def ask(self) -> None:
        order = {"engine": self.house.engine_name, "values": CHANGE, "how": "trial"}
        self.action = self.house.api("actions/", order)["id"]

    def node(self) -> dict[str, Any]:
        [node] = self.house.api("nodes/")["nodes"]
        return dict(node)

    def settled(self) -> bool:
        """The action has ended and the node's spool is empty."""
        try:
            action = self.house.api(f"actions/{self.action}/")
            self.state = action["state"]
            return bool(action["ended_at"]) and self.node()["spool_bytes"] == 0
        except httpx.HTTPError:
            return False

    def sent_between(self, began: float, ended: float) -> list[Record]:
        """Requests sent between two moments of `time.monotonic`."""
        start = self.load.replayer.started
        return [r for r in self.records if began <= start + r.sent_s < ended]


def until(met: Callable[[], bool], seconds: float, what: str) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError(f"within {seconds:g} s not seen: {what}")
        time.sleep(0.1)


def outage(arms: list[Arm], minutes: float, pace: Pace) -> tuple[float, float]:
    """Change, silence and return; when the silence began and ended (unix seconds)."""
    time.sleep(WARM_WINDOWS * pace.window_s)
    for arm in arms:
        arm.ask()
    until(lambda: all(a.change_of("apply") for a in arms), 60, "the change applied on each engine")
    say(f"applied on each engine: {CHANGE}; silence follows {MID_TRIAL * pace.ttl_s:.0f} s later")
    time.sleep(MID_TRIAL * pace.ttl_s)
    began = time.time()
    for arm in arms:
        if arm.away:
            arm.away(arm.house)
    while (left := began + 60 * minutes - time.time()) > 0:
        time.sleep(min(30.0, left))
        for arm in arms:
            version = arm.watch.seen[-1]
            say(f"  {time.time() - began:4.0f} s  {arm.name:<8} max_num_seqs "
                f"{version.values['max_num_seqs']:>3}  {arm.load.count()}")  # fmt: skip
    ended = time.time()
    for arm in arms:
        if arm.back:
            arm.back(arm.house)
    return began, ended


def unheard(arm: Arm, began: float, ended: float, step_s: float) -> tuple[int, int, float]:
    """(windows of the silence without a measurement, windows, requests counted in them)."""
    query = httpx.QueryParams(
        metric=REQUESTS,
        kind="increase",
        step_s=step_s,
        since=datetime.fromtimestamp(began, UTC).isoformat(),
        until=datetime.fromtimestamp(ended, UTC).isoformat(),
    )
    found = arm.house.api(f"series/?{query}")["series"]
    values = found[0]["values"] if found else []
    windows = max(len(values), int((ended - began) // step_s))
    measured = [value for value in values if value is not None]
    return windows - len(measured), windows, sum(measured)


def run(options: argparse.Namespace) -> int:
    capacity, pace = capacity_here(), NORMAL
    rate = options.load * capacity
    say(f"three houses, each {rate:.1f} requests/s ({options.load:.0%} of {capacity:.0f})")
    seconds = 60 * options.minutes + 600

    def requests() -> list[Request]:
        return arrivals(options.seed, [(seconds, rate)], name="static")

    with ExitStack() as stack:
        houses = [stack.enter_context(house(acting=True, pace=pace)) for _ in range(3)]
        running, dead, frozen = houses
        arms = [
            Arm("running", running, Load(running.engine_url, requests())),
            Arm("killed", dead, Load(dead.engine_url, requests()), killed,
                House.start_control_plane),
            Arm("stopped", frozen, Load(frozen.engine_url, requests()), stopped, go_on),
        ]  # fmt: skip
        for arm in arms:
            arm.watch.start()
            arm.load.start()
        began, ended = outage(arms, options.minutes, pace)
        until(lambda: all(answers(a.house.health_url("control-plane")) for a in arms),
              BACK_S_MAX, "every control plane back")  # fmt: skip
        until(lambda: all(a.settled() for a in arms), SETTLE_S_MAX,
              "actions ended and spools empty")  # fmt: skip
        say(f"  all settled {time.time() - ended:.0f} s after the return")
        for arm in arms:
            arm.records = arm.load.finish()
            arm.watch.finish()
        return judge(arms, began, ended, pace)


def judge(arms: list[Arm], began: float, ended: float, pace: Pace) -> int:
    shift = time.monotonic() - time.time()
    served, passed = {}, []
    for arm in arms:
        sent = arm.sent_between(began + shift, ended + shift)
        served[arm.name] = sum(r.status is Status.OK for r in sent) / len(sent)
        action = arm.house.api(f"actions/{arm.action}/")
        missing, windows, counted = unheard(arm, began, ended, pace.window_s)
        say(f"{arm.name}: {len(sent):,} requests sent meanwhile, served {served[arm.name]:.4f}, "
            f"inside the objectives {share_inside(sent):.4f}; {counted:,.0f} of them in the "
            f"{windows} windows told afterwards")  # fmt: skip
        say(f"  action {action['state']}: {action['sentence']}")
        lost = sum(r.status in (Status.LOST, Status.PENDING) for r in arm.records)
        twice = sum(max(0, r.answers - 1) for r in arm.records) + arm.load.replayer.unsolicited
        dropped = arm.node()["spool_dropped_total"]
        passed += [
            verdict(f"{arm.name}_requests_lost", lost, "0", lost == 0),
            verdict(f"{arm.name}_requests_answered_twice", twice, "0", twice == 0),
            verdict(f"{arm.name}_windows_without_telemetry", missing, "0", missing == 0),
            verdict(f"{arm.name}_batches_dropped", dropped, "0", dropped == 0),
        ]
    return 0 if all([*passed, *ends(arms, served, pace)]) else 1


def ends(arms: list[Arm], served: dict[str, float], pace: Pace) -> list[bool]:
    """The node alone undid the change in time, and everybody says so."""
    passed = []
    for arm in arms:
        if not arm.away:
            continue
        applied, restored = arm.change_of("apply"), arm.change_of("revert")
        after_s = restored.at - applied.at if applied and restored else float("inf")
        late_s = pace.ttl_s + REVERT_LATE_S_MAX
        former = all(
            arm.watch.seen[-1].values[knob] == arm.watch.seen[0].values[knob] for knob in CHANGE
        )
        ratio = served[arm.name] / served["running"]
        wrong = int(arm.state != "rolled_back") + int(not former)
        passed += [
            verdict(f"{arm.name}_reverted_after_s", after_s, f"<={late_s:g}", after_s <= late_s),
            verdict(f"{arm.name}_ended_otherwise", wrong, "0", wrong == 0),
            verdict(f"{arm.name}_served_over_running", ratio, f">={SERVED_MIN}",
                    ratio >= SERVED_MIN),
        ]  # fmt: skip
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="of silence; 2 for a try")
    parser.add_argument("--load", type=float, default=0.2, help="share of the engine's capacity")
    parser.add_argument("--seed", type=int, default=3, help="of the arrivals")
    options = parser.parse_args()
    if options.minutes * 60 < NORMAL.ttl_s:
        parser.error(f"--minutes {options.minutes:g}: allowed: more than a trial, "
                     f"{NORMAL.ttl_s / 60:g}")  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
