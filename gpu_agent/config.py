"""The agent's settings: flags over environment over TOML file over defaults, checked once.

One table says it all: each setting has a name, which is its key in the file, `--name` as a flag and
`TRIMTAB_AGENT_NAME` in the environment. Tokens come from the environment or from files only, never
from the command line, where every process of the node could read them.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ENGINES_MAX = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class ConfigError(ValueError):
    """A setting that cannot be used: its name, the value, and what is allowed."""


@dataclass(frozen=True)
class EngineConfig:
    name: str
    service: str
    adapter: str
    url: str


@dataclass(frozen=True)
class Config:
    node: str
    agent_id: str
    state_dir: Path
    control_plane_url: str
    otlp_url: str
    agent_token: str
    ingest_token: str
    engines: tuple[EngineConfig, ...]
    scrape_s: float
    spool_bytes_max: int
    spool_age_s_max: float
    health_host: str
    health_port: int
    timeout_s: float
    bounds_file: Path | None
    ca_file: Path | None
    gpu: bool

    @property
    def stop_file(self) -> Path:
        return self.state_dir / "STOP"


@dataclass(frozen=True)
class Setting:
    """`read` turns text (or a TOML value) into the value; it raises ValueError saying "want …".
    `shown` stands for the value in the help."""

    name: str
    read: Callable[[Any], Any]
    default: Any
    shown: str
    help: str

    @property
    def about(self) -> str:
        if self.default is None:
            return self.help
        default = "on" if self.default is True else self.default
        return f"{self.help} (default: {default})"


def _number(minimum: float, maximum: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        number = float(value) if not isinstance(value, bool) else math.nan
        if not minimum <= number <= maximum:
            raise ValueError(f"want a number from {minimum:g} to {maximum:g}")
        return number

    return read


def _integer(minimum: int, maximum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        text = str(value)
        if not text.isdigit() or not minimum <= int(text) <= maximum:
            raise ValueError(f"want a whole number from {minimum} to {maximum}")
        return int(text)

    return read


def _url(value: Any) -> str:
    parts = urlsplit(str(value))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError("want http://host:port or https://host:port")
    if parts.username or parts.password:
        raise ValueError("want a URL without user or password")
    return str(value).rstrip("/")


def _name(value: Any) -> str:
    if not _NAME.fullmatch(str(value)):
        raise ValueError("want 1 to 63 letters, digits, '.', '_' or '-', a letter or digit first")
    return str(value)


def _file(value: Any) -> Path | None:
    if value in (None, ""):
        return None
    path = Path(str(value))
    if not path.is_file():
        raise ValueError("want a file that is there")
    return path


def _path(value: Any) -> Path | None:
    return None if value in (None, "") else Path(str(value))


def _switch(value: Any) -> bool:
    words = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
    if str(value).lower() not in words:
        raise ValueError("want on or off")
    return words[str(value).lower()]


def _text(value: Any) -> str:
    return str(value)


SETTINGS = (
    Setting("node", _name, None, "NAME", "this node's name (default: the host name)"),
    Setting(
        "state_dir", _path, None, "FOLDER",
        "journal, spool, agent_id (default: $TRIMTAB_HOME/agent-NODE)",
    ),
    Setting("control_plane_url", _url, "http://127.0.0.1:8000", "URL", "where commands come from"),
    Setting(
        "otlp_url", _url, "http://127.0.0.1:4318", "URL",
        "where telemetry goes, without /v1/metrics",
    ),
    Setting("agent_token_file", _file, None, "FILE", "file with the agent token"),
    Setting("ingest_token_file", _file, None, "FILE", "file with the ingest token"),
    Setting("scrape_s", _number(0.1, 3600), 5, "SECONDS", "between readings"),
    Setting(
        "spool_bytes_max", _integer(65_536, 2**40), 256 * 2**20, "BYTES", "the spool may hold"
    ),
    Setting("spool_age_s_max", _number(1, 30 * 86_400), 8 * 3600, "SECONDS", "a batch may wait"),
    Setting("health_host", _text, "127.0.0.1", "HOST", "address of /healthz and /metrics"),
    Setting(
        "health_port", _integer(0, 65_535), 8200, "PORT",
        "port of /healthz and /metrics; 0: any free",
    ),
    Setting("timeout_s", _number(0.1, 60), 5, "SECONDS", "limit of one HTTP exchange"),
    Setting("bounds_file", _file, None, "FILE", "TOML with this node's own bounds per knob"),
    Setting("ca_file", _file, None, "FILE", "certificates to trust instead of the system's"),
    Setting("gpu", _switch, True, "on|off", "read GPUs through NVML"),
)  # fmt: skip
_OTHER_KEYS = frozenset({"engines"})
ENGINE_KEYS = ("name", "service", "adapter", "url")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="trimtab agent",
        description="The node agent: reads GPUs and engines, sends what it read, carries out "
        "commands and undoes what nobody confirms.",
        epilog="Each setting may also stand in the file, or in the environment as "
        "TRIMTAB_AGENT_<NAME>. Tokens: TRIMTAB_AGENT_TOKEN and TRIMTAB_INGEST_TOKEN, or the two "
        "token files. To stop all changes on this node: create STOP in the state folder.",
    )
    made.add_argument("--config", metavar="FILE", help="TOML file with the settings below")
    for setting in SETTINGS:
        flag = "--" + setting.name.replace("_", "-")
        made.add_argument(flag, metavar=setting.shown, help=setting.about)
    made.add_argument(
        "--engine",
        action="append",
        metavar="name=N,service=S,adapter=A,url=U",
        help="an engine on this node; may be given again. In the environment: separated by ';'",
    )
    return made


def load(argv: Sequence[str], environ: Mapping[str, str], *, adapters: Sequence[str]) -> Config:
    """The settings; creates the state folder and the agent's id in it. Raises ConfigError."""
    flags = vars(parser().parse_args(argv))
    table = _table(flags["config"] or environ.get("TRIMTAB_AGENT_CONFIG"))
    values = {setting.name: _value(setting, flags, environ, table) for setting in SETTINGS}
    node = values["node"] or _checked("node", _name, socket.gethostname())
    home = Path(environ.get("TRIMTAB_HOME", "var"))
    state_dir: Path = values["state_dir"] or home / f"agent-{node}"
    engines = _engines(flags["engine"], environ, table, adapters)
    agent_token = _token("TRIMTAB_AGENT_TOKEN", values["agent_token_file"], environ)
    ingest_token = _token("TRIMTAB_INGEST_TOKEN", values["ingest_token_file"], environ)
    return Config(
        node=node,
        agent_id=_agent_id(state_dir),
        state_dir=state_dir,
        control_plane_url=values["control_plane_url"],
        otlp_url=values["otlp_url"],
        agent_token=agent_token,
        ingest_token=ingest_token,
        engines=engines,
        scrape_s=values["scrape_s"],
        spool_bytes_max=values["spool_bytes_max"],
        spool_age_s_max=values["spool_age_s_max"],
        health_host=values["health_host"],
        health_port=values["health_port"],
        timeout_s=values["timeout_s"],
        bounds_file=values["bounds_file"],
        ca_file=values["ca_file"],
        gpu=values["gpu"],
    )


def _table(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    allowed = _OTHER_KEYS | {setting.name for setting in SETTINGS}
    for key in table:
        if key not in allowed:
            raise ConfigError(f"config file {path}: {key}: allowed: {', '.join(sorted(allowed))}")
    return table


def _value(
    setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str], table: Mapping[str, Any]
) -> Any:
    variable = f"TRIMTAB_AGENT_{setting.name.upper()}"
    for where, value in (
        ("--" + setting.name.replace("_", "-"), flags[setting.name]),
        (variable, environ.get(variable)),
        (setting.name, table.get(setting.name)),
    ):
        if value is not None:
            return _checked(where, setting.read, value)
    return setting.default


def _checked(where: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{where}: got {value!r}, {error}") from None


def _engines(
    flags: list[str] | None,
    environ: Mapping[str, str],
    table: Mapping[str, Any],
    adapters: Sequence[str],
) -> tuple[EngineConfig, ...]:
    texts = flags or [text for text in environ.get("TRIMTAB_AGENT_ENGINES", "").split(";") if text]
    rows = [_pairs(text) for text in texts] if texts else table.get("engines", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"engines: got {rows!r}, want a list of tables")
    if len(rows) > ENGINES_MAX:
        raise ConfigError(f"engines: got {len(rows)}, allowed: {ENGINES_MAX}")
    engines = tuple(_engine(row, adapters) for row in rows)
    names = [engine.name for engine in engines]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"engines: two are called {name!r}, want one name each")
    return engines


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(middle for _, middle, _ in pairs):
        raise ConfigError(f"--engine: got {text!r}, want name=N,service=S,adapter=A,url=U")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _engine(row: Mapping[str, Any], adapters: Sequence[str]) -> EngineConfig:
    row = {"adapter": "reference", **row}
    if set(row) != set(ENGINE_KEYS):
        raise ConfigError(f"engine: got {', '.join(row)}, want {', '.join(ENGINE_KEYS)}")
    if row["adapter"] not in adapters:
        allowed = ", ".join(sorted(adapters))
        raise ConfigError(f"engine adapter: got {row['adapter']!r}, allowed: {allowed}")
    return EngineConfig(
        name=_checked("engine name", _name, row["name"]),
        service=_checked("engine service", _name, row["service"]),
        adapter=row["adapter"],
        url=_checked("engine url", _url, row["url"]),
    )


def _token(variable: str, path: Path | None, environ: Mapping[str, str]) -> str:
    token = environ.get(variable) or (path.read_text().strip() if path else "")
    if not token:
        name = variable.removeprefix("TRIMTAB_").lower()
        raise ConfigError(f"{name}: none given, set {variable} or {name}_file")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{variable}: want printable ASCII without spaces (value not shown)")
    return token


def _agent_id(state_dir: Path) -> str:
    """This agent's identity, made once and kept: a restart is the same agent."""
    path = state_dir / "agent_id"
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_text().strip()
            return str(uuid.UUID(text))
        made = str(uuid.uuid4())
        fresh = path.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(made + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except ValueError:
        raise ConfigError(f"{path}: got {text!r}, want a UUID") from None
    except OSError as error:
        raise ConfigError(f"state_dir {state_dir}: {error}") from error
    return made
