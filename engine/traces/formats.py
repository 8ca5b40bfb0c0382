"""The formats in which traces are published, as rows: one request each, as it was recorded.

FORMATS lists them; `detect` tells them apart. Files are read as streams, but for a result of vLLM,
which is one object. Imports nothing of ours.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

TOKENS_MAX = 10_000_000
TIME_S_MAX = 1e10
HASH_ID_MAX = 2**63 - 1
PEEK_BYTES = 65_536
SHOWN_CHARS_MAX = 60

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
TOKENS = f"whole numbers from 0 to {TOKENS_MAX}"


class TraceError(ValueError):
    """A trace that cannot be replayed: names file, line, column, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request as it was recorded; `number` is its line, `at_us` its time in microseconds.

    `blocks` are the ids of what its prompt consists of, a block of tokens each; a prompt without
    any shares nothing with another.
    """

    number: int
    at_us: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def azure(path: Path) -> Iterator[Row]:
    for line, (at, prompt, output) in _csv(path, AZURE):
        where = f"{path}, line {line}"
        try:
            moment = datetime.fromisoformat(at)
        except ValueError:
            raise _wrong(
                where, AZURE[0], at, "a date and a time, like 2023-11-16 18:15:46.6805900"
            ) from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        yield Row(
            line, (moment - EPOCH) // MICROSECOND,
            _tokens(where, AZURE[1], prompt), _tokens(where, AZURE[2], output),
        )  # fmt: skip


def burstgpt(path: Path) -> Iterator[Row]:
    # Of both releases: the later one has two more columns, before the others.
    for line, (at, prompt, output) in _csv(path, BURSTGPT):
        where = f"{path}, line {line}"
        yield Row(
            line, _microseconds(where, BURSTGPT[0], at, 1e6),
            _tokens(where, BURSTGPT[1], prompt), _tokens(where, BURSTGPT[2], output),
        )  # fmt: skip


def mooncake(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            where = f"{path}, line {line}"
            try:
                row = msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{where}: no JSON ({error}), allowed: {MOONCAKE_LINE}") from None
            if not isinstance(row, dict):
                raise _wrong(where, "the line", row, MOONCAKE_LINE)
            yield Row(
                line,
                _microseconds(where, "timestamp", row.get("timestamp"), 1e3),
                _tokens(where, "input_length", row.get("input_length")),
                _tokens(where, "output_length", row.get("output_length")),
                _hash_ids(where, row.get("hash_ids")),
            )


class _Result(msgspec.Struct):
    """What is read of a result of `vllm bench serve`; the rest is not built in memory."""

    input_lens: list[Any] | None = None
    output_lens: list[Any] | None = None
    start_times: list[Any] | None = None


def vllm(path: Path) -> Iterator[Row]:
    """Rows of a result, by their times: it has them in the order of its data set.

    `number` counts requests from 1. What was sent then is known by its lengths alone.
    """
    try:
        result = msgspec.json.decode(path.read_bytes(), type=_Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}, allowed: {VLLM_RESULT}") from None
    columns: list[list[Any]] = []
    for name in ("start_times", "input_lens", "output_lens"):
        column = getattr(result, name)
        if column is None:
            raise TraceError(f"{path}, {name}: missing, allowed: {VLLM_RESULT}")
        if columns and len(column) != len(columns[0]):
            raise TraceError(
                f"{path}, {name}: got {len(column)} values, allowed: {len(columns[0])}, as many as "
                "start_times"
            )
        columns.append(column)
    rows = []
    for number, (at, prompt, output) in enumerate(zip(*columns, strict=True), start=1):
        where = f"{path}, request {number}"
        rows.append(
            Row(
                number,
                _microseconds(where, "start_times", at, 1e6),
                _tokens(where, "input_lens", prompt),
                _tokens(where, "output_lens", output),
            )
        )
    yield from sorted(rows, key=lambda row: row.at_us)


AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_LINE = f"an object with {', '.join(MOONCAKE)}"
VLLM_RESULT = (
    "one JSON object with start_times, input_lens and output_lens, as "
    "`vllm bench serve --save-result --save-detailed` writes it"
)


@dataclass(frozen=True)
class Format:
    """`time` is its column of times, `counted` what a row's number counts."""

    about: str
    read: Callable[[Path], Iterator[Row]]
    time: str
    counted: str = "line"
    blocks: bool = False


FORMATS = {
    "azure": Format(f"CSV with the columns {', '.join(AZURE)}", azure, AZURE[0]),
    "burstgpt": Format(f"CSV with the columns {', '.join(BURSTGPT)}", burstgpt, BURSTGPT[0]),
    "mooncake": Format(f"JSON, each line {MOONCAKE_LINE}", mooncake, MOONCAKE[0], blocks=True),
    "vllm": Format(VLLM_RESULT, vllm, "start_times", "request"),
}


def detect(path: Path) -> str:
    """The format of a file, by how it begins. Raises TraceError naming those there are; OSError."""
    with path.open("rb") as file:
        head = file.read(PEEK_BYTES)
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    line = text.partition("\n")[0].strip()
    if text.startswith("{"):
        if '"input_length"' in line:
            return "mooncake"
        if any(f'"{key}"' in text for key in ("input_lens", "num_prompts", "request_throughput")):
            return "vllm"
    names = {name.strip() for name in next(csv.reader([line]), [])}
    for name, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
        if names >= set(columns):
            return name
    known = "".join(f"\n  {name}: {each.about}" for name, each in FORMATS.items())
    raise TraceError(f"{path}, line 1: got {_shown(line)}, allowed:{known}")


def _csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and the values of these columns, wherever they are."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = csv.reader(file)
        try:
            heads = [name.strip() for name in next(rows, [])]
            for name in columns:
                if name not in heads:
                    raise _wrong(f"{path}, line 1", "columns", heads, f"with {', '.join(columns)}")
            places = [heads.index(name) for name in columns]
            for row in rows:
                if not row:
                    continue
                if len(row) != len(heads):
                    raise _wrong(
                        f"{path}, line {rows.line_num}", "the line", row, f"{len(heads)} columns"
                    )
                yield rows.line_num, [row[place] for place in places]
        except csv.Error as error:
            raise TraceError(f"{path}, line {rows.line_num}: no CSV ({error})") from None


def _tokens(where: str, column: str, value: Any) -> int:
    number = _number(value)
    if not 0 <= number <= TOKENS_MAX or number != int(number):
        raise _wrong(where, column, value, TOKENS)
    return int(number)


def _microseconds(where: str, column: str, value: Any, scale: float) -> int:
    number = _number(value)
    if not 0 <= number <= TIME_S_MAX * 1e6 / scale:
        unit = "milliseconds" if scale == 1e3 else "seconds"
        raise _wrong(where, column, value, f"{unit} from 0 to {TIME_S_MAX * 1e6 / scale:g}")
    return round(number * scale)


def _hash_ids(where: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(each) is int and 0 <= each <= HASH_ID_MAX for each in value
    ):
        raise _wrong(where, "hash_ids", value, "a list of whole numbers from 0 to 2^63 - 1")
    return tuple(value)


def _number(value: Any) -> float:
    """Of JSON or of CSV; NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _wrong(where: str, column: str, value: Any, allowed: str) -> TraceError:
    got = "missing" if value is None else f"got {_shown(value)}"
    return TraceError(f"{where}, {column}: {got}, allowed: {allowed}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"
