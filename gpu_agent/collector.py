"""The tick: one source, read on a fixed beat, encoded, and put on disk. It never sends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping

from gpu_agent import otlp
from gpu_agent.source import Source, SourceError
from gpu_agent.spool import Spool
from gpu_agent.standing import Standing


class Collector:
    """Reads `source` every `scrape_s`, on a thread of its own, so that one cannot delay another.

    A tick that comes too late is left out, not made up for: the values would carry the same time.
    """

    def __init__(self, source: Source, spool: Spool, *, scrape_s: float, version: str) -> None:
        self.source = source
        self.standing = Standing()
        self.duration_s = 0.0
        self.notes: Mapping[str, float] = {}
        self.readings_total = 0
        self._spool = spool
        self._scrape_s = scrape_s
        self._version = version

    def run(self, stop: threading.Event) -> None:
        due = time.monotonic() + random.uniform(0, min(1.0, self._scrape_s))
        while not stop.wait(max(0.0, due - time.monotonic())):
            self.tick()
            missed = max(0, int((time.monotonic() - due) // self._scrape_s))
            due += self._scrape_s * (missed + 1)

    def tick(self) -> None:
        began = time.monotonic()
        try:
            reading = self.source.collect()
            if reading.families:
                self._spool.put(otlp.encode(reading, version=self._version))
        except SourceError as error:
            self.standing.bad(str(error))
            return
        except OSError as error:
            self.standing.bad(f"spool: {error}")
            return
        finally:
            self.duration_s = time.monotonic() - began
        self.notes = reading.notes
        self.readings_total += 1
        if reading.error:
            self.standing.bad(reading.error)
        else:
            self.standing.good()
