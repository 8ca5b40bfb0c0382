"""Every string a page shows is in the catalogue of every language, translated."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import polib
import pytest
from django.conf import settings
from django.core.management import call_command

ROOT = Path(settings.BASE_DIR)
CATALOGUES = sorted((ROOT / "locale").glob("*/LC_MESSAGES/django.po"))
ROOMS = ("controlplane", "slo", "tracing", "templates")
HOLES = re.compile(r"%(?:\(\w+\))?[-+#0]?[\d.]*[a-zA-Z]")
NAMES = [path.parts[-3] for path in CATALOGUES]


def words(path: Path) -> dict[tuple[str | None, str], polib.POEntry]:
    return {(e.msgctxt, e.msgid): e for e in polib.pofile(str(path)) if not e.obsolete}


def test_every_language_offered_has_a_catalogue() -> None:
    offered = {code.lower() for code, _name in settings.LANGUAGES} - {"en"}
    assert offered == {name.lower().replace("_", "-") for name in NAMES}


@pytest.mark.parametrize("path", CATALOGUES, ids=NAMES)
def test_every_entry_is_translated_and_keeps_its_placeholders(path: Path) -> None:
    for entry in words(path).values():
        assert entry.translated(), f"not translated: {entry.msgid!r} (make words lists them all)"
        # Where one form serves every number, it has to say the number as the plural does.
        holes = set(HOLES.findall(entry.msgid_plural or entry.msgid))
        for said in [*entry.msgstr_plural.values(), *filter(None, [entry.msgstr])]:
            assert set(HOLES.findall(said)) == holes, said


@pytest.mark.parametrize("path", CATALOGUES, ids=NAMES)
def test_the_catalogue_holds_every_string_and_no_other(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("xgettext") is None:
        pytest.skip("needs xgettext (Debian: apt install gettext)")
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "static", "migrations")
        shutil.copytree(ROOT / room, tmp_path / room, ignore=ignored)
    fresh = tmp_path / "locale"
    fresh.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "LOCALE_PATHS", [fresh])
    name = path.parts[-3]
    call_command("makemessages", locale=[name], verbosity=0, no_location=True)
    found = words(fresh / name / "LC_MESSAGES" / "django.po")
    known = words(path)
    assert sorted(str(key) for key in found.keys() - known.keys()) == [], "run: make words"
    assert sorted(str(key) for key in known.keys() - found.keys()) == [], "run: make words"
