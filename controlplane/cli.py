"""The `trimtab` command: up, demo, agent, engine, status, token, channel, stop.

Commands that touch telemetry go through the REST API: exactly one process owns the embedded store.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The daemons have command lines of their own: hand everything over untouched.
    modules = {"demo": "controlplane.demo", "agent": "gpu_agent", "engine": "engine"}
    if arguments and arguments[0] in modules:
        hand_over(modules[arguments[0]], arguments[1:])
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except Stop as stop:
        print(f"trimtab {options.command}: {stop}", file=sys.stderr)
        return 1


class Stop(Exception):
    """Ends a command with a reason and a remedy for the person who typed it."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="trimtab",
        description="An SLO control plane for LLM inference fleets.",
        epilog="State lives in TRIMTAB_HOME (default ./var). Settings: docs/settings.md.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int | None], about: str) -> Any:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        return command

    add("up", up, "Run the control plane: pages, API, OTLP, loop.")
    for name, about in (
        ("demo", "The whole loop on this machine: control plane, engine, agent, load."),
        ("engine", "Run the reference engine (`trimtab engine --help`)."),
        ("agent", "Run a node's agent (`trimtab agent --help`)."),
    ):
        commands.add_parser(name, help=about, add_help=False)
    status_ = add("status", status, "What runs, how it stands, what it costs.")
    status_.add_argument("--url", help="control plane (default: TRIMTAB_PUBLIC_URL)")
    token_ = add("token", token, "Make a token, list them, or revoke one.")
    token_.add_argument("verb", choices=["create", "list", "revoke"])
    token_.add_argument("--kind", choices=["ingest", "agent", "api"], default="ingest")
    token_.add_argument("--name", default="cli", help="what it is for; shown in lists")
    token_.add_argument("--prefix", help="revoke: the token's first characters, as listed")
    token_.add_argument("--tenant", default="default")
    channel_ = add("channel", channel, "Say where messages about incidents go.")
    channel_.add_argument("verb", choices=["add", "list", "remove"])
    channel_.add_argument("--name", help="what people call it; one of its name per tenant")
    channel_.add_argument("--url", help="add: where to POST, http or https")
    channel_.add_argument("--kind", default="webhook", help="add: how (default: webhook)")
    channel_.add_argument("--tenant", default="default")
    add("stop", stop, "End what `make run` started, and nothing else.")
    return top


def hand_over(module: str, arguments: Sequence[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606


def listen(host: str, port: int, purpose: str, setting: str) -> socket.socket:
    """A listening socket. Raises Stop when the port is taken, naming the setting that moves it."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise Stop(
            f"cannot listen on {host}:{port} for {purpose}: {error.strerror}. "
            f"Free the port or choose another with {setting}=PORT."
        ) from None
    sock.listen(1024)
    sock.set_inheritable(True)
    return sock


def up(options: argparse.Namespace) -> None:
    """One process: ASGI on two ports, Celery's worker and beat in threads (asgi.py starts them)."""
    import django
    import uvicorn

    django.setup()
    from django.conf import settings
    from django.core.management import call_command

    from controlplane.accounts.first_run import first_owner

    sockets = [
        listen(settings.TRIMTAB_BIND, settings.TRIMTAB_WEB_PORT, "pages", "TRIMTAB_WEB_PORT"),
        listen(settings.TRIMTAB_BIND, settings.TRIMTAB_OTLP_PORT, "OTLP", "TRIMTAB_OTLP_PORT"),
    ]
    call_command("migrate", verbosity=0, interactive=False)
    login = first_owner(settings.TRIMTAB_HOME)
    config = uvicorn.Config(
        "controlplane.asgi:application",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=30,
        proxy_headers=settings.HTTPS,
        server_header=False,
    )
    # uvicorn raises the signal again once it has shut down; ending is what it asked for, so that
    # second one must not count as a death.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    print(f"Trimtab at {settings.TRIMTAB_PUBLIC_URL}  ·  OTLP/HTTP on {settings.TRIMTAB_OTLP_PORT}")
    print(f"Sign in as {login.name}; the password is in {login.path}", flush=True)
    server = uvicorn.Server(config)
    server.run(sockets=sockets)
    if not server.started:
        raise Stop("the control plane could not start; the reason stands above")


def open_home() -> Path:
    """Django over TRIMTAB_HOME; returns it. Raises Stop where no control plane has been yet."""
    import django

    django.setup()
    from django.conf import settings
    from django.db import connection

    home: Path = settings.TRIMTAB_HOME
    if "accounts_tenant" not in connection.introspection.table_names():
        raise Stop(f"no control plane has run in {home} yet. Start one: trimtab up")
    return home


def status(options: argparse.Namespace) -> None:
    home = open_home()
    import httpx
    from django.conf import settings

    from controlplane.accounts.first_run import token_for_cli

    url = (options.url or settings.TRIMTAB_PUBLIC_URL).rstrip("/")
    headers = {"Authorization": f"Bearer {token_for_cli(home)}"}
    with httpx.Client(base_url=url, headers=headers, timeout=10) as client:

        def get(path: str) -> httpx.Response:
            try:
                answer = client.get(path)
            except httpx.TransportError as error:
                raise Stop(f"no control plane at {url} ({error}). Start one: trimtab up") from None
            if answer.status_code != 200:
                raise Stop(f"{url}{path} answered {answer.status_code}: {answer.text[:200]}")
            return answer

        print_process(url, get("/metrics").text)
        for noun in ("nodes", "engines", "objectives", "incidents"):
            for row in get(f"/api/v1/{noun}/").json()[noun]:
                print_row(noun[:-1], STATUS_ROWS[noun](row))


STATUS_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "nodes": lambda n: (
        f"{n['name']}: agent {n['state']}, {n['gpu_status'] or 'GPUs ' + str(len(n['gpus']))}, "
        f"{n['agent_rss_bytes'] / 2**20:.0f} MiB"
    ),
    "engines": lambda e: (
        f"{e['name']} ({e['service']}): {e['state']}, config version {e['config_version']}, "
        + " ".join(f"{knob}={value}" for knob, value in sorted(e["values"].items()))
    ),
    "objectives": lambda o: f"{o['name']} ({o['service']}): {o['standing']['state']}",
    "incidents": lambda i: f"{i['state']}: {i['what']}",
}


def print_row(label: str, text: str) -> None:
    print(f"{label:>14}  {text}")


def print_process(url: str, exposition: str) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    value: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            value[sample.name] = value.get(sample.name, 0.0) + sample.value
    up_min = (time.time() - value["process_start_time_seconds"]) / 60
    print_row("control plane", f"{url}, up {up_min:.0f} min")
    print_row("memory", f"{value['process_resident_memory_bytes'] / 2**20:.0f} MiB")
    print_row("CPU", f"{value['trimtab_process_cpu_share']:.1%} of this machine")
    print_row(
        "ingest",
        f"{value.get('trimtab_ingest_spans_total', 0):,.0f} spans, "
        f"{value.get('trimtab_ingest_samples_total', 0):,.0f} samples, "
        f"{value.get('trimtab_ingest_rejected_total', 0):,.0f} rejected",
    )


def open_tenant(slug: str) -> Any:
    """The tenant of that slug. Raises Stop naming those there are."""
    open_home()
    from controlplane.accounts.models import Tenant

    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        known = ", ".join(Tenant.objects.values_list("slug", flat=True)) or "none yet: trimtab up"
        raise Stop(f"--tenant {slug!r} is not a tenant. Known: {known}")
    return tenant


def token(options: argparse.Namespace) -> None:
    tenant = open_tenant(options.tenant)
    from controlplane.accounts.models import Token
    from controlplane.accounts.services import token_create, token_revoke

    if options.verb == "create":
        made, secret = token_create(tenant=tenant, kind=options.kind, name=options.name)
        print(secret)
        print(f"{made.kind} token {made.name!r}; shown this once.", file=sys.stderr)
    elif options.verb == "list":
        for row in Token.objects.filter(tenant=tenant).order_by("created_at"):
            used = f"{row.last_used_at:%Y-%m-%d %H:%M}" if row.last_used_at else "never used"
            print(f"{row.prefix}…  {row.kind:<6}  {row.name:<24}  "
                  f"{'revoked' if row.revoked_at else used}")  # fmt: skip
    else:
        rows = Token.objects.filter(tenant=tenant, prefix=options.prefix, revoked_at=None)
        if len(rows) != 1:
            raise Stop(f"--prefix {options.prefix!r} names {len(rows)} live tokens; want one")
        token_revoke(token=rows[0])
        print(f"Revoked {rows[0].prefix}… ({rows[0].name}).")


def channel(options: argparse.Namespace) -> None:
    tenant = open_tenant(options.tenant)
    from controlplane.alerts.models import Channel

    channels = Channel.objects.filter(tenant=tenant).order_by("name")
    if options.verb == "list":
        for row in channels:
            print(f"{row.name:<24}  {row.kind:<8}  {row.url}{'' if row.enabled else '  disabled'}")
        return
    if not options.name:
        raise Stop(f"{options.verb} wants --name")
    if options.verb == "remove":
        if not channels.filter(name=options.name).exists():
            known = ", ".join(row.name for row in channels) or "none"
            raise Stop(f"--name {options.name!r} is no channel. Known: {known}")
        channels.filter(name=options.name).delete()
        print(f"Removed {options.name}, and what was still to be sent there.")
        return
    if taken := channels.filter(name=options.name).first():
        raise Stop(f"--name {taken.name!r} is taken, for {taken.url}; remove it first")
    made = Channel(tenant=tenant, name=options.name, kind=options.kind, url=options.url or "")
    channel_check(made)
    made.save()
    print(f"Messages about incidents go to {made.url} from now on.")


def channel_check(made: Any) -> None:
    """Raises Stop for a channel that could never deliver."""
    from urllib.parse import urlsplit

    from django.core.exceptions import ValidationError

    from controlplane.alerts.channel import channels

    if made.kind not in channels():
        raise Stop(f"--kind {made.kind!r}: allowed: {', '.join(channels())}")
    try:
        parts = urlsplit(made.url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits or len(made.url) > 500 or not made.url.isprintable():
        raise Stop(
            f"--url {made.url!r}: wanted: an http or https address of at most 500 characters"
        )
    try:
        # Django's own check of addresses wants a dot in every host name.
        made.full_clean(exclude=["url"])
    except ValidationError as error:
        raise Stop("; ".join(error.messages)) from None


def stop(options: argparse.Namespace) -> None:
    """Ends the processes recorded in TRIMTAB_HOME/run, if they are still those processes."""
    home = Path(os.environ.get("TRIMTAB_HOME", Path(__file__).resolve().parent.parent / "var"))
    hand_over("controlplane.demo.processes", [str(home)])


if __name__ == "__main__":
    sys.exit(main())
