"""No row of the documentation is cut off its table, and no page has a heading twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole_and_headings_unique(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        _, *below = table.splitlines()
        assert below, table
        assert re.fullmatch(r"[|\s:-]+", below[0]), table
    headings = re.findall(r"^#+ .*", text, re.M)
    assert len(headings) == len(set(headings)), headings
