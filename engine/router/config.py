"""Static configuration of one router process: what a restart would be needed to change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ENGINES_MAX = 64
WEIGHT_MAX = 100
WEIGHT_DEFAULT = 100
DRAIN_S_MAX = 3600
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")


@dataclass(frozen=True)
class Upstream:
    """One engine as the command line names it. `spare`: used while another one is out."""

    name: str
    url: str
    weight: int
    spare: bool = False

    @staticmethod
    def read(text: str, *, spare: bool = False) -> Upstream:
        """`[NAME@]URL[=WEIGHT]`; without a name its host and port. Raises ValueError."""
        name, _, address = text.rpartition("@")
        url, _, weight = address.partition("=")
        try:
            parts = urlsplit(url)
            named = name or f"{parts.hostname}:{parts.port or 80}"
        except ValueError as error:
            raise ValueError(f"engine: got {text!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"engine: got {text!r}, want [NAME@]http://HOST:PORT[=WEIGHT]")
        if not NAME.fullmatch(named):
            raise ValueError(f"engine: name {named!r}, want {NAME.pattern}")
        if weight and (not weight.isdecimal() or int(weight) > WEIGHT_MAX):
            raise ValueError(f"engine: weight {weight!r} of {named}, allowed: 0 to {WEIGHT_MAX}")
        return Upstream(named, url.rstrip("/"), int(weight or WEIGHT_DEFAULT), spare)


@dataclass(frozen=True)
class RouterConfig:
    """Raises ValueError naming the field, its value and what is allowed.

    `silence_s_max`: an engine that sends nothing for so long while it answers has failed.
    """

    engines: tuple[Upstream, ...]
    name: str = "router-0"
    service: str = "chat"
    node: str = "node-a"
    host: str = "127.0.0.1"
    port: int = 8090
    silence_s_max: float = 300.0
    drain_s_max: float = 10.0
    state: Path | None = None
    otlp_endpoint: str = ""
    ingest_token: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.engines) <= ENGINES_MAX:
            raise ValueError(f"engines: got {len(self.engines)}, allowed: 1 to {ENGINES_MAX}")
        if all(engine.spare for engine in self.engines):
            raise ValueError("engines: all are spare, want one at least that is not")
        for field in ("name", "url"):
            values = [getattr(engine, field) for engine in self.engines]
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ValueError(f"engines: {field} {min(twice)!r} is there twice")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port: got {self.port}, allowed: 0 to 65535 (0 picks a free one)")
        if not self.silence_s_max > 0:
            raise ValueError(f"silence_s_max: got {self.silence_s_max}, allowed: above 0 seconds")
        if not 0 <= self.drain_s_max <= DRAIN_S_MAX:
            raise ValueError(
                f"drain_s_max: got {self.drain_s_max}, allowed: 0 to {DRAIN_S_MAX} seconds"
            )
