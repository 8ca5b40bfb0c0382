"""The tick: one source, read on the clock's beat, encoded, and put on disk. It never sends."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Mapping

from gpu_agent import otlp
from gpu_agent.source import Source, SourceError
from gpu_agent.spool import Spool
from gpu_agent.standing import Standing

# How early, in scrapes, a reading is taken: what a window counts is then as fresh as its end. Each
# agent of a fleet has a moment of its own there, so that they do not all send at once.
EARLY_MIN, EARLY_MAX = 0.04, 0.12
# In scrapes; a wait may end a little early, and a slow reading into the time of the next.
APART_MIN = 0.25


class Collector:
    """Reads `source` every `scrape_s`, on a thread of its own, so that one cannot delay another.

    Shortly before each multiple of `scrape_s` since the epoch, where control windows end. A tick
    that comes too late is left out, not made up for: the values would carry the same time.
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
        early_s = random.uniform(EARLY_MIN, EARLY_MAX) * self._scrape_s
        while not stop.wait(until_due_s(time.time(), self._scrape_s, early_s)):
            self.tick()

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


def until_due_s(now_s: float, scrape_s: float, early_s: float) -> float:
    """Seconds from `now_s` (unix) to the next reading, `early_s` before a multiple of a scrape."""
    ahead_s = now_s + early_s
    place = math.floor(ahead_s / scrape_s + APART_MIN) + 1
    return place * scrape_s - ahead_s
