"""The command line of `trimtab demo`."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from controlplane.arguments import above_0, whole
from controlplane.demo.house import Ports
from controlplane.demo.pace import PACES
from controlplane.demo.scenarios import SCENARIOS
from controlplane.screen import hung, width
from engine.load import BURST_LOAD, LENGTH_DIVISOR, OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX

ROOT = Path(__file__).resolve().parents[2]
# As `trimtab up` has them; engine, agent and receiver have none.
PORT_SETTINGS = {name: f"TRIMTAB_{name.upper()}_PORT" for name in ("web", "otlp", "otlp_grpc")}
LOWEST = {"otlp_grpc": 0}  # none
OF_THE_STORY = ("scenario", "calm", "load", "quiet_min")  # a recorded trace has none of them
MINUTES = 30.0
QUIET_WINDOWS = 12  # control windows: 3 minutes at the normal pace
CALM_MAX, LOAD_MAX = 1.0, 4.0  # of what was measured: above it nothing is calm
TRACE = "AzureLLMInferenceTrace_conv.csv of https://github.com/Azure/AzurePublicDataset"
ABOUT = "Control plane, engine, agent and load on this machine: watch the loop close."
ABOUT_LOAD = (
    "Arrivals and lengths have the statistics of the Azure LLM inference trace 2023 "
    f"(conversation); lengths ÷ {LENGTH_DIVISOR}, at most {PROMPT_TOKENS_MAX} in and "
    f"{OUTPUT_TOKENS_MAX} out. After the shift, a quarter of the time brings {BURST_LOAD:g} "
    "times the mean, as when a crowd comes at once."
)


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for; a wrong command line ends with status 2, saying what is allowed."""
    parser = argparse.ArgumentParser(
        prog="trimtab demo",
        description=textwrap.fill(ABOUT, width()),
        epilog=f"{textwrap.fill(ABOUT_LOAD, width())}\n\nscenarios:\n{listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_story(parser)
    _add_load(parser)
    parser.add_argument(
        "--model", default="1.3m", choices=["1.3m", "8m"],
        help="size of the engine's model (default: 1.3m)",
    )  # fmt: skip
    parser.add_argument(
        "--home",
        type=Path,
        default=Path(os.environ.get("TRIMTAB_HOME", ROOT / "var")),
        help="state folder (default: TRIMTAB_HOME or ./var); a scenario begins afresh in "
        "scenarios/NAME below it",
    )
    for name, number in vars(Ports()).items():
        setting = PORT_SETTINGS.get(name, "")
        parser.add_argument(
            port_option(name), type=partial(port, lowest=LOWEST.get(name, 1)),
            metavar="PORT", help=f"default: {setting and f'{setting} or '}{number}",
        )  # fmt: skip
    chosen = parser.parse_args(argv)
    _check_story(parser, chosen)
    _complete_ports(parser, chosen)
    return chosen


def _check_story(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    given = [name for name in OF_THE_STORY if getattr(chosen, name) is not None]
    if chosen.trace and given:
        option = f"--{given[0].replace('_', '-')}"
        parser.error(f"--trace: not with {option}, for a trace brings a load of its own")
    window_min = PACES[chosen.pace].window_s / 60
    if chosen.quiet_min is None:
        chosen.quiet_min = QUIET_WINDOWS * window_min
    if chosen.minutes is None and not chosen.scenario and not chosen.trace:
        chosen.minutes = MINUTES
    least_min = chosen.quiet_min + window_min
    if chosen.minutes is not None and not chosen.trace and chosen.minutes < least_min:
        parser.error(
            f"--minutes: got {chosen.minutes:g}, allowed: {least_min:g} or more, the "
            f"{chosen.quiet_min:g} before the shift (--quiet-min) and a control window after it"
        )


def _complete_ports(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Where no option says it, a port is where its variable has it, else the usual one."""
    named: dict[int, str] = {}
    for name, usual in vars(Ports()).items():
        number = getattr(chosen, f"{name}_port")
        if number is None:
            setting = PORT_SETTINGS.get(name, "")
            try:
                number = port(os.environ.get(setting, str(usual)), LOWEST.get(name, 1))
            except argparse.ArgumentTypeError as error:
                parser.error(f"{setting}: {error}")
            setattr(chosen, f"{name}_port", number)
        if other := named.get(number):
            parser.error(f"{port_option(name)}: {number} is the {other} port already")
        named[number] = name


def port_option(name: str) -> str:
    """The option that sets one of the house's ports."""
    return f"--{name.replace('_', '-')}-port"


def _add_story(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scenario", choices=SCENARIOS, metavar="NAME",
        help="play one story to its end and tell it; ends with 0 only if no request was lost and "
        "none answered twice",
    )  # fmt: skip
    parser.add_argument(
        "--pace", choices=PACES, default="normal",
        help="fast: every time of the control loop divided by four (default: normal)",
    )  # fmt: skip
    parser.add_argument(
        "--quiet-min", type=above_0, metavar="MINUTES",
        help=f"before the shift (default: {QUIET_WINDOWS} control windows, which are 3 minutes, "
        "or 45 s at the fast pace)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=above_0,
        help="in all, a control window after the shift at least "
        f"(default: {MINUTES:g}, of a scenario its story, of a trace all of it)",
    )  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calm", type=partial(above_0, most=CALM_MAX), metavar="SHARE",
        help="load before the shift, as a share of this machine's capacity "
        f"(at most {CALM_MAX:g}; default: the scenario's; without one {SCENARIOS['burst'].calm:g})",
    )  # fmt: skip
    parser.add_argument(
        "--load", type=partial(above_0, most=LOAD_MAX), metavar="SHARE",
        help=f"load after the shift, likewise (at most {LOAD_MAX:g}; default: the scenario's; "
        f"without one {SCENARIOS['burst'].load:g}, in crowds with long answers)",
    )  # fmt: skip
    parser.add_argument("--seed", type=whole, default=1, help="seed of arrivals and lengths")
    parser.add_argument(
        "--trace", type=trace_file, metavar="FILE", help="replay the published Azure CSV instead"
    )
    parser.add_argument(
        "--scale", type=above_0, default=1.0, help="of a trace: how much faster than recorded"
    )


def listed() -> str:
    """For `--help`: each scenario in a sentence."""
    longest = max(map(len, SCENARIOS))
    return "\n".join(
        line
        for name, each in SCENARIOS.items()
        for line in hung(f"  {name:<{longest}}  ", each.about, width())
    )


def trace_file(text: str) -> Path:
    try:
        with Path(text).open("rb"):
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot read {text!r}: {error.strerror}. Wanted: {TRACE}"
        ) from None


def port(text: str, lowest: int = 1) -> int:
    if not text.isdecimal() or not lowest <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: {lowest} to 65535")
    return int(text)
