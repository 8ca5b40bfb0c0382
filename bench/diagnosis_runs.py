"""One run of bench/diagnosis.py: a fresh house, a scenario played on it, and what was named."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from controlplane.demo.closing import ledger
from controlplane.demo.house import House, Ports
from controlplane.demo.pace import FAST
from controlplane.demo.play import Play
from controlplane.demo.scenarios import SCENARIOS, Scenario
from engine.replay import Status, Summary

QUIET_WINDOWS = 10
STORY_WINDOWS = 14  # after the shift; a cause not named by then is not named
UNKNOWN, NO_INCIDENT, NOT_FELT = "unknown", "no incident", "not felt"
EARLY = "before the fault"  # whatever was named then, it was not for what had not happened yet
EVENTS_MIN = 20  # of a window, or it says nothing
# What every house promises (controlplane/demo/prepare.py), and the shares of late and of failed
# requests above which a window is bad.
TTFT_S, TPOT_S, BARS = 0.5, 0.1, (0.144, 0.072)
BESIDES = "; besides, "  # stands between two causes named at once

# Two faults of which neither brings the other's signs by itself: played on the first one's load.
PAIRS = {
    f"{first}+{second}": (first, second)
    for first, second in (("hand-edit", "slow-host"), ("kv-pool-halved", "slow-host"))
}

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
    "engine:kv_alloc_stall_seconds": "kv_fragmentation",
    "engine:graph_steps": "graph_capture_lost",
    "engine:graph_capture_ready": "graph_capture_lost",
    "engine:step_seconds": "slow_host",
    "engine:forward_seconds": "slow_host",
    "engine:requests_received": "load_beyond_capacity",
    "vllm:admission_rejections": "load_beyond_capacity",
    "engine:config_changes": "config_changed_by_hand",
}


class Scrapes(threading.Thread):
    """The engine's metrics once a second: (unix seconds, families)."""

    def __init__(self, url: str) -> None:
        super().__init__(name="scrapes", daemon=True)
        self.url = url
        self.seen: list[tuple[float, Families]] = []
        self.pages: list[tuple[float, str]] = []
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(1.0):
            try:
                text = httpx.get(f"{self.url}/metrics", timeout=5).text
            except httpx.TransportError:
                continue
            now = time.time()
            self.seen.append((now, read(text)))
            self.pages.append((now, text))

    def late(self, promise: Mapping[str, Any], since: float) -> list[float]:
        """The share above a promise's threshold, window by window, by the engine's own counts."""
        metric, bound = promise["spec"]["metric"], promise["spec"]["threshold_ms"] / 1000
        ends = [since + i * FAST.window_s for i in range(STORY_WINDOWS + 1)]
        counts = []
        for end in ends:
            page = next((text for at, text in self.pages if at >= end), None)
            if page is None:
                break
            counts.append(counted(page, metric, bound))
        grown = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)]
        return [1 - within / total if total >= EVENTS_MIN else 0.0 for within, total in grown]

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


def counted(page: str, metric: str, bound: float) -> tuple[float, float]:
    """(observations up to the bound, all) of a histogram; the bound is one of its edges."""
    within = total = 0.0
    for family in text_string_to_metric_families(page):
        if family.name == metric:
            for sample in family.samples:
                if sample.name.endswith("_count"):
                    total += sample.value
                elif sample.name.endswith("_bucket") and float(sample.labels["le"]) == bound:
                    within += sample.value
    return within, total


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


@contextmanager
def house_of(scenario: Scenario, keep: Path | None) -> Iterator[House]:
    """A fresh house, started; its state is kept below `keep`."""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix=f"trimtab-{scenario.name}-", dir=keep))
    house = made_house(scenario, home)
    try:
        house.start()
        yield house
    finally:
        house.stop()
        if keep is None:
            shutil.rmtree(home, ignore_errors=True)


def made_house(scenario: Scenario, home: Path) -> House:
    """One that explains and does not act by itself."""
    return House(
        home,
        Ports.free(),
        settings={**FAST.settings, "TRIMTAB_AUTOPILOT": "0"},
        scrape_s=FAST.scrape_s,
        engine_options=scenario.engine_options,
        knobs=scenario.knobs,
        objectives=scenario.promises,
        faults=True,
    )


def play(
    house: House, scenario: Scenario, seed: int, capacity: float, over: Callable[[Play], bool]
) -> tuple[Play, Summary]:
    """The quiet, then the scenario, until it is `over` or its windows have passed."""
    quiet_s, story_s = QUIET_WINDOWS * FAST.window_s, scenario.windows * FAST.window_s
    requests = scenario.requests(seed, capacity, quiet_s, story_s)
    made = Play(house, scenario, requests, quiet_s, FAST, lambda text: None, over=over)
    return made, asyncio.run(made.run())


def cause_run(name: str, seed: int, capacity: float, keep: Path | None) -> dict[str, Any]:
    scenario = replace(SCENARIOS[name], windows=STORY_WINDOWS)
    with house_of(scenario, keep) as house:
        scrapes = Scrapes(house.engine_url)
        scrapes.start()
        played, summary = play(house, scenario, seed, capacity, named_already)
        scrapes.ending.set()
        named, after_s, because = first_named(played)
        if named == NO_INCIDENT and not (felt(played) or felt_besides(played, scrapes)):
            named = NOT_FELT
        return {
            "kind": "cause",
            "planted": scenario.cause,
            "named": named,
            "named_after_s": after_s,
            "largest": scrapes.largest_change(played.began_at),
            "because": because,
            "against": spoke_against(played, {scenario.cause}),
            "lost": summary.counts[Status.LOST],
        }


def pair_scenario(name: str) -> Scenario:
    """The first one's story with the second one's events beside it."""
    first, second = (SCENARIOS[each] for each in PAIRS[name])
    events = (*first.events[:1], *second.events[:1])
    return replace(first, name=name, events=events, windows=STORY_WINDOWS)


def pair_run(name: str, seed: int, capacity: float, keep: Path | None) -> dict[str, Any]:
    scenario = pair_scenario(name)
    planted = [SCENARIOS[each].cause for each in PAIRS[name]]
    with house_of(scenario, keep) as house:
        played, summary = play(house, scenario, seed, capacity, two_named)
        wholes = [whole(played, row) for row in played.rows("incidents")]
        # The one that names most, first of all what was planted: a story told twice is no third.
        named = max(
            ([row["cause"], *(also["cause"] for also in row["also"])] for row in wholes),
            key=lambda causes: (len(set(causes) & set(planted)), -len(causes)),
            default=[],
        )
        return {
            "kind": "pair",
            "planted": planted,
            "named": [cause for cause in named if cause not in ("", UNKNOWN)],
            "because": " | ".join(row["because"] for row in wholes),
            "against": spoke_against(played, set(planted)),
            "lost": summary.counts[Status.LOST],
        }


def felt(play: Play) -> bool:
    """Whether the senders themselves saw a promise of every house broken after it began.

    As an incident opens: in two windows in a row, each of 20 requests or more.
    """
    began_s = play.began_at - play.started_at
    windows: dict[int, list[tuple[bool, ...]]] = defaultdict(list)
    for record in play.replayer.records:
        if record.sent_s >= began_s and record.status is not Status.PENDING:
            late = record.ttft_s > TTFT_S or record.tpot_s > TPOT_S
            failed = record.status is not Status.OK
            windows[int((record.sent_s - began_s) / FAST.window_s)].append((late, failed))
    shares = {
        window: [sum(kind) / len(seen) for kind in zip(*seen, strict=True)]
        for window, seen in windows.items()
        if len(seen) >= EVENTS_MIN
    }
    return any(
        share > bar and shares[window + 1][kind] > bar
        for window, found in shares.items()
        if window + 1 in shares
        for kind, (share, bar) in enumerate(zip(found, BARS, strict=True))
    )


def felt_besides(play: Play, scrapes: Scrapes) -> bool:
    """The same of what the scenario promises besides, a histogram's share of late ones each."""
    return any(
        min(first, second) > (1 - promise["target"]) * promise["fast_burn"]
        for promise in play.scenario.promises
        for first, second in pairwise(scrapes.late(promise, play.began_at))
    )


def first_named(play: Play) -> tuple[str, float | None, str]:
    """(cause, seconds since it began, why) of the first explanation that names one.

    The cause is EARLY where that was before it began.
    """
    incidents, _, _ = ledger(play.house)
    made = sorted(
        (each["made_at"], each["cause"], each["because"])
        for row in incidents
        for each in row["diagnoses"]
    )
    for at, cause, because in made:
        if cause != UNKNOWN:
            after_s = datetime.fromisoformat(at).timestamp() - play.began_at
            return (cause if after_s >= 0 else EARLY), after_s, because
    if made:
        return UNKNOWN, None, made[-1][2]
    return (UNKNOWN if incidents else NO_INCIDENT), None, ""


def spoke_against(play: Play, causes: set[str]) -> list[str]:
    """From the newest explanation of each incident."""
    return [
        f"{rival['cause']} of {row['objective']}: {fact['sentence']}"
        for row in play.rows("incidents")
        for rival in whole(play, row)["rivals"]
        if rival["cause"] in causes
        for fact in rival["evidence"]
        if not fact["supports"]
    ]


def whole(play: Play, row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = play.house.api(f"incidents/{row['id']}/")
    return found


def named_already(play: Play) -> bool:
    return any(row["cause"] not in ("", UNKNOWN) for row in play.rows("incidents"))


def two_named(play: Play) -> bool:
    return any(BESIDES in row["because"] for row in play.rows("incidents"))
