"""kill −9 at random times, under load, over control plane, agent and engine; then count.

    python bench/chaos.py [--kills N] [--seed N] [--short] [--load SHARE]

A house of real processes serves an open-loop load, a share of what the engine sustains here. Two
exporters send spans and keep a ledger of what was acknowledged. Changes are under way all the
time: the loop's own, and trials ordered through the fleet's service that are committed, reverted
or left to the agent's timer. A seeded schedule kills one process after another and starts it
again at once, as a supervisor would; every other kill of agent or engine waits for a change to be
in the making, so that the moments between journal and side effect are hit.

Windows are short (scrape 1 s, control window 3 s), so that the loop acts within the minutes this
takes. A request whose engine dies is interrupted, which is counted apart; lost is one that is
neither answered nor failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_check as check
from chaos_spans import SpanSender
from plant import Load, verdict

from controlplane.demo.house import PROCESSES, House, Ports
from controlplane.demo.receiver import Receiver
from controlplane.demo.supervisor import BACK_S_MAX, Outage, Supervisor, answers
from engine.load import arrivals
from engine.replay import Record, Status

INSIDE = [sys.executable, str(Path(__file__).with_name("chaos_inside.py"))]
SCRAPE_S = 1
WINDOW_S = 3
AIM_S_MAX = 4.0  # a strike waits this long for a change to be in the making
INTO_S_MAX = 0.05  # journal, engine's answer and reading back take about this long together
SETTLE_S_MAX = 150.0
LOAD_S_MAX = 900.0
LISTED_MAX = 5


@dataclass(frozen=True)
class Pace:
    """How fast it goes: seconds between strikes, of a trial, of an action."""

    gap_s: tuple[float, float] = (2.0, 9.0)
    ttl_s: tuple[float, float] = (5.0, 15.0)
    action_ttl_s: int = 20


SHORT = Pace(gap_s=(1.5, 3.5), ttl_s=(3.0, 5.0), action_ttl_s=8)


@dataclass(frozen=True)
class Strike:
    """On whom, how long after the one before; if aimed, how long after a change began."""

    after_s: float
    victim: str
    aimed: bool
    into_s: float


def schedule(seed: int, kills: int, pace: Pace, among: Sequence[str] = PROCESSES) -> list[Strike]:
    """As many strikes on each process as on the others, in random order, at random times."""
    draw = random.Random(seed)
    victims = [among[i % len(among)] for i in range(kills)]
    draw.shuffle(victims)
    return [
        Strike(
            after_s=draw.uniform(*pace.gap_s),
            victim=victim,
            aimed=victim != "control-plane" and draw.random() < 0.6,
            into_s=draw.uniform(0, INTO_S_MAX),
        )
        for victim in victims
    ]


@dataclass
class Storm(Supervisor):
    """Aims the kills, and watches for processes that end without having been killed."""

    stages: Counter[str] = field(default_factory=Counter)
    died: list[str] = field(default_factory=list)
    stage: str = ""

    @property
    def journal(self) -> Path:
        return self.house.home / f"agent-{self.house.node}" / "journal.sqlite3"

    def strike(self, strike: Strike) -> Outage:
        self.watch_for(strike.after_s)
        if strike.aimed and self.aim():
            time.sleep(strike.into_s)
        return self.kill(strike.victim, self.look)

    def look(self) -> None:
        """After the kill: what the dead left behind, not what was there a moment before."""
        self.stage = check.stage(self.journal)
        self.stages[self.stage] += 1

    def watch_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name, child in list(self.house.processes.children.items()):
                if child.poll() is not None:
                    tail = self.house.processes.tail(name)
                    self.died.append(f"{name} ended with status {child.returncode}\n{tail}")
                    self.house.start_one(name)
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    def aim(self) -> bool:
        """Until the journal has begun a change or its undoing; False after AIM_S_MAX."""
        deadline = time.monotonic() + AIM_S_MAX
        while time.monotonic() < deadline:
            if check.stage(self.journal) in ("reverting", "applying", "received"):
                return True
            time.sleep(0.002)
        return False

    def all_back(self) -> bool:
        """Waits for the last of each; False when one does not answer in time."""
        deadline = time.monotonic() + BACK_S_MAX
        waiting = list(PROCESSES)
        while waiting and time.monotonic() < deadline:
            self.watch_for(0.2)
            waiting = [name for name in waiting if not answers(self.house.health_url(name))]
        self.died += [f"{name} did not come back within {BACK_S_MAX:g} s" for name in waiting]
        return not waiting


def inside(house: House, *arguments: str, stdin: str = "") -> Any:
    """What a verb of bench.chaos_inside answers. Raises RuntimeError with what it printed."""
    done = subprocess.run(
        [*INSIDE, *arguments],
        env={**os.environ, **house.env},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"chaos_inside {arguments[0]} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def start_changes(house: House, seed: int, pace: Pace, engines: Sequence[str] = ()) -> None:
    verb = [*INSIDE, "changes", str(seed), *map(str, pace.ttl_s), *engines]
    house.processes.start("changes", verb, house.env)


def settle(storm: Storm) -> dict[str, Any]:
    """The report once nothing is under way any more, or after SETTLE_S_MAX."""
    deadline = time.monotonic() + SETTLE_S_MAX
    while True:
        storm.watch_for(2)
        report: dict[str, Any] = inside(storm.house, "report")
        left = check.left_in_flight(check.journal(storm.journal), report)
        left += [incident["what"] for incident in report["incidents"] if not incident["told"]]
        left += [
            incident["what"]
            for incident in report["incidents"]
            if any(state == "pending" for _, state in incident["told"])
        ]
        if not left or time.monotonic() > deadline:
            return report


def interrupted_unprovoked(load: Load, records: list[Record], outages: list[Outage]) -> int:
    """Interrupted while the engine was not killed: would be a loss with another name."""
    spans = [(o.began - 0.1, o.ended + 1.0) for o in outages if o.victim == "engine"]
    ends = [load.replayer.started + r.end_s for r in records if r.status is Status.INTERRUPTED]
    return sum(not any(began <= end <= ended for began, ended in spans) for end in ends)


class Verdict:
    """Prints a line for each metric and adds up the violations."""

    def __init__(self) -> None:
        self.violations = 0

    def zero(self, metric: str, found: int | list[str]) -> None:
        """Nothing may be found; of a list the first few are printed."""
        for line in found[:LISTED_MAX] if isinstance(found, list) else []:
            print(f"    {line}")
        count = len(found) if isinstance(found, list) else found
        self.violations += count
        verdict(metric, count, "0", count == 0)

    def at_least(self, metric: str, done: int, wanted: int) -> None:
        self.violations += not verdict(metric, done, f">={wanted}", done >= wanted)

    def conclude(self) -> int:
        passed = verdict("violations", self.violations, "0", self.violations == 0)
        return int(not passed)


def rage(
    storm: Storm,
    strikes: list[Strike],
    progress: Callable[[], str],
    ready: Callable[[int], bool] = lambda number: True,
) -> None:
    """Every strike of the schedule, one line each, with what `progress` has to say.

    Strike `number`, from 1, waits until it is `ready`.
    """
    began = time.monotonic()
    for number, strike in enumerate(strikes, start=1):
        while not ready(number):
            storm.watch_for(0.5)
        earlier = [o for o in storm.outages if not o.over]
        outage = storm.strike(strike)
        back = [f"{o.victim} is back after {o.ended - o.began:.1f} s" for o in earlier if o.over]
        print(
            f"{number:>4}/{len(strikes)} {outage.began - began:5.0f} s  killed {strike.victim}",
            f"(open: {storm.stage})",
            *back,
            progress(),
            sep="  ·  ",
            flush=True,
        )


def run(house: House, chosen: argparse.Namespace, pace: Pace) -> int:
    print("measuring what the engine sustains here", flush=True)
    capacity = house.capacity(seconds=4.0).requests_per_s
    rate = chosen.load * capacity
    print(f"{capacity:.0f} requests/s; sending {rate:.0f}. Starting {', '.join(PROCESSES)}.")
    house.start()
    messages: list[dict[str, Any]] = []
    receiver = Receiver(house.ports.receiver, messages.append)
    load = Load(house.engine_url, arrivals(chosen.seed, [(LOAD_S_MAX, rate)], name="chaos"))
    senders = [
        SpanSender(house.ports.otlp, house.secrets["ingest"], seed=2 * chosen.seed + i)
        for i in range(2)
    ]
    storm = Storm(house)
    start_changes(house, chosen.seed, pace)
    for thread in (load, *senders):
        thread.start()

    def progress() -> str:
        spans = sum(sum(map(len, list(s.acknowledged.values()))) for s in senders)
        return f"{load.count()}  ·  {spans:,} spans acknowledged"

    rage(storm, schedule(chosen.seed, chosen.kills, pace), progress)
    storm.all_back()
    house.processes.end("changes")
    records = load.finish()
    print("waiting for what is under way to end", flush=True)
    report = settle(storm)
    undelivered = [s.name for s in senders if not s.finish(BACK_S_MAX)]
    words = check.journal(storm.journal)
    mismatches = check.config_mismatches(words, house.engine_url)
    house.stop()
    receiver.close()
    ledger = {k: v for sender in senders for k, v in sender.acknowledged.items()}
    store = inside(house, "spans", stdin=json.dumps(ledger))
    story(storm, records, senders, words, report, messages)

    verdicts = Verdict()
    verdicts.at_least("kills", len(storm.outages), chosen.kills)
    verdicts.zero("acked_but_missing", store["missing"])
    verdicts.zero("stored_twice", store["twice"])
    verdicts.zero("stored_unacknowledged", store["unacknowledged"])
    refused = [line for sender in senders for line in sender.refused]
    verdicts.zero("batches_refused_or_undelivered", refused + undelivered)
    verdicts.zero("config_mismatch", mismatches)
    verdicts.zero("requests_lost", sum(r.status in (Status.LOST, Status.PENDING) for r in records))
    twice = sum(max(0, r.answers - 1) for r in records) + load.replayer.unsolicited
    verdicts.zero("requests_answered_twice", twice)
    unprovoked = interrupted_unprovoked(load, records, storm.outages)
    verdicts.zero("requests_interrupted_without_a_kill", unprovoked)
    verdicts.zero("actions_left_in_flight", check.left_in_flight(words, report))
    verdicts.zero("ends_told_otherwise", check.told_otherwise(words, report))
    verdicts.zero("incidents_not_told_once", check.untold(report, messages))
    verdicts.zero("died_or_stayed_away", storm.died)
    return verdicts.conclude()


def story(
    storm: Storm,
    records: list[Record],
    senders: list[SpanSender],
    words: list[check.Word],
    report: dict[str, Any],
    messages: list[dict[str, Any]],
) -> None:
    """What the figures rest on."""
    statuses = Counter(str(record.status) for record in records)
    interrupted = statuses.pop(Status.INTERRUPTED, 0)
    ended = Counter(action["state"] for action in report["actions"])

    def told(counts: Counter[str]) -> str:
        return ", ".join(f"{n:,} {name}" for name, n in counts.most_common()) or "none"

    print(f"kills        {told(Counter(o.victim for o in storm.outages))}")
    print(f"  found open {told(storm.stages)} (the journal, read after each kill)")
    print(f"requests     {len(records):,}: {told(statuses)}")
    print(f"interrupted  {interrupted:,} (their engine was killed; counted apart)")
    sent, retried = sum(s.sent for s in senders), sum(s.retried for s in senders)
    print(f"spans        {sent:,} sent, {retried:,} batches sent again")
    print(f"changes      {told(check.ends(words))}")
    print(f"loop         {len(report['incidents'])} incidents, {len(messages)} messages, "
          f"actions: {told(ended)}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, help="default 50, with --short 6")
    parser.add_argument("--seed", type=int, default=1, help="of schedule, load and changes")
    parser.add_argument("--short", action="store_true", help="the form for CI: under a minute")
    parser.add_argument("--load", type=float, default=0.5, help="share of the engine's capacity")
    chosen = parser.parse_args()
    chosen.kills = chosen.kills or (6 if chosen.short else 50)
    pace = SHORT if chosen.short else Pace()
    began = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="trimtab-chaos-"))
    settings = {
        "TRIMTAB_CONTROL_WINDOW_S": str(WINDOW_S),
        "TRIMTAB_ACTION_TTL_S": str(pace.action_ttl_s),
    }
    house = House(home, Ports.free(), settings=settings, scrape_s=SCRAPE_S)
    status = 1
    try:
        status = run(house, chosen, pace)
    finally:
        house.stop()
        if status:
            print(f"State and logs are kept: {home}", file=sys.stderr)
        else:
            shutil.rmtree(home, ignore_errors=True)
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
