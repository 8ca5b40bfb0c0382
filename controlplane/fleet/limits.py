"""How large a sync may be and how long a silence counts as late: every limit of the room."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from gpu_agent.protocol import PROTOCOL_VERSION, SyncRequest, WireError

SYNC_BYTES_MAX = 1024 * 1024
NODES_PER_TENANT_MAX = 1_000
ENGINES_PER_NODE_MAX = 64
# An engine renamed is another engine; the old ones stay until they are pruned.
ENGINES_KNOWN_PER_NODE_MAX = 4 * ENGINES_PER_NODE_MAX
GPUS_PER_NODE_MAX = 64
RESULTS_PER_SYNC_MAX = 1_000
COMMANDS_OFFERED_MAX = 100
COMMANDS_LOOKED_AT_MAX = 2_000
LIST_ROWS_MAX = 1_000
ROWS_PER_PRUNE_MAX = 1_000
STATUS_CHARS_MAX = 200
ERROR_CHARS_MAX = 300
CHANGED_BY_CHARS_MAX = 100
TOTAL_MAX = 2**63 - 1
# The agent polls every 2 s.
LATE_AFTER = timedelta(seconds=15)
LOST_AFTER = timedelta(seconds=60)

# Field → longest text, as the columns have it.
NODE_CHARS_MAX = {"agent_id": 64, "boot_id": 64, "node": 100, "agent_version": 32}
ENGINE_CHARS_MAX = {"name": 100, "service": 100, "adapter": 40, "url": 300, "model": 100}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
MAY_BE_EMPTY = frozenset({"model", "agent_version"})


def sync_check(request: SyncRequest) -> None:
    """Raises WireError naming the field, the value and what is allowed."""
    if request.protocol != PROTOCOL_VERSION:
        raise WireError(f"SyncRequest.protocol: got {request.protocol}, want {PROTOCOL_VERSION}")
    _texts_check("SyncRequest", request, NODE_CHARS_MAX)
    for field, count_max in (
        ("engines", ENGINES_PER_NODE_MAX),
        ("gpus", GPUS_PER_NODE_MAX),
        ("results", RESULTS_PER_SYNC_MAX),
    ):
        count = len(getattr(request, field))
        if count > count_max:
            raise WireError(f"SyncRequest.{field}: got {count}, allowed: at most {count_max}")
    for field in ("spool_bytes", "spool_dropped_total", "rss_bytes", "cpu_seconds_total"):
        number = getattr(request, field)
        if not 0 <= number <= TOTAL_MAX:
            raise WireError(f"SyncRequest.{field}: got {number}, allowed: 0 to {TOTAL_MAX}")
    names: set[str] = set()
    for index, report in enumerate(request.engines):
        where = f"SyncRequest.engines[{index}]"
        _texts_check(where, report, ENGINE_CHARS_MAX)
        if report.config_version is not None and not 0 <= report.config_version <= TOTAL_MAX:
            raise WireError(
                f"{where}.config_version: got {report.config_version}, allowed: 0 to {TOTAL_MAX}"
            )
        if report.name in names:
            raise WireError(f"{where}.name: got {report.name!r} a second time, want each once")
        names.add(report.name)


def time_of(where: str, text: str) -> datetime:
    """An RFC 3339 time. Raises WireError for anything else, a time without a zone among it."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise WireError(f"{where}: got {text!r}, want an RFC 3339 time with its zone")
    return at


def words_of(text: str, chars_max: int) -> str:
    """What an engine says in its own words: cut, control characters as spaces, never refused."""
    return _CONTROL.sub(" ", text[:chars_max]).strip()


def _texts_check(where: str, message: object, chars_max: dict[str, int]) -> None:
    for field, longest in chars_max.items():
        text = getattr(message, field)
        least = 0 if field in MAY_BE_EMPTY else 1
        if not least <= len(text) <= longest or _CONTROL.search(text):
            shown = text if len(text) <= longest else f"{text[:longest]}…"
            raise WireError(
                f"{where}.{field}: got {shown!r}, allowed: {least} to {longest} characters,"
                " no control characters"
            )
