"""The command line of `trimtab replay`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from controlplane.arguments import above_0, whole
from controlplane.replay.figures import Slo
from controlplane.screen import hung, width
from engine.replay import ANSWER_S_MAX
from engine.traces.formats import FORMATS
from engine.traces.trace import BLOCK_TOKENS

ABOUT = (
    "Sends a recorded trace to an engine with an OpenAI-compatible API, and measures the answers. "
    "Open loop: requests are sent at their times, whatever becomes of those before."
)


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for; a wrong command line ends with status 2, saying what is allowed."""
    parser = argparse.ArgumentParser(
        prog="trimtab replay",
        description=textwrap.fill(ABOUT, width()),
        epilog=f"formats:\n{_listed()}\n\nMore in docs/replay.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="the trace")
    add(
        "--format", choices=FORMATS,
        help="its format (default: found by its first line)",
    )  # fmt: skip
    add(
        "--url", default="http://127.0.0.1:8100", metavar="http://HOST:PORT",
        help="the engine, or a router before several (default: %(default)s)",
    )  # fmt: skip
    add(
        "--time-scale", type=above_0, default=1.0, metavar="FACTOR",
        help="times between requests × FACTOR: 0.5 is twice as fast (default: 1)",
    )  # fmt: skip
    add(
        "--length-scale", type=above_0, default=1.0, metavar="FACTOR",
        help="tokens of prompts and answers × FACTOR (default: 1)",
    )  # fmt: skip
    add(
        "--context-tokens", type=above_1, metavar="TOKENS",
        help="what is longer, prompt and answer together, is cut (default: what the engine says "
        "its model takes)",
    )  # fmt: skip
    add(
        "--block-tokens", type=above_1, default=BLOCK_TOKENS, metavar="TOKENS",
        help="of a prompt, that a hash id of the trace stands for (default: %(default)s)",
    )  # fmt: skip
    add("--requests", type=above_1, metavar="N", help="end after so many (default: all)")
    add("--seconds", type=above_0, help="end after so many seconds of sending (default: never)")
    add(
        "--wait", type=above_0, default=ANSWER_S_MAX, metavar="SECONDS",
        help="for answers, after the last was sent; what has none then is lost (default: 60)",
    )  # fmt: skip
    add("--seed", type=whole, default=0, help="of the prompts' tokens (default: 0)")
    add(
        "--slo", type=slo, default=Slo(), metavar="ttft=MS,tpot=MS,e2e=MS",
        help="one or more of these: what a good answer keeps, in milliseconds",
    )  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="write a row for each request there, as Parquet")
    return parser.parse_args(argv)


def _listed() -> str:
    longest = max(map(len, FORMATS))
    return "\n".join(
        line
        for name, each in FORMATS.items()
        for line in hung(f"  {name:<{longest}}  ", each.about, width())
    )


def above_1(text: str) -> int:
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a whole number from 1 on")
    return number


def slo(text: str) -> Slo:
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = part.partition("=")
        if name not in vars(Slo()) or name in limits:
            raise argparse.ArgumentTypeError(
                f"got {part!r}, allowed: {', '.join(vars(Slo()))}, each once, as in "
                "ttft=500,tpot=100"
            )
        try:
            limits[name] = above_0(limit)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from None
    return Slo(**limits)
