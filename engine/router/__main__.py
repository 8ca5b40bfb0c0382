"""`python -m engine.router`: one router process, from the command line to the last answer."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys

from engine.reconfig import StateError
from engine.router.config import RouterConfig, Upstream
from engine.router.server import App
from engine.serve import listen, process_arguments, serve

EXAMPLE = """\
four of five requests to one engine, the fifth to the other; a third for when one is out:
  trimtab router --engine a@http://127.0.0.1:8100=80 --engine b@http://127.0.0.1:8101=20 \\
    --spare c@http://127.0.0.1:8102
drain one (its weight is live, as everything in GET /v1/runtime_config):
  curl -X PATCH http://127.0.0.1:8090/v1/runtime_config -H 'If-Match: "1"' -d '{"weight.a": 0}'
"""


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults beside the arguments, examples as they are written."""


def parse(arguments: list[str]) -> RouterConfig:
    """Exits with 2 and a message for what argparse or RouterConfig does not allow."""
    default = RouterConfig(engines=(Upstream("a", "http://a", 1),))
    parser = argparse.ArgumentParser(
        prog="trimtab router",
        description="One OpenAI-compatible door in front of several engines.",
        epilog=EXAMPLE,
        formatter_class=Help,
    )
    add = parser.add_argument
    absent = argparse.SUPPRESS
    form = "[NAME@]URL[=WEIGHT]"
    add(
        "--engine", action="append", required=True, metavar=form, default=absent,
        help="repeat for each; WEIGHT 0 to 100, 100 where it is not given",
    )  # fmt: skip
    add(
        "--spare", action="append", metavar=form, default=absent,
        help="an engine that is used while another one is out; repeat for more",
    )  # fmt: skip
    add("--name", default=default.name, help="this router, as metrics and spans call it")
    add("--service", default=default.service, help="the service its engines belong to")
    process_arguments(
        parser, node=default.node, host=default.host, port=default.port,
        drain_s_max=default.drain_s_max,
    )  # fmt: skip
    add(
        "--silence-s-max", type=float, default=default.silence_s_max, metavar="SECONDS",
        help="an engine that sends nothing for so long while it answers has failed",
    )  # fmt: skip
    options = vars(parser.parse_args(arguments))
    token = os.environ.get(options.pop("ingest_token_env"), "")
    try:
        engines = [Upstream.read(text) for text in options.pop("engine")]
        engines += [Upstream.read(text, spare=True) for text in options.pop("spare", [])]
        return RouterConfig(
            engines=tuple(engines),
            otlp_endpoint=options.pop("otlp", ""),
            ingest_token=token,
            **options,
        )
    except ValueError as error:
        parser.error(str(error))


def more_files() -> None:
    """Every request under way is two connections: as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: list[str] | None = None) -> int:
    config = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)
    more_files()
    door = listen(config.name, config.host, config.port)
    if door is None:
        return 1
    try:
        app = App(config)
    except (StateError, OSError) as error:
        sys.stderr.write(f"{config.name}: {error}\n")
        return 1
    host, port = door.getsockname()[:2]
    count = len(config.engines)
    ready = f"{config.name} ready: {count} engine{'s' * (count != 1)} on http://{host}:{port}"
    version = app.runtime.current.config_version
    serve(app, door, ready=f"{ready}, config_version {version}", drain_s_max=config.drain_s_max)
    app.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
