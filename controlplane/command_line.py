"""The command line of `trimtab`: every command with its verbs, its arguments and its help."""

from __future__ import annotations

import argparse
from typing import Any

from controlplane import declare
from controlplane.columns import columns

# Heading → commands under it. The daemons have command lines of their own, given with --help.
COMMANDS = {
    "run": {
        "up": "the control plane: pages, API, OTLP, loop",
        "engine": "the reference engine",
        "router": "one door in front of several engines",
        "agent": "a node's agent",
        "demo": "the whole loop on this machine, under a load that shifts",
        "replay": "a recorded trace against an engine, and how it fared",
        "stop": "end what `make run` started, and nothing else",
    },
    "promise, and say who is to be told": {
        "objective": "promise something, in files",
        "contract": "what misses cost, and have cost so far",
        "channel": "where messages about incidents go",
        "silence": "keep quiet about a service, an objective or an engine",
    },
    "look, and let in": {
        "status": "what runs, how it stands, what it costs",
        "token": "what programs carry to be let in",
        "audit": "who changed what, and that nothing of it was rewritten",
    },
}
ABOUT = {name: about for group in COMMANDS.values() for name, about in group.items()}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="trimtab",
        usage="trimtab COMMAND [--help] …",
        description=f"An SLO control plane for LLM inference fleets.\n\n{_listed()}",
        epilog="`trimtab COMMAND --help` lists its verbs and what they take.\n"
        "State lives in TRIMTAB_HOME (default ./var). Settings: docs/settings.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS,
        prog="trimtab",
    )  # fmt: skip
    made = {name: _command(commands, name, about) for name, about in ABOUT.items()}
    made["status"].add_argument("--url", help="control plane (default: TRIMTAB_PUBLIC_URL)")
    for noun in ("objective", "contract"):
        declare.add_arguments(made[noun], noun)
    _token(made["token"])
    _channel(made["channel"])
    _silence(made["silence"])
    _audit(made["audit"])
    return top


def _listed() -> str:
    lines = []
    for heading, group in COMMANDS.items():
        lines += [f"{heading}:", *(f"  {line}" for line in columns(group.items())), ""]
    return "\n".join(lines)


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, description=sentence(about))
    return command


def sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


class Verbs:
    """The verbs of one command; each belongs to a tenant."""

    def __init__(self, command: argparse.ArgumentParser) -> None:
        self.verbs = command.add_subparsers(
            dest="verb", required=True, metavar="VERB", title="verbs"
        )

    def add(self, name: str, about: str) -> Any:
        """Returns the method that adds its arguments."""
        verb = self.verbs.add_parser(name, help=about, description=sentence(about))
        verb.add_argument("--tenant", default="default", help="whose (default: default)")
        return verb.add_argument


def _token(command: argparse.ArgumentParser) -> None:
    verbs = Verbs(command)
    add = verbs.add("create", "make a token and print its secret, which is shown this once")
    add(
        "--kind", choices=["ingest", "agent", "api"], required=True,
        help="what it opens: the telemetry door, the agents' door, or the REST API",
    )  # fmt: skip
    add(
        "--scope", action="append", choices=["read", "write", "act"],
        help="of kind api: what it may do; repeat for more (default: all)",
    )  # fmt: skip
    add("--name", default="cli", help="what it is for, shown in lists (default: cli)")
    verbs.add("list", "every token without its secret, oldest first")
    add = verbs.add("revoke", "end a token")
    add("--prefix", required=True, help="its first characters, as listed")


def _channel(command: argparse.ArgumentParser) -> None:
    verbs = Verbs(command)
    add = verbs.add("add", "tell somebody else of incidents from now on")
    add("--name", required=True, help="what people call it; one of its name per tenant")
    add("--url", required=True, help="where to POST; - reads it from standard input")
    add("--kind", default="webhook", help="webhook (default) or a chat service: docs/alerts.md")
    add("--secret", help="to sign with, where it can; - reads it from standard input")
    add("--severity", help="page: only those; ticket: all (default)")
    add(
        "--remind-minutes", type=int, metavar="MINUTES",
        help="say so often that it still burns; 0: say it once (default: 60)",
    )  # fmt: skip
    verbs.add("list", "every channel, its address without what is secret in it")
    add = verbs.add("test", "send a message and wait for the answer")
    add("--name", required=True, help="as listed")
    add = verbs.add("remove", "send nothing there any more")
    add("--name", required=True, help="as listed")


def _silence(command: argparse.ArgumentParser) -> None:
    verbs = Verbs(command)
    add = verbs.add("add", "tell nobody of what fits, for a while; the end is always told")
    for scope in ("service", "objective", "engine"):
        add(f"--{scope}", metavar="NAME", help=f"of this {scope} alone; one at least is wanted")
    add("--for", dest="lasts", metavar="TIME", required=True, help="30m, 8h or 7d")
    add("--reason", required=True, help="why, for whoever wonders")
    verbs.add("list", "silences that hold now")
    add = verbs.add("end", "end a silence before its time; what still burns is told")
    add("--id", required=True, help="as listed; its first characters do")


def _audit(command: argparse.ArgumentParser) -> None:
    verbs = Verbs(command)
    add = verbs.add("verify", "check that no entry was changed, removed or slipped in")
    add("--expect", default="", metavar="DIGEST", help="a digest that has to be in the chain")
    verbs.add("list", "the newest entries")
