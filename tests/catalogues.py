"""Compiled catalogues, as `make setup` makes them, for a run straight from a checkout."""

from __future__ import annotations

import os
from pathlib import Path

import polib

ROOT = Path(__file__).resolve().parents[1]


def compile_all() -> None:
    """Writes the .mo files that are missing or older than their .po."""
    for source in (ROOT / "locale").glob("*/LC_MESSAGES/*.po"):
        compiled = source.with_suffix(".mo")
        if not compiled.exists() or compiled.stat().st_mtime < source.stat().st_mtime:
            # Under another name first: another worker of the run may be reading it.
            part = compiled.with_suffix(f".{os.getpid()}")
            polib.pofile(str(source)).save_as_mofile(str(part))
            part.replace(compiled)
