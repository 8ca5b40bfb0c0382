from __future__ import annotations

import math
import re
from datetime import UTC, datetime

import pytest

from controlplane.actions.models import State as ActionState
from controlplane.actions.models import Verdict
from controlplane.alerts.models import Delivery
from controlplane.diagnosis.models import Incident
from controlplane.web.templatetags import prose, ui
from slo.selectors import State as ObjectiveState

S, T, M = "\u00a0", "\u202f", "\u2212"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"), (math.nan, "–"), (0, "0"), (12, "12"), (1234567, f"1{T}234{T}567"),
        (-1500, f"{M}1{T}500"), (3.14159, "3.14"), (0.001234, "0.00123"), (14.0, "14"),
        (1234.5, f"1{T}234"), (-0.0, "0"), (5.1, "5.1"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, said: str) -> None:
    assert ui.number(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"), (0, f"0{S}ms"), (0.00042, f"0.42{S}ms"), (0.42, f"420{S}ms"),
        (1.243, f"1.24{S}s"), (0.9999, f"1.00{S}s"), (42, f"42{S}s"), (12.34, f"12.3{S}s"),
        (545, f"9{S}min 5{S}s"), (15120, f"4{S}h 12{S}min"), (360000, f"4{S}d 4{S}h"),
        (-60, f"{M}1{S}min"), (59.99, f"1{S}min"),
    ],
)  # fmt: skip
def test_durations_have_two_units_at_most(seconds: float | None, said: str) -> None:
    assert ui.duration(seconds) == said


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.99, "99.00"), (0.999999, "99.99"), (1.0, "100.00"), (0.9861, "98.61"), (None, None)],
)
def test_shares_are_cut_so_that_hundred_means_all(share: float | None, said: str | None) -> None:
    assert ui.percent(share) == (f"{said}{S}%" if said else "–")


def test_other_shares_are_rounded() -> None:
    said = [ui.part(share) for share in (0.44660, 0.0058309, 0.73, None)]
    assert said == [f"44.7{S}%", f"0.583{S}%", f"73{S}%", "–"]


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (0.73, "share of TTFT", f"73{S}%"), (0.031, "s", f"31{S}ms"), (8.0, "", "8"),
        (31.0, "requests", f"31{S}requests"), (1.0, "requests", f"1{S}request"),
        (0.4, "requests", f"0.4{S}requests"), (7.5, "1/s", "7.5/s"), (0.818, "s", f"818{S}ms"),
        (1.0, "ms", f"1{S}ms"), (12.0, "%", f"12{S}%"),
        (0.12, "relative error", f"12{S}%"), (None, "s", "–"),
    ],
)  # fmt: skip
def test_measures_are_said_in_their_unit(value: float | None, unit: str, said: str) -> None:
    assert ui.measure(value, unit) == said


@pytest.mark.parametrize(
    ("p_value", "said"), [(0.114, "11 %"), (0.0062, "0.62 %"), (1e-13, "under 0.01 %")]
)
def test_a_chance_is_never_said_to_be_none(p_value: float, said: str) -> None:
    assert ui.chance(p_value).replace("\u00a0", " ") == said


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("6.8% of 2,225 to 7.4 % of 1,234,567", "6.8_% of 2|225 to 7.4_% of 1|234|567"),
        ("(look 2 of 3, p = 0.0084)", "(look 2 of 3, p = 0.0084)"),
        ("one of 8,16,32; at 12,5 or 1,2345", "one of 8,16,32; at 12,5 or 1,2345"),
    ],
)
def test_stored_words_have_their_numbers_as_the_page_writes_its_own(stored: str, said: str) -> None:
    assert prose.prose(stored).replace("\u00a0", "_").replace("\u202f", "|") == said
    assert prose.prose(prose.prose(stored)) == prose.prose(stored)


@pytest.mark.parametrize(
    ("before", "value", "unit", "said"),
    [
        (0.121, 33.0, "requests", "0.12 → 33_requests"),
        (1.0, 33.0, "requests", "1 → 33_requests"),
        (0.0, 0.0, "1/s", "0/s, as before"),
        (0.5, 2.0, "1/s", "0.5 → 2/s"),
        (0.02, 1.5, "s", "20_ms → 1.50_s"),
        (0.2, 0.9, "ratio", "20 → 90_%"),
        (None, 3.0, "requests", "3_requests"),
    ],
)
def test_what_changed_has_its_unit_once(
    before: float | None, value: float, unit: str, said: str
) -> None:
    shown = re.sub("<[^>]+>", "", ui.change(before, value, unit)).replace("\u00a0", "_")
    assert shown == said


def test_a_threshold_of_zero_is_said_in_words() -> None:
    assert ui.limit(0, "1/s") == "more than 0"
    assert ui.limit(0.5, "ratio") == "50\u00a0%"
    assert ui.limit(None, "s") == "–"


def test_what_follows_a_full_stop_is_a_sentence_but_for_a_knobs_name() -> None:
    assert prose.as_sentence("service code is frozen") == "Service code is frozen."
    assert prose.as_sentence("max_num_seqs 8 → 24 could not be undone") == (
        "max_num_seqs 8 → 24 could not be undone."
    )


def test_targets_keep_the_digits_they_were_promised_with() -> None:
    assert [ui.target(t) for t in (0.9, 0.999, 0.99995)] == [f"90{S}%", f"99.9{S}%", f"99.995{S}%"]


def test_burn_rates() -> None:
    assert [ui.factor(v) for v in (14.4, 0.617, 113.2, None)] == ["14.4×", "0.62×", "113×", "–"]


def test_every_state_of_every_room_has_a_shape_and_a_word() -> None:
    for states in (ActionState, Verdict, Delivery.State, Incident.State, ObjectiveState):
        for state in states.values:
            kind, word = ui.STATES[state]
            assert kind in ("ok", "warn", "bad", "act", "none")
            assert str(word)


def test_times_are_utc_and_carry_the_instant() -> None:
    at = datetime(2026, 3, 1, 14, 2, 5, tzinfo=UTC)
    assert ">14:02:05</time>" in ui.clock(at)
    assert 'datetime="2026-03-01T14:02:05+00:00"' in ui.clock(at)
    assert '><span class="nobr">2026-03-01</span> 14:02</time>' in ui.moment(at)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, "–"),
        (0, "0\u00a0B"),
        (1023, "1\u202f023\u00a0B"),
        (46_300_000, "44.2\u00a0MiB"),
        (85_520_809_984, "79.6\u00a0GiB"),
        (2**60, "1\u202f048\u202f576\u00a0TiB"),
    ],
)
def test_sizes_have_three_figures(count: float | None, words: str) -> None:
    assert ui.size(count) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, "on"), (False, "off"), ("off", "off"), (2048, "2\u202f048"), (0.5, "0.5"), (None, "–")],
)
def test_a_setting_is_written_as_people_say_it(value: object, words: str) -> None:
    assert ui.setting(value) == words


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("no GPU", "no GPU"),
        ("no GPU: driver not loaded", "no GPU: driver not loaded"),
        ("hung for 9 s", "hung for 9 s"),
        ("", "no GPU reported"),
    ],
)
def test_a_missing_gpu_says_why(status: str, words: str) -> None:
    assert ui.gpu_status(status) == words
