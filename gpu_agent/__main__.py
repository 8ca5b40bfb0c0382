"""`python -m gpu_agent`: reads the settings, runs the agent, says in one line that it is ready."""

from __future__ import annotations

import logging
import os
import sys

from gpu_agent.config import ConfigError, load
from gpu_agent.daemon import Agent
from gpu_agent.engine_adapter import adapter_classes
from gpu_agent.limits import BoundsError


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        config = load(sys.argv[1:], os.environ, adapters=list(adapter_classes()))
        well = Agent(config).run(say)
    except (ConfigError, BoundsError) as error:
        sys.stderr.write(f"agent: {error}\n")
        return 2
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
