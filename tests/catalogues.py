"""Compiled catalogues, as `make setup` makes them, for a run straight from a checkout."""

from __future__ import annotations

from pathlib import Path

import polib

ROOT = Path(__file__).resolve().parents[1]


def compile_all() -> None:
    """Writes the .mo files that are missing or older than their .po."""
    for source in (ROOT / "locale").glob("*/LC_MESSAGES/*.po"):
        compiled = source.with_suffix(".mo")
        if not compiled.exists() or compiled.stat().st_mtime < source.stat().st_mtime:
            polib.pofile(str(source)).save_as_mofile(str(compiled))
