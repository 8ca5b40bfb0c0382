"""The list of requests: search in the address, the heat map, page by page."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client

from controlplane.web.filters import BadFilter
from controlplane.web.heat import BOUNDS_S, heat, whole_windows
from controlplane.web.search import asked
from tests.controlplane.web.answers import text
from tests.controlplane.web.world import TRACE_ID, World, member, world
from tracing.types import HeatCell, StoreError, TraceSearch

NOW = datetime(2026, 3, 1, 12, 0, 7, tzinfo=UTC)


def ids(said: str) -> list[str]:
    """The traces listed, in order."""
    return re.findall(r'<a href="/traces/([0-9a-f]{32})/">', said)


def test_requests_are_listed_newest_first_with_where_their_time_went(ada: Any, full: World) -> None:
    said = text(ada(full).get("/traces/?q=0af7651916cd43dd"))
    assert ids(said) == [TRACE_ID]
    assert "cmpl-0af7651916cd43dd" in said
    assert "412 → 24" in said
    assert said.count('<rect class="queue"') == 1
    assert "1.76\u00a0s" in said


def test_a_request_that_broke_a_promise_is_listed_as_late(ada: Any, full: World) -> None:
    client, address = ada(full), "/traces/?q=0af7651916cd43dd"
    late, answered = (
        '<span class="chip bad">answered late</span>',
        '<span class="chip ok">answered</span>',
    )
    said = text(client.get(address))
    assert (late in said, answered in said) == (True, False)
    full.objectives["ttft"].delete()
    said = text(client.get(address))
    assert (late in said, answered in said) == (False, True)


def test_pages_follow_each_other_without_gap_or_repetition(ada: Any, full: World) -> None:
    client, address, seen = ada(full), "/traces/?minutes=60&sort=slowest", []
    for _page in range(4):
        said = text(client.get(address))
        seen.append(ids(said))
        following = re.search(r'rel="next" href="([^"]+)"', said)
        assert following is not None
        address = "/traces/" + following[1].replace("&amp;", "&")
    listed = [trace for found in seen for trace in found]
    assert len(listed) == len(set(listed)) == 200
    assert "after=" in address


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ("status=failed", "the client went away"),
        ("min_ms=900", "chat, engine-0"),
        ("service=chat", "chat, engine-0"),
        (f"q={TRACE_ID[:12]}", "cmpl-0af7651916cd43dd"),
    ],
)
def test_filters_come_back_in_the_form(ada: Any, full: World, filters: str, words: str) -> None:
    said = text(ada(full).get(f"/traces/?{filters}"))
    assert words in said
    value = filters.partition("=")[2]
    assert f'value="{value}"' in said or f"<option selected>{value}" in said
    assert ">Clear</a>" in said


def test_a_cell_of_the_heat_map_lists_just_its_requests(ada: Any, full: World) -> None:
    client = ada(full)
    said = text(client.get("/traces/?minutes=60"))
    cells = re.findall(r'<a href="(\?[^"]+)" tabindex="-1" aria-label="([^"]+)"', said)
    assert len(cells) > 60
    for href, words in cells[:: len(cells) // 12]:
        counted = re.search(r": (\d+) requests?", words)
        assert counted is not None
        assert len(ids(text(client.get("/traces/" + href.replace("&amp;", "&"))))) == int(
            counted[1]
        )


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        ("min_ms=soon", "min_ms=soon: allowed: 0 to 86400000 ms"),
        ("min_ms=nan", "min_ms=nan: allowed: 0 to 86400000 ms"),
        ("min_ms=5&max_ms=5", "max_ms=5: allowed: more than min_ms=5"),
        ("status=lost", "status=lost: allowed: answered, failed"),
        ("minutes=7", "minutes=7: allowed: 15, 60, 360, 1440"),
        ("sort=prettiest", "sort=prettiest: allowed: slowest"),
        ("since=1", "since=1: allowed: Unix seconds"),
        ("since=1767225600&until=1767225600", "until=1767225600: allowed: after"),
        ("after=page-2", "after=page-2: allowed: what the link to the next page holds"),
        ("q=" + "x" * 101, "allowed: 100 printable characters"),
        ("q=%00", "allowed: 100 printable characters"),
    ],
)
def test_a_filter_nobody_can_follow_is_named(
    ada: Any, empty: World, filters: str, reason: str
) -> None:
    said = text(ada(empty).get(f"/traces/?{filters}"), 400)
    assert 'role="alert"' in said
    assert reason in said
    assert ids(said) == []


def test_nothing_to_list_says_what_to_do(ada: Any, full: World) -> None:
    client = ada(world("other"))
    assert "trimtab engine --name engine-0" in text(client.get("/traces/"))
    assert "No request fits." in text(client.get("/traces/?status=failed"))
    after = f"after=1-{TRACE_ID}"
    assert "No more requests." in text(client.get(f"/traces/?{after}"))


def test_another_tenants_requests_are_not_listed(client: Client, full: World) -> None:
    client.force_login(member(world("other").tenant, "eve"))
    said = text(client.get(f"/traces/?q={TRACE_ID}"))
    assert ids(said) == []
    assert "chat" in said  # its own service of that name


def test_a_store_that_does_not_answer_is_said(
    ada: Any, full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_arguments: Any, **_more: Any) -> Any:
        raise StoreError("disk full")

    monkeypatch.setattr("tracing.store.chdb.ChdbStore.query", refuses)
    assert "Telemetry cannot be read just now." in text(ada(full).get("/traces/"), 503)


# --- pure -----------------------------------------------------------------------------------------


def test_a_search_without_filters_is_the_last_hour() -> None:
    found = asked({}, NOW)
    assert found.search == TraceSearch(NOW - timedelta(hours=1), NOW)
    assert (found.slowest, found.filtered, found.cut) == (False, False, False)


def test_a_search_says_which_value_it_cannot_read() -> None:
    with pytest.raises(BadFilter, match="max_ms=-1: allowed: 0 to 86400000 ms"):
        asked({"max_ms": "-1"}, NOW)


@pytest.mark.parametrize("minutes", [15, 60, 360, 1440])
def test_windows_of_the_heat_map_are_whole_seconds_and_reach_now(minutes: int) -> None:
    wanted = TraceSearch(NOW - timedelta(minutes=minutes), NOW)
    search, step_s = whole_windows(wanted)
    assert search.start <= wanted.start
    assert NOW <= search.end < NOW + timedelta(seconds=step_s)
    count = (search.end - search.start).total_seconds() / step_s
    assert count == round(count)
    assert 60 <= count <= 61


def test_a_heat_map_keeps_to_the_rows_in_use() -> None:
    search = TraceSearch(NOW - timedelta(seconds=60), NOW)
    cells = [HeatCell(0, 6, 1, 0), HeatCell(59, 8, 99, 3)]
    drawn = heat(search, 1.0, cells)
    assert drawn is not None
    assert (drawn.count, drawn.failures) == (100, 3)
    slow, fast = drawn.cells[1], drawn.cells[0]
    assert slow.level == 5 > fast.level
    assert slow.top < fast.top
    assert (fast.min_ms, fast.max_ms) == ("50", "100")
    assert drawn.height == 6 * drawn.row_height
    assert len(drawn.edges_ms.split()) == 7
    assert heat(search, 1.0, []) is None


def test_a_request_longer_than_every_bound_has_its_row() -> None:
    search = TraceSearch(NOW - timedelta(seconds=60), NOW)
    drawn = heat(search, 1.0, [HeatCell(3, len(BOUNDS_S), 1, 1)])
    assert drawn is not None
    assert drawn.cells[0].max_ms is None
    assert drawn.edges_ms.split()[0] == "-"
