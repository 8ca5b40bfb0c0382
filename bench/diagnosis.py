"""Is the right cause named first? Faults on a real engine, drawn by a seed nobody else sees.

    python bench/diagnosis.py [--runs N] [--seed N] [--only NAME …]

Each run is a fresh house at the fast pace that may explain but not act: quiet traffic, then one of
the demo's scenarios that has a cause (controlplane/demo/scenarios.py), in an order and under loads
drawn by the seed. What is counted is the first cause the control plane names for an incident;
`unknown` and `no incident` are answers too, and wrong. Beside it stand two trivial guesses: the
cause that goes with the metric whose relative change is the largest, and one drawn at random.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from controlplane.demo.closing import ledger
from controlplane.demo.house import House, Ports
from controlplane.demo.pace import FAST
from controlplane.demo.play import Play
from controlplane.demo.scenarios import SCENARIOS, Scenario
from engine.replay import Status

QUIET_WINDOWS = 10
STORY_WINDOWS = 14  # after the shift; a cause not named by then is not named
UNKNOWN, NO_INCIDENT = "unknown", "no incident"
TARGET = 0.9

Families = dict[str, tuple[str, float, float]]  # name → (kind, sum or value, count)

# Metric → the cause somebody who looks for the largest change would name.
SUSPECTS = {
    "vllm:num_requests_waiting": "running_cap_too_small",
    "vllm:request_queue_time_seconds": "running_cap_too_small",
    "vllm:iteration_tokens_total": "batch_too_large",
    "vllm:request_prompt_tokens": "batch_too_large",
    "vllm:inter_token_latency_seconds": "batch_too_large",
    "vllm:kv_cache_usage_perc": "kv_pool_exhausted",
    "vllm:num_preemptions": "kv_pool_exhausted",
    "engine:kv_blocks": "kv_pool_exhausted",
    "engine:graph_steps": "graph_capture_lost",
    "engine:graph_capture_ready": "graph_capture_lost",
    "engine:step_seconds": "slow_host",
    "engine:forward_seconds": "slow_host",
    "engine:requests_received": "load_beyond_capacity",
    "vllm:admission_rejections": "load_beyond_capacity",
    "engine:config_changes": "config_changed_by_hand",
}


@dataclass(frozen=True)
class Run:
    planted: str
    named: str
    largest: str
    drawn: str
    named_after_s: float | None
    because: str
    against: tuple[str, ...]  # what spoke against the planted cause
    lost: int


class Scrapes(threading.Thread):
    """The engine's metrics once a second: (unix seconds, families)."""

    def __init__(self, url: str) -> None:
        super().__init__(name="scrapes", daemon=True)
        self.url = url
        self.seen: list[tuple[float, Families]] = []
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(1.0):
            try:
                text = httpx.get(f"{self.url}/metrics", timeout=5).text
            except httpx.TransportError:
                continue
            self.seen.append((time.time(), read(text)))

    def largest_change(self, at: float) -> str:
        """The cause of the metric that has changed most since `at`, by its ratio either way."""
        before, now = ([s for s in self.seen if (s[0] <= at) is early] for early in (True, False))
        # The first half of the quiet is warm-up.
        before = before[len(before) // 2 :]
        if len(before) < 2 or len(now) < 2:
            return NO_INCIDENT
        ratios = {}
        for metric in SUSPECTS:
            old, new = level(before, metric), level(now, metric)
            if old is not None and new is not None and (old or new):
                low, high = sorted((abs(old), abs(new)))
                ratios[metric] = high / low if low > 0 else float("inf")
        return SUSPECTS[max(ratios, key=lambda metric: ratios[metric])] if ratios else NO_INCIDENT


def read(text: str) -> Families:
    found: Families = {}
    for family in text_string_to_metric_families(text):
        if family.name not in SUSPECTS:
            continue
        total = count = 0.0
        for sample in family.samples:
            if (
                sample.name.endswith(("_bucket", "_created"))
                or sample.labels.get("mode") == "graph"
            ):
                continue
            if sample.name.endswith("_count") and family.type == "histogram":
                count += sample.value
            else:
                total += sample.value
        found[family.name] = (family.type, total, count)
    return found


def level(scrapes: Sequence[tuple[float, Families]], metric: str) -> float | None:
    """A gauge's mean, a counter's growth a second, a histogram's mean; None without any."""
    rows = [(at, seen[metric]) for at, seen in scrapes if metric in seen]
    if len(rows) < 2:
        return None
    (first_at, (kind, first, count)), (last_at, (_, last, last_count)) = rows[0], rows[-1]
    if kind == "gauge":
        return sum(row[1][1] for row in rows) / len(rows)
    if kind == "histogram":
        return (last - first) / (last_count - count) if last_count > count else None
    return (last - first) / (last_at - first_at)


def first_named(play: Play) -> tuple[str, float | None, str]:
    """(cause, seconds since it began, why) of the first explanation that names one."""
    incidents, _, _ = ledger(play.house)
    made = sorted(
        (each["made_at"], each["cause"], each["because"])
        for row in incidents
        for each in row["diagnoses"]
    )
    for at, cause, because in made:
        if cause != UNKNOWN:
            return cause, stamp(at) - play.began_at, because
    if made:
        return UNKNOWN, None, made[-1][2]
    return (UNKNOWN if incidents else NO_INCIDENT), None, ""


def spoke_against(play: Play, cause: str) -> tuple[str, ...]:
    """From the newest explanation of each incident."""
    return tuple(
        fact["sentence"]
        for row in play.rows("incidents")
        for rival in row_whole(play, row)["rivals"]
        if rival["cause"] == cause
        for fact in rival["evidence"]
        if not fact["supports"]
    )


def row_whole(play: Play, row: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = play.house.api(f"incidents/{row['id']}/")
    return whole


def stamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def named_already(play: Play) -> bool:
    return any(row["cause"] not in ("", UNKNOWN) for row in play.rows("incidents"))


def one_run(scenario: Scenario, seed: int, capacity: float, drawn: str) -> Run:
    home = Path(tempfile.mkdtemp(prefix="trimtab-diagnosis-"))
    house = House(
        home,
        Ports.free(),
        settings={**FAST.settings, "TRIMTAB_AUTOPILOT": "0"},
        scrape_s=FAST.scrape_s,
        engine_options=scenario.engine_options,
        faults=True,
    )
    quiet_s, story_s = QUIET_WINDOWS * FAST.window_s, STORY_WINDOWS * FAST.window_s
    scrapes = Scrapes(house.engine_url)
    try:
        house.start()
        scrapes.start()
        play = Play(
            house,
            scenario,
            scenario.requests(seed, capacity, quiet_s, story_s),
            quiet_s,
            FAST,
            lambda text: None,
            over=named_already,
        )
        summary = asyncio.run(play.run())
        named, after_s, because = first_named(play)
        largest = scrapes.largest_change(play.began_at)
        against = spoke_against(play, scenario.cause)
        lost = summary.counts[Status.LOST]
        return Run(scenario.cause, named, largest, drawn, after_s, because, against, lost)
    finally:
        scrapes.ending.set()
        house.stop()
        shutil.rmtree(home, ignore_errors=True)


def capacities(scenarios: Sequence[Scenario]) -> dict[tuple[str, ...], float]:
    """Requests a second by the engine's options."""
    found: dict[tuple[str, ...], float] = {}
    for options in sorted({scenario.engine_options for scenario in scenarios}):
        with tempfile.TemporaryDirectory() as scratch:
            probe = House(Path(scratch), Ports.free(), engine_options=options)
            found[options] = probe.capacity().requests_per_s
            say(f"capacity {found[options]:.1f} requests/s {' '.join(options)}")
    return found


def matrix(runs: Sequence[Run], guess: str) -> None:
    """Planted by row, guessed by column."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        counts[run.planted][getattr(run, guess)] += 1
    columns = sorted({cause for row in counts.values() for cause in row} | set(counts))
    say("\n  planted \\ " + guess)
    for i, cause in enumerate(columns):
        say(f"    {chr(97 + i)}  {cause}")
    say(" " * 26 + " ".join(f"{chr(97 + i):>3}" for i in range(len(columns))))
    for planted in sorted(counts):
        cells = " ".join(f"{counts[planted][cause] or '·':>3}" for cause in columns)
        say(f"  {planted:<24}{cells}")


def share_right(runs: Sequence[Run], guess: str) -> float:
    return sum(getattr(run, guess) == run.planted for run in runs) / len(runs) if runs else 0.0


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    planted = [name for name, each in SCENARIOS.items() if each.cause]
    parser.add_argument("--runs", type=int, default=1, help="of each cause")
    parser.add_argument("--seed", type=int, help="of order, loads and guesses; default: any")
    parser.add_argument("--only", nargs="+", choices=planted, default=planted, metavar="NAME")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    draw = random.Random(seed)
    plan = [SCENARIOS[name] for name in options.only for _ in range(options.runs)]
    draw.shuffle(plan)
    carries = capacities(plan)
    causes = sorted({SCENARIOS[name].cause for name in planted})
    began = time.monotonic()
    runs: list[Run] = []
    for scenario in plan:
        capacity = carries[scenario.engine_options]
        run = one_run(scenario, draw.randrange(10**6), capacity, draw.choice(causes))
        runs.append(run)
        after = "–" if run.named_after_s is None else f"{run.named_after_s:.0f} s"
        say(f"  {run.planted:<24} named {run.named:<24} after {after:<6} largest change "
            f"{run.largest:<24} [{(time.monotonic() - began) / 60:.1f} min]")  # fmt: skip
        if run.named != run.planted:
            say(f"      {run.because}")
            for sentence in run.against:
                say(f"      against {run.planted}: {sentence}")
    return judge(runs, seed)


def judge(runs: Sequence[Run], seed: int) -> int:
    for guess in ("named", "largest"):
        matrix(runs, guess)
    lost = sum(run.lost for run in runs)
    right = share_right(runs, "named")
    say(f"\nseed {seed}, {len(runs)} runs")
    say(f"diagnosis largest_change_right {share_right(runs, 'largest'):.2f} for comparison")
    say(f"diagnosis random_right {share_right(runs, 'drawn'):.2f} for comparison")
    say(f"diagnosis requests_lost {lost} target 0 {'PASS' if not lost else 'FAIL'}")
    passed = right >= TARGET
    say(f"diagnosis right_cause_first {right:.2f} target {TARGET} {'PASS' if passed else 'FAIL'}")
    return 0 if passed and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
