"""`trimtab replay`: checks a trace, sends it, and sums up how its requests fared."""

from __future__ import annotations

import argparse
import asyncio
import io
import resource
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from controlplane.replay import report
from controlplane.replay.figures import figures
from controlplane.replay.options import options
from controlplane.screen import Gone, Screen
from engine.replay import Record, Replayer, Status, lately
from engine.traces.formats import detect
from engine.traces.trace import Plan, Trace

LOOK_EVERY_S = 1.0
ASK_S_MAX = 10.0
ENDED_EARLY = 130  # as a shell has it after Ctrl-C
OF_THE_TRACE = ("time_scale", "length_scale", "block_tokens", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal cannot show a “×”
    screen = Screen()
    try:
        return replay(chosen, screen)
    except (ValueError, OSError) as error:  # TraceError is one of them
        screen.settle()
        sys.stderr.write(f"trimtab replay: {error}\n")
        return 1
    except (KeyboardInterrupt, Gone):
        screen.settle()
        return ENDED_EARLY


def replay(chosen: argparse.Namespace, screen: Screen) -> int:
    """0 if something was answered, nothing lost and nothing answered twice, else 1."""
    kind = chosen.format or detect(chosen.trace)
    replayer = Replayer(chosen.url, answer_s_max=chosen.wait)
    replayer.model, context = served(chosen.url)
    trace = Trace(
        chosen.trace, kind,
        context_tokens=chosen.context_tokens or context,
        requests_max=chosen.requests, seconds_max=chosen.seconds,
        **{name: getattr(chosen, name) for name in OF_THE_TRACE},
    )  # fmt: skip
    screen.step(f"checking {trace.path}")
    plan = trace.plan()
    if not plan.requests:
        raise ValueError(f"{trace.path}: got no request to send, allowed: one or more")
    if chosen.out:
        chosen.out.open("ab").close()  # better told now that it cannot be written
    engine = f"{replayer.model} at {chosen.url}"
    screen.box("Replay", report.before(trace, plan, engine, chosen.slo), hang=report.TEXT_AT)
    ended_early = False
    more_files()
    try:
        asyncio.run(send(replayer, trace, plan, screen))
    except (KeyboardInterrupt, Gone):
        ended_early = True
    started_at = datetime.now(UTC) - timedelta(seconds=replayer.now())
    found = figures(replayer.records, chosen.slo, replayer.unsolicited)
    screen.settle()
    told = report.after(found, chosen.slo, ended_early)
    screen.box("How it went", told, hang=report.TEXT_AT)
    if chosen.out:
        write(chosen, trace, replayer.model, replayer.records, started_at)
        screen.say(f"Each request: {chosen.out}")
    if ended_early:
        return ENDED_EARLY
    counts = found.summary.counts
    return int(not counts[Status.OK] or counts[Status.LOST] > 0 or found.summary.duplicated > 0)


def served(url: str) -> tuple[str, int | None]:
    """The model the engine serves, and how many tokens it takes where the engine says so.

    Raises ValueError where no such engine answers.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=ASK_S_MAX)
        model: dict[str, Any] = answer.raise_for_status().json()["data"][0]
        return str(model["id"]), model.get("max_model_len")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"--url {url}: {error}. Does an engine run there?") from None
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"--url {url}: /v1/models names no model, as OpenAI's API does") from None


async def send(replayer: Replayer, trace: Trace, plan: Plan, screen: Screen) -> None:
    """Raises Gone once nobody reads the screen."""
    load = asyncio.create_task(replayer.run(trace.requests()))
    while not load.done():
        await asyncio.wait({load}, timeout=LOOK_EVERY_S)
        sent = f"{len(replayer.records):,} of {plan.requests:,} sent"
        screen.progress(replayer.now(), f"{sent} · {lately(replayer)}")
    await load


def more_files() -> None:
    """Every request under way is a connection: as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def write(
    chosen: argparse.Namespace, trace: Trace, model: str, records: Sequence[Record],
    started_at: datetime,
) -> None:  # fmt: skip
    from controlplane.replay import results  # pyarrow takes a while to come in

    how = {
        "trace": str(trace.path), "format": trace.format, "url": chosen.url, "model": model,
        "started_at": started_at.isoformat(), "context_tokens": trace.context_tokens,
        "slo_ms": chosen.slo.limits_ms,
        **{name: getattr(trace, name) for name in OF_THE_TRACE},
    }  # fmt: skip
    results.write(chosen.out, records, started_at, how)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
