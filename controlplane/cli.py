"""The `trimtab` command. One function a subcommand; command_line.py says what each takes.

Commands that touch telemetry go through the REST API: exactly one process owns the embedded store.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured

from controlplane import declare
from controlplane.client import Client, Stop, check_address, stranger
from controlplane.columns import table
from controlplane.command_line import parser

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

ADDRESS = "address"  # in TRIMTAB_HOME while its control plane runs: where
UNREAD = 141  # as a shell has it of who was ended by SIGPIPE
DAEMONS = {
    "demo": "controlplane.demo",
    "agent": "gpu_agent",
    "engine": "engine",
    "router": "engine.router",
    "replay": "controlplane.replay",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # These have command lines of their own: hand everything over untouched.
    if arguments and arguments[0] in DAEMONS:
        hand_over(DAEMONS[arguments[0]], arguments[1:])
    options = parser().parse_args(arguments)
    try:
        code = int(RUN[options.command](options) or 0)
        sys.stdout.flush()  # who stopped reading is seen here, not at the interpreter's end
        return code
    except (Stop, ImproperlyConfigured) as stop:
        print(f"trimtab {options.command}: {stop}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # What is still buffered must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


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
        way_out = f"Free the port or choose another with {setting}=PORT."
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            way_out = "TRIMTAB_BIND has to be an address of this machine."
        raise Stop(
            f"cannot listen on {host}:{port} for {purpose}: {error.strerror}. {way_out}"
        ) from None
    sock.listen(1024)
    sock.set_inheritable(True)
    return sock


def up(options: argparse.Namespace) -> None:
    """One process: ASGI on two ports, and what asgi.py starts: OTLP/gRPC, Celery in threads."""
    import django
    import uvicorn

    django.setup()
    from django.conf import settings
    from django.core.management import call_command

    from controlplane.accounts.first_run import first_owner

    kept = settings.TRIMTAB_HOME / ADDRESS
    be_the_only_one(kept)
    sockets = [
        listen(settings.TRIMTAB_BIND, settings.TRIMTAB_WEB_PORT, "pages", "TRIMTAB_WEB_PORT"),
        listen(settings.TRIMTAB_BIND, settings.TRIMTAB_OTLP_PORT, "OTLP", "TRIMTAB_OTLP_PORT"),
    ]
    grpc_port = settings.TRIMTAB_OTLP_GRPC_PORT
    if grpc_port:
        # gRPC opens its port itself; a taken one is better told now than by a failed start.
        listen(settings.TRIMTAB_BIND, grpc_port, "OTLP/gRPC", "TRIMTAB_OTLP_GRPC_PORT").close()
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
    print(
        f"Trimtab at {settings.TRIMTAB_PUBLIC_URL}  ·  OTLP/HTTP on {settings.TRIMTAB_OTLP_PORT}"
        + (f"  ·  OTLP/gRPC on {grpc_port}" if grpc_port else "")
    )
    print(f"Sign in as {login.name}; the password is in {login.path}", flush=True)
    server = uvicorn.Server(config)
    kept.write_text(f"{settings.TRIMTAB_PUBLIC_URL}\n")
    try:
        server.run(sockets=sockets)
    finally:
        kept.unlink(missing_ok=True)
    if not server.started:
        raise Stop("the control plane could not start; the reason stands above")


def be_the_only_one(kept: Path) -> None:
    """Raises Stop where a control plane runs over this home; `kept` has its address."""
    from tracing import wiring

    if holder := wiring.held_by():
        at = f", at {kept.read_text().strip()}" if kept.exists() else ""
        raise Stop(
            f"a control plane runs over {kept.parent} already ({holder}){at}. Stop it, or give "
            "this one a home of its own with TRIMTAB_HOME=FOLDER."
        )


def open_home() -> Path:
    """Django over TRIMTAB_HOME; returns it. Raises Stop where no control plane has been yet."""
    import django
    from django.apps import apps

    if not apps.ready:  # again, it would tie the log to what standard error is now
        django.setup()
        logging.getLogger().setLevel(logging.WARNING)  # a command says what it did itself
    from django.conf import settings
    from django.db import connection

    home: Path = settings.TRIMTAB_HOME
    if "accounts_tenant" not in connection.introspection.table_names():
        raise Stop(f"no control plane has run in {home} yet. Start one: trimtab up")
    return home


def client_of(options: argparse.Namespace) -> Client:
    """A connection to `--url` with TRIMTAB_API_TOKEN; on the control plane's own machine, where
    neither need be said, with the token of this machine."""
    url = options.url or os.environ.get("TRIMTAB_PUBLIC_URL")
    token = os.environ.get("TRIMTAB_API_TOKEN")
    if url:
        check_address(url)
    if not (url and token):
        os.environ["TRIMTAB_HOME"] = str(home_that_runs())
        home = open_home()
        from controlplane.accounts.first_run import token_for_cli

        url, token = url or address(home), token or token_for_cli(home)
    return Client(url, token)


def home_given() -> Path:
    return Path(os.environ.get("TRIMTAB_HOME", Path(__file__).resolve().parent.parent / "var"))


def home_that_runs() -> Path:
    """TRIMTAB_HOME, or that of a scenario below it where the demo plays one."""
    kept = [home_given() / ADDRESS, *home_given().glob(f"scenarios/*/{ADDRESS}")]
    newest = max(
        filter(os.path.exists, kept), key=lambda path: path.stat().st_mtime, default=kept[0]
    )
    return newest.parent


def address(home: Path) -> str:
    """Where the control plane over this home runs, unless a setting names another port."""
    from django.conf import settings

    kept = home / ADDRESS
    if "TRIMTAB_WEB_PORT" in os.environ or not kept.exists():
        return str(settings.TRIMTAB_PUBLIC_URL)
    return kept.read_text().strip()


def promise(options: argparse.Namespace) -> None:
    with client_of(options) as client:
        declare.run(client, options)


def status(options: argparse.Namespace) -> None:
    with client_of(options) as client:
        answer = client.call("GET", "/metrics")
        try:
            print_process(client.url, answer.text)
        except (ValueError, KeyError):  # no metrics, or those of something else
            raise stranger(answer) from None
        for noun in ("nodes", "engines", "objectives"):
            for row in client.rows(noun):
                print_row(noun[:-1], STATUS_ROWS[noun](row))
        for row in client.get("incidents/")["incidents"]:
            print_row("incident", STATUS_ROWS["incidents"](row))


def heard(row: dict[str, Any], verb: str) -> str:
    """How old what is told of a node or an engine is: the API has the last it was told itself."""
    if row["last_seen_at"] is None:
        return f"never {verb}"
    at = datetime.fromisoformat(row["last_seen_at"])
    if row["state"] == "ok":
        return f"{verb} {max(0.0, time.time() - at.timestamp()):.0f} s ago"
    return f"not {verb} since {at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def engine_status(engine: dict[str, Any]) -> str:
    """What is known of it: of one that was never reached neither configuration nor knobs."""
    version = engine["config_version"]
    told = (
        engine["state"],
        heard(engine, "read"),
        "" if version is None else f"config version {version}",
        " ".join(f"{knob}={value}" for knob, value in sorted(engine["values"].items())),
    )
    return f"{engine['name']} ({engine['service']}): {', '.join(filter(None, told))}"


def node_status(node: dict[str, Any]) -> str:
    told = (
        f"agent {node['state']}",
        heard(node, "heard"),
        node["gpu_status"] or f"GPUs {len(node['gpus'])}",
        f"{node['agent_rss_bytes'] / 2**20:.0f} MiB",
    )
    return f"{node['name']}: {', '.join(told)}"


STATUS_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "nodes": node_status,
    "engines": engine_status,
    "objectives": lambda o: f"{o['name']} ({o['service']}): {o['standing']['state']}",
    "incidents": lambda i: f"{i['state']}: {i['what']}",
}


def print_row(label: str, text: str) -> None:
    print(f"{label:>14}  {text}")


def print_process(url: str, exposition: str) -> None:
    """Raises ValueError or KeyError where those are no control plane's metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    value: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            value[sample.name] = value.get(sample.name, 0.0) + sample.value
    cpu_share = value["trimtab_process_cpu_share"]  # before a word is said: it is ours alone
    up_min = (time.time() - value["process_start_time_seconds"]) / 60
    print_row("control plane", f"{url}, up {up_min:.0f} min")
    print_row("memory", f"{value['process_resident_memory_bytes'] / 2**20:.0f} MiB")
    print_row("CPU", f"{cpu_share:.1%} of this machine")
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
    from django.core.exceptions import ValidationError

    from controlplane.accounts.models import Token
    from controlplane.accounts.services import token_create, token_revoke

    if options.verb == "create":
        try:
            made, secret = token_create(
                tenant=tenant, kind=options.kind, name=options.name, scopes=options.scope
            )
        except ValidationError as error:
            raise Stop("; ".join(error.messages)) from None
        print(secret)
        print(f"{made.kind} token {made.name!r}; shown this once.", file=sys.stderr)
    elif options.verb == "list":
        rows = Token.objects.filter(tenant=tenant).order_by("created_at")
        none = "No token yet. Make one: trimtab token create --help"
        print(*table(TOKEN_HEADS, map(token_row, rows), none=none), sep="\n")
    else:
        given = options.prefix.removesuffix("…")
        live = Token.objects.filter(tenant=tenant, prefix=given, revoked_at=None)
        if len(live) != 1:
            raise Stop(f"--prefix {options.prefix!r} names {len(live)} live tokens; want one")
        token_revoke(token=live[0])
        print(f"Revoked {live[0].prefix}… ({live[0].name}).")


TOKEN_HEADS = ("TOKEN", "KIND", "NAME", "SCOPES", "LAST USED (UTC)")


def token_row(row: Any) -> tuple[str, ...]:
    used = f"{row.last_used_at:%Y-%m-%d %H:%M}" if row.last_used_at else "never"
    scopes = ",".join(row.scopes) or "–"
    return f"{row.prefix}…", row.kind, row.name, scopes, "revoked" if row.revoked_at else used


def alerts(options: argparse.Namespace) -> None:
    """`channel` and `silence`: what their room's commands say, one line each."""
    tenant = open_tenant(options.tenant)
    from controlplane.alerts.channel import ChannelError
    from controlplane.alerts.commands import COMMANDS

    for name in ("url", "secret"):
        if getattr(options, name, None) == "-":
            setattr(options, name, sys.stdin.readline().strip())
    try:
        for line in COMMANDS[options.command, options.verb](tenant, options):
            print(line)
    except ChannelError as error:
        raise Stop(str(error)) from None


def audit(options: argparse.Namespace) -> None:
    tenant = open_tenant(options.tenant)
    from controlplane.accounts.audit import audit_recent, verify

    if options.verb == "list":
        for row in reversed(audit_recent(tenant)):
            print(f"{row.at:%Y-%m-%d %H:%M:%S}  {row}")
        return
    check = verify(tenant, expect=options.expect)
    if not check.holds:
        raise Stop(f"the chain does not hold after {check.entries} entries: {check.broken}")
    print(f"{check.entries} entries, the chain holds. Newest digest: {check.head}")


def stop(options: argparse.Namespace) -> None:
    """Ends the processes recorded in TRIMTAB_HOME/run, if they are still those processes."""
    hand_over("controlplane.demo.processes", [str(home_given())])


RUN: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "up": up, "status": status, "objective": promise, "contract": promise, "token": token,
    "channel": alerts, "silence": alerts, "audit": audit, "stop": stop,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
