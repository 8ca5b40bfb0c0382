"""`python -m engine`: one engine process, from the command line to the last drained request."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from engine import warm
from engine.config import BLOCK_SIZES, DTYPES, EngineConfig
from engine.exec.build import home
from engine.knobs import NotPossible
from engine.models.errors import ModelError
from engine.models.loader import compute_dtype, find, length_max, pool_blocks
from engine.reconfig import StateError
from engine.serve import listen, process_arguments, serve
from engine.server import App

# The step thread needs the interpreter for a moment between two kernels; the default of 5 ms
# would let the event loop keep it from it for longer than a whole step takes.
SWITCH_INTERVAL_S = 0.0005


def parse(arguments: list[str]) -> EngineConfig:
    """Exits with 2 and a message for what argparse or EngineConfig does not allow."""
    default = EngineConfig()
    parser = argparse.ArgumentParser(
        prog="trimtab engine",
        description="Serves a small Llama-style model over an OpenAI-compatible API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--name", default=default.name, help="this engine, as metrics and spans call it")
    add("--service", default=default.service, help="the service it belongs to")
    process_arguments(
        parser, node=default.node, host=default.host, port=default.port,
        drain_s_max=default.drain_s_max,
    )  # fmt: skip
    add(
        "--model", default=default.model,
        help="1.3m or 8m, built in; smollm2, of a Python package; or a path: a .gguf file, "
        "a .safetensors file, a folder with config.json",
    )  # fmt: skip
    add(
        "--served-model-name", default=argparse.SUPPRESS, metavar="NAME",
        help="what clients call the model; without it the name of its file or folder",
    )  # fmt: skip
    add(
        "--dtype", choices=DTYPES, default=default.dtype,
        help="what is computed in; auto: bfloat16 where the CPU can, for a model of a file",
    )  # fmt: skip
    add("--seed", type=int, default=default.seed, help="seed of a built-in model's weights")
    add("--threads", type=int, default=default.threads, help="CPU threads of a forward pass")
    # Not given, these follow from the model.
    add(
        "--model-len-max", type=int, default=argparse.SUPPRESS, metavar="TOKENS",
        help="of a prompt with its answer; without it as long as the model goes, up to 8192",
    )  # fmt: skip
    add(
        "--kv-pool-blocks", type=int, default=argparse.SUPPRESS, metavar="BLOCKS",
        help="size of the KV cache; without it 4096 blocks, or 1 GiB of them",
    )  # fmt: skip
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        default=default.block_size,
        help="tokens of a KV block, until kv_block_size is changed",
    )
    add(
        "--prefix-cache", choices=("off", "on"), default=default.prefix_cache,
        help="begin requests with cached KV, until prefix_cache is changed",
    )  # fmt: skip
    add(
        "--prefix-ttl-s", type=float, default=default.prefix_ttl_s, metavar="SECONDS",
        help="cached KV that nobody used for so long is not used again; 0: no limit",
    )  # fmt: skip
    add(
        "--host-tier-bytes", type=int, default=default.host_tier_bytes, metavar="BYTES",
        help="host memory for the KV of preempted requests, where preemption is swap",
    )  # fmt: skip
    add(
        "--queue-requests-max", type=int, default=default.queue_requests_max, metavar="REQUESTS",
        help="may wait; the next is answered 429",
    )  # fmt: skip
    add(
        "--queue-tokens-max", type=int, default=default.queue_tokens_max, metavar="TOKENS",
        help="may wait, likewise",
    )  # fmt: skip
    add(
        "--cache", type=lambda text: Path(text) if text else None, default=home(), metavar="FOLDER",
        help="keeps compiled steps, for all engines of this user; empty: none are compiled",
    )  # fmt: skip
    # Not given, these are not there: no default is to be told.
    absent = argparse.SUPPRESS
    add(
        "--prefix-warm", type=Path, default=absent, metavar="FILE",
        help="prompts, a JSON body a line, whose KV is computed at the start and pinned",
    )  # fmt: skip
    add(
        "--tenants", type=Path, default=absent, metavar="FILE",
        help="who is in which tier, as JSON, for the knob tenant_quotas",
    )  # fmt: skip
    add(
        "--queue-state", type=Path, default=absent, metavar="FOLDER",
        help="keeps tasks (POST /v1/tasks), which survive the engine; without it there are none",
    )  # fmt: skip
    add(
        "--faults-token-env",
        default=absent,
        metavar="NAME",
        help="environment variable with the bearer token that opens POST /v1/faults; without it "
        "that is closed",
    )
    options = vars(parser.parse_args(arguments))
    token = os.environ.get(options.pop("ingest_token_env"), "")
    named = options.pop("faults_token_env", "")
    faults = os.environ.get(named, "") if named else ""
    if named and not faults:
        parser.error(f"--faults-token-env: the environment variable {named!r} is not set or empty")
    try:
        source = find(options["model"], options["seed"])
        dtype, _ = compute_dtype(options["dtype"], options["model"])
        length = options["model_len_max"] = length_max(source, options.get("model_len_max"))
        options.setdefault(
            "kv_pool_blocks", pool_blocks(source, dtype, length, options["block_size"])
        )
        options.setdefault("served_model_name", source.name)
        return EngineConfig(
            otlp_endpoint=options.pop("otlp", ""),
            ingest_token=token,
            faults_token=faults,
            **options,
        )
    except ValueError as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    config = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    door = listen(config.name, config.host, config.port)
    if door is None:
        return 1
    try:
        app = App(config)
        if config.prefix_warm:
            app.core.warm(warm.read(config.prefix_warm, config, app.core.tokenizer))
    except (StateError, NotPossible, ModelError, ValueError, OSError) as error:
        sys.stderr.write(f"{config.name}: {error}\n")
        return 1
    version = app.core.runtime.current.config_version
    host, port = door.getsockname()[:2]
    ready = f"{config.name} ready: {config.model_name} on http://{host}:{port}"
    serve(app, door, ready=f"{ready}, config_version {version}", drain_s_max=config.drain_s_max)
    app.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
