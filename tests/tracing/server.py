"""The receiver over a store of its own, for tests that start and kill a real process:
`python -m tests.tracing.server PORT DIRECTORY`. Any token is a tenant."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from tracing import wiring
from tracing.receivers import otlp_http


async def anybody(token: str) -> str | None:
    return token


if __name__ == "__main__":
    wiring.configure(Path(sys.argv[2]), retention_days=30)
    wiring.door()
    app = otlp_http.application(anybody, wiring.door)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", lifespan="off")
