"""An engine's /metrics page, read line by line in the Prometheus text format 0.0.4.

The parser keeps one line and the series seen so far, never the page. A line that does not parse is
counted and skipped: one odd label must not cost the whole page. `_created` samples are ignored
(they are times, not measurements), untyped families are taken as gauges.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import contextlib
import http.client
import math
import re
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from gpu_agent.source import (
    Family,
    HistogramSample,
    Kind,
    Labels,
    Place,
    Reading,
    Sample,
    Source,
    SourceError,
)

PAGE_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 64 * 1024
LINES_MAX = 200_000
SERIES_MAX = 50_000
LABELS_MAX = 64
COUNT_MAX = 2**63

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|(?=}))')
_ESCAPE = re.compile(r"\\(.)")
_KINDS = {
    "counter": Kind.SUM,
    "gauge": Kind.GAUGE,
    "histogram": Kind.HISTOGRAM,
    "untyped": Kind.GAUGE,
    "unknown": Kind.GAUGE,
    "info": Kind.GAUGE,
    "stateset": Kind.GAUGE,
    "summary": Kind.GAUGE,
}


class LineError(ValueError):
    """One line that is not in the format."""


class _Buckets:
    """One histogram series while its lines come in, in whatever order."""

    __slots__ = ("count", "cumulative", "labels", "sum")

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.cumulative: dict[float, float] = {}
        self.sum = math.nan
        self.count = math.nan

    def sample(self) -> HistogramSample | None:
        """None when the buckets are not those of a cumulative histogram."""
        bounds = sorted(bound for bound in self.cumulative if bound != math.inf)
        total = self.cumulative.get(math.inf, self.count)
        counts: list[int] = []
        below = 0.0
        for value in [*(self.cumulative[bound] for bound in bounds), total]:
            if not value >= below or value > COUNT_MAX:
                return None
            counts.append(round(value - below))
            below = value
        return HistogramSample(self.labels, bounds, counts, self.sum, round(below))


class Exposition:
    """Feed it lines; `families()` answers what they said.

    `lines_bad` counts lines that did not parse and histograms that do not add up, `series_over`
    the samples refused above `series_max`.
    """

    def __init__(self, *, series_max: int = SERIES_MAX) -> None:
        self.series_max = series_max
        self.series = 0
        self.series_over = 0
        self.lines = 0
        self.lines_bad = 0
        self.bad_example = ""
        self._types: dict[str, str] = {}
        self._help: dict[str, str] = {}
        self._families: dict[str, Family] = {}
        self._buckets: dict[str, dict[tuple[tuple[str, str], ...], _Buckets]] = {}

    def feed(self, line: str) -> None:
        self.lines += 1
        line = line.strip()
        if not line:
            return
        try:
            if line.startswith("#"):
                self._comment(line)
            else:
                self._sample(line)
        except LineError as error:
            self.lines_bad += 1
            self.bad_example = self.bad_example or str(error)

    def _comment(self, line: str) -> None:
        words = line.split(None, 3)
        if len(words) < 3 or words[0] != "#":
            return
        if words[1] == "TYPE":
            kind = words[3].strip().lower() if len(words) == 4 else ""
            if kind not in _KINDS:
                raise LineError(f"TYPE of {words[2]}: got {kind!r}, allowed: {', '.join(_KINDS)}")
            self._types[words[2]] = kind
        elif words[1] == "HELP" and len(words) == 4:
            self._help[words[2]] = words[3].replace("\\n", "\n").replace("\\\\", "\\")

    def _sample(self, line: str) -> None:
        match = _NAME.match(line)
        if match is None:
            raise LineError(f"no metric name in {line[:80]!r}")
        name, rest = match[0], line[match.end() :].lstrip()
        labels, rest = _labels(rest) if rest.startswith("{") else ({}, rest)
        words = rest.split()
        # A timestamp is allowed but not used: the engine's clock is not the agent's.
        if not 1 <= len(words) <= 2:
            raise LineError(f"{name}: want a value and perhaps a time, got {rest[:80]!r}")
        self._keep(name, labels, _number(name, words[0]))

    def _keep(self, name: str, labels: dict[str, str], value: float) -> None:
        base, _, suffix = name.rpartition("_")
        if suffix in ("bucket", "sum", "count") and self._types.get(base) == "histogram":
            self._keep_bucket(base, suffix, labels, value)
            return
        if suffix == "created" and {base, f"{base}_total"} & self._types.keys():
            return
        kind = self._kind(name, base, suffix)
        if not self._room():
            return
        family = self._families.get(name)
        if family is None:
            text = self._help.get(name, self._help.get(base, ""))
            family = self._families[name] = Family(name, kind, text)
        family.samples.append(Sample(labels, value))

    def _kind(self, name: str, base: str, suffix: str) -> Kind:
        own, parent = self._types.get(name), self._types.get(base)
        if own == "histogram":
            raise LineError(f"{name}: a histogram has only _bucket, _sum and _count")
        if own is not None:
            return _KINDS[own]
        # OpenMetrics names a family without the `_total` its samples carry.
        if (parent, suffix) in (("counter", "total"), ("summary", "sum"), ("summary", "count")):
            return Kind.SUM
        return Kind.GAUGE

    def _keep_bucket(self, base: str, suffix: str, labels: dict[str, str], value: float) -> None:
        bound = labels.pop("le", None) if suffix == "bucket" else None
        if suffix == "bucket" and bound is None:
            raise LineError(f"{base}_bucket without le")
        key = tuple(sorted(labels.items()))
        series = self._buckets.setdefault(base, {})
        buckets = series.get(key)
        if buckets is None:
            if not self._room():
                return
            buckets = series[key] = _Buckets(labels)
        if bound is not None:
            buckets.cumulative[_number(base, bound)] = value
        elif suffix == "sum":
            buckets.sum = value
        else:
            buckets.count = value

    def _room(self) -> bool:
        if self.series >= self.series_max:
            self.series_over += 1
            return False
        self.series += 1
        return True

    def families(self) -> list[Family]:
        families = list(self._families.values())
        for name, series in self._buckets.items():
            family = Family(name, Kind.HISTOGRAM, self._help.get(name, ""))
            for buckets in series.values():
                sample = buckets.sample()
                if sample is None:
                    self.lines_bad += 1
                    self.bad_example = self.bad_example or f"{name}: buckets are not cumulative"
                else:
                    family.histograms.append(sample)
            families.append(family)
        return families

    def start_ns(self) -> int:
        """When the process behind the page began, from process_start_time_seconds, or 0."""
        family = self._families.get("process_start_time_seconds")
        value = family.samples[0].value if family else 0.0
        return int(value * 1e9) if 0 < value < 1e10 else 0


def _labels(text: str) -> tuple[dict[str, str], str]:
    labels: dict[str, str] = {}
    position = 1
    while (match := _LABEL.match(text, position)) is not None:
        labels[match[1]] = _unescape(match[2])
        position = match.end()
        if len(labels) > LABELS_MAX:
            raise LineError(f"more than {LABELS_MAX} labels in {text[:80]!r}")
    rest = text[position:].lstrip()
    if not rest.startswith("}"):
        raise LineError(f"labels do not end in {text[:80]!r}")
    return labels, rest[1:]


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)


def _number(name: str, text: str) -> float:
    if "_" in text:  # Python takes 1_000, the format does not
        raise LineError(f"{name}: {text[:40]!r} is not a number")
    try:
        return float(text)
    except ValueError:
        raise LineError(f"{name}: {text[:40]!r} is not a number") from None


class EngineMetrics(Source):
    """Scrapes one engine. Values keep the names and labels the engine gave them."""

    slug = "engine_metrics"
    label = "Engine /metrics"

    def __init__(
        self,
        *,
        engine: str,
        service: str,
        node: str,
        url: str,
        timeout_s: float = 3.0,
        page_bytes_max: int = PAGE_BYTES_MAX,
        lines_max: int = LINES_MAX,
    ) -> None:
        self.name = engine
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.page_bytes_max = page_bytes_max
        self.lines_max = lines_max
        self._resource = {
            "service.name": service,
            "service.instance.id": engine,
            "host.name": node,
        }

    @classmethod
    def build(cls, place: Place) -> list[Source]:
        return [
            cls(engine=name, service=service, node=place.node, url=url, timeout_s=place.timeout_s)
            for name, service, url in place.engines
        ]

    def collect(self) -> Reading:
        page = Exposition()
        began_ns = time.time_ns()
        try:
            with contextlib.closing(_connection(self.url, self.timeout_s)) as connection:
                for line in self._lines(connection):
                    page.feed(line)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise SourceError(f"{self.url}/metrics: {reason}") from error
        families = page.families()
        notes = {
            "lines_bad": page.lines_bad,
            "series": page.series,
            "series_over": page.series_over,
        }
        return Reading(self._resource, began_ns, families, page.start_ns(), notes)

    def _lines(self, connection: http.client.HTTPConnection) -> Iterator[str]:
        path = f"{urlsplit(self.url).path}/metrics"
        connection.request("GET", path, headers={"Accept": "text/plain;version=0.0.4"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise SourceError(f"{self.url}/metrics: HTTP {response.status}, want 200")
            yield from self._bounded(response)

    def _bounded(self, lines: http.client.HTTPResponse) -> Iterator[str]:
        # The socket's timeout bounds each read; the deadline bounds a page that only drips.
        deadline = time.monotonic() + self.timeout_s
        size = 0
        count = 0
        while line := lines.readline(LINE_BYTES_MAX + 1):
            size += len(line)
            count += 1
            if size > self.page_bytes_max:
                raise SourceError(f"{self.url}/metrics: more than {self.page_bytes_max} bytes")
            if count > self.lines_max:
                raise SourceError(f"{self.url}/metrics: more than {self.lines_max} lines")
            if len(line) > LINE_BYTES_MAX:
                raise SourceError(f"{self.url}/metrics: a line above {LINE_BYTES_MAX} bytes")
            if time.monotonic() > deadline:
                raise SourceError(f"{self.url}/metrics: not read within {self.timeout_s} s")
            yield line.decode("utf-8", "replace")
        if lines.length:
            raise SourceError(f"{self.url}/metrics: the page broke off, {lines.length} bytes short")


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=timeout_s)
