"""Does every request come out once? Changes, rollbacks and kill −9 under traffic, then counted.

    python bench/conservation.py [--changes N] [--rollbacks N] [--kills N] [--seed N]

A house with several engines under one agent serves a seeded load of four priorities. On some of
them a person changes knobs through REST, hot ones and barriers, and takes half of it back; on the
others the fleet's service orders trials that are committed, reverted or left to the agent's timer.
Meanwhile agent and control plane are killed at random times, half of `--kills` each, and started
again. No engine is killed: a request is answered, or refused with 429 or 503, without excuse.

Counted at the client and at the engines, which must agree to the last request and token; then the
engines against the journal, and everything ordered against what became of it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import chaos_check as check
import httpx
from chaos import Pace, Storm, Verdict, rage, schedule, settle, start_changes
from hand import Hand
from plant import Load, capacity_here, say
from prometheus_client.parser import text_string_to_metric_families

from controlplane.demo.house import House, Ports
from controlplane.demo.receiver import Receiver
from engine.load import Request, arrivals
from engine.replay import Record, Status

ENGINES = 8  # a change waits for the agent's poll, a person's for passes too: side by side they fit
HANDS = 3  # engines that persons turn
UNDO = 0.5
SCRAPE_S = 2  # and so long between two passes of the loop
WINDOW_S = 15  # judging eight engines takes a while, and is not the point
VICTIMS = ("agent", "control-plane")
PACE = Pace(gap_s=(0.0, 5.0), ttl_s=(2.0, 5.0), action_ttl_s=90)
LOAD_S_MAX = 1_500.0
PRIORITIES = ("low", "normal", "high", "realtime")
ENDED = (Status.OK, Status.REJECTED, Status.FAILED, Status.INTERRUPTED)


def requests(seed: int, engine: str, rate: float) -> list[Request]:
    draw = random.Random(f"{seed}/{engine}/priorities")
    salt = sum(engine.encode())
    return [
        replace(request, priority=draw.choice(PRIORITIES))
        for request in arrivals(seed + salt, [(LOAD_S_MAX, rate)], name=engine)
    ]


def counted(url: str) -> Counter[str]:
    """What an engine has counted: received, answered, refused, failed, tokens; its version."""
    names = {
        "engine:requests_received_total": "received",
        "vllm:request_success_total": "answered",
        "vllm:admission_rejections_total": "refused",
        "engine:requests_failed_total": "failed",
        "vllm:request_generation_tokens_sum": "tokens",
        "engine:config_version": "version",
    }
    found: Counter[str] = Counter()
    page = httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in names:
                found[names[sample.name]] += int(sample.value)
    return found


def version(url: str) -> int:
    """Of the configuration the engine runs."""
    body = httpx.get(f"{url}/v1/runtime_config", timeout=10).raise_for_status().json()
    return int(body["config_version"])


def unbalanced(name: str, records: list[Record], engine: Counter[str]) -> list[str]:
    """Where client and engine differ; `engine` is its growth over the run."""
    client = Counter(record.status for record in records)
    both = {
        "sent and received": (len(records), engine["received"]),
        "answered": (client[Status.OK], engine["answered"]),
        "refused": (client[Status.REJECTED], engine["refused"]),
        "failed": (client[Status.FAILED], engine["failed"]),
        "tokens": (sum(r.tokens for r in records), engine["tokens"]),
    }
    return [
        f"{name}: {what}: client {here:,}, engine {there:,}"
        for what, (here, there) in both.items()
        if here != there
    ]


def orders_doubled(hands: list[Hand], report: dict[str, Any]) -> list[str]:
    """What was carried out for a person beyond one action for each order sent."""
    sent = {action_id for hand in hands for action_id in hand.ordered}
    return [
        f"{action['what']} is nobody's order"
        for action in report["actions"]
        if action["apply"] and action["by_person"] and not action["undoes"]
        and action["id"] not in sent
    ]  # fmt: skip


def taken_back(words: list[check.Word], hands: list[Hand]) -> int:
    """Trials undone, asked for or by the timer, and kept changes that a person took back."""
    return sum(w.trial == "reverted" for w in words) + sum(len(h.taken_back) for h in hands)


def run(house: House, chosen: argparse.Namespace) -> int:
    rate = chosen.load * capacity_here() / ENGINES
    say(f"{ENGINES} engines, {rate:.1f} requests/s each. Starting.")
    house.start()
    messages: list[dict[str, Any]] = []
    receiver = Receiver(house.ports.receiver, messages.append)
    urls = house.engine_urls
    before = {name: counted(url) for name, url in urls.items()}
    loads = {name: Load(url, requests(chosen.seed, name, rate)) for name, url in urls.items()}
    names = list(urls)
    hands = [Hand(house, name, chosen.seed, UNDO) for name in names[:HANDS]]
    storm = Storm(house)
    start_changes(house, chosen.seed, PACE, names[HANDS:])
    for thread in (*loads.values(), *hands):
        thread.start()

    def changed() -> int:
        return sum(version(url) - before[name]["version"] for name, url in urls.items())

    def over() -> bool:
        return time.monotonic() - began > 60 * chosen.minutes

    def ready(number: int) -> bool:
        """The kills are spread over the changes, however fast these come on this machine."""
        return over() or changed() >= (number - 1) * chosen.changes / chosen.kills

    def progress() -> str:
        total = sum(len(load.replayer.records) for load in loads.values())
        back = taken_back(check.journal(storm.journal), hands)
        return f"{total:,} requests  ·  {changed()} changes, {back} of them back"

    began = time.monotonic()
    rage(storm, schedule(chosen.seed, chosen.kills, PACE, VICTIMS), progress, ready)
    storm.all_back()
    while not over() and (
        changed() < chosen.changes
        or taken_back(check.journal(storm.journal), hands) < chosen.rollbacks
    ):
        storm.watch_for(10)
        say(f"     {time.monotonic() - began:6.0f} s  {progress()}")
    house.processes.end("changes")
    for hand in hands:
        hand.finish()
    records = {name: load.finish() for name, load in loads.items()}
    say("waiting for what is under way to end")
    report = settle(storm)
    grown = {name: counted(url) - before[name] for name, url in urls.items()}
    status = judge(storm, hands, loads, records, grown, report, chosen)
    house.stop()
    receiver.close()
    return status


def judge(
    storm: Storm,
    hands: list[Hand],
    loads: dict[str, Load],
    records: dict[str, list[Record]],
    grown: dict[str, Counter[str]],
    report: dict[str, Any],
    chosen: argparse.Namespace,
) -> int:
    words = check.journal(storm.journal)
    every = [record for of in records.values() for record in of]
    statuses = Counter(str(record.status) for record in every)
    versions = sum(growth["version"] for growth in grown.values())
    story(storm, hands, statuses, versions, report, words)
    verdict = Verdict()
    victims = Counter(outage.victim for outage in storm.outages)
    for victim in VICTIMS:
        verdict.at_least(f"kills_of_{victim}", victims[victim], chosen.kills // 2)
    verdict.at_least("changes", versions, chosen.changes)
    verdict.at_least("rollbacks", taken_back(words, hands), chosen.rollbacks)
    verdict.zero("requests_unaccounted", len(every) - sum(statuses[word] for word in ENDED))
    verdict.zero("requests_lost", statuses[Status.LOST] + statuses[Status.PENDING])
    twice = sum(max(0, r.answers - 1) for r in every)
    twice += sum(load.replayer.unsolicited for load in loads.values())
    verdict.zero("requests_answered_twice", twice)
    verdict.zero("requests_failed_or_interrupted",
                 statuses[Status.FAILED] + statuses[Status.INTERRUPTED])  # fmt: skip
    verdict.zero("client_and_engine_differ",
                 [line for n in grown for line in unbalanced(n, records[n], grown[n])])  # fmt: skip
    verdict.zero("config_mismatch", [
        f"{name}: {line}" for name, url in storm.house.engine_urls.items()
        for line in check.config_mismatches([w for w in words if w.engine == name], url)
    ])  # fmt: skip
    verdict.zero("actions_left_in_flight", check.left_in_flight(words, report))
    verdict.zero("ends_told_otherwise", check.told_otherwise(words, report))
    verdict.zero("orders_doubled", orders_doubled(hands, report))
    verdict.zero("died_or_stayed_away", storm.died)
    return verdict.conclude()


def story(
    storm: Storm,
    hands: list[Hand],
    statuses: Counter[str],
    versions: int,
    report: dict[str, Any],
    words: list[check.Word],
) -> None:
    """What the figures rest on."""

    def told(counts: Counter[str]) -> str:
        return ", ".join(f"{n:,} {name}" for name, n in counts.most_common()) or "none"

    knobs = Counter(action["what"].split()[0] for action in report["actions"])
    refused = sum((hand.refused for hand in hands), Counter())
    say(f"kills        {told(Counter(o.victim for o in storm.outages))}")
    say(f"  found open {told(storm.stages)} (the journal, read after each kill)")
    say(f"requests     {statuses.total():,}: {told(statuses)}")
    say(f"changes      {versions:,} at the engines; of the trials {told(check.ends(words))}")
    say(f"orders       {sum(len(h.ordered) for h in hands):,} by hand, "
        f"{sum(h.repeated for h in hands)} times asked again; {told(knobs)}")  # fmt: skip
    for words, count in refused.most_common(5):
        say(f"  refused {count} × {words}")
    say(f"actions      {told(Counter(action['state'] for action in report['actions']))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--changes", type=int, default=500)
    parser.add_argument("--rollbacks", type=int, default=50)
    parser.add_argument("--kills", type=int, default=40, help="half of the agent, half of control")
    parser.add_argument("--minutes", type=float, default=12, help="at most, without start and end")
    parser.add_argument("--load", type=float, default=0.2, help="of all, as a share of one engine")
    parser.add_argument("--seed", type=int, default=1, help="of load, changes and kills")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = {
        "TRIMTAB_CONTROL_WINDOW_S": str(WINDOW_S),
        "TRIMTAB_ACTION_TTL_S": str(PACE.action_ttl_s),
    }
    home = Path(tempfile.mkdtemp(prefix="trimtab-conservation-"))
    house = House(home, Ports.free(), settings=settings, scrape_s=SCRAPE_S, engines=ENGINES)
    status = 1
    try:
        status = run(house, chosen)
    finally:
        house.stop()
        if status:
            print(f"State and logs are kept: {home}", file=sys.stderr)
        else:
            shutil.rmtree(home, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
