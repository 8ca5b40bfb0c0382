from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session
from django.db import transaction
from django.test import AsyncClient, Client
from pytest_django import DjangoAssertNumQueries

from controlplane.accounts.members import member_deactivate
from controlplane.accounts.models import Membership
from controlplane.accounts.selectors import tenants_of_sessions
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine
from controlplane.web import live
from slo.budget import Counts
from slo.readings import Measured, readings_book
from tests.controlplane.web.measured import judge, send, windows
from tests.controlplane.web.story import incident
from tests.controlplane.web.world import World, member, world
from tracing.types import Signal

WAIT_S = 20.0  # generous: the machine may be busy; what is told comes within about a second

pytestmark = pytest.mark.django_db(transaction=True)


async def messages(answer: Any) -> AsyncIterator[tuple[str, str]]:
    """(event, data) of each message; the retry line comes as ("retry", …)."""
    async for chunk in answer.streaming_content:
        lines = dict(line.split(": ", 1) for line in chunk.decode().strip().splitlines())
        if "retry" in lines:
            yield "retry", lines["retry"]
        elif "event" in lines:
            yield lines["event"], lines["data"]


def signed_in(made: World) -> str:
    """The key of a session that sees the tenant's pages."""
    client = Client()
    client.force_login(member(made.tenant))
    return str(client.session.session_key)


def watch(made: World, change: Callable[[], Any], *, until: str) -> list[tuple[str, str]]:
    """What a page hears from opening to the first `until` message after `change` was written."""

    async def go() -> list[tuple[str, str]]:
        client = AsyncClient()
        await client.aforce_login(await asyncio.to_thread(member, made.tenant))
        answer = await client.get("/events/")
        assert answer.status_code == 200
        assert answer["X-Accel-Buffering"] == "no"
        assert answer["Content-Type"].startswith("text/event-stream")
        heard = []
        async with asyncio.timeout(WAIT_S):
            stream = messages(answer)
            async for event, data in stream:
                heard.append((event, data))
                if event == "ready":
                    await asyncio.to_thread(change)
                if f"{event} {data}".startswith(until):
                    break
            await stream.aclose()
        return heard

    return asyncio.run(go())


def test_a_page_hears_which_part_changed() -> None:
    made = world()
    heard = watch(made, lambda: incident(made), until="changed actions")
    assert heard[0] == ("retry", "2000")
    assert heard[1] == ("ready", "objectives incidents actions deliveries fleet")
    assert ("changed", "incidents") in heard


def test_a_new_reading_brings_the_newest_chart_points() -> None:
    made = world()
    judge(made)
    send(made)
    end = windows(made)[-1] + timedelta(seconds=15)

    def read_on() -> None:
        one = Measured(end, Counts(90, 100), Signal.OK)
        readings_book(objective=made.objectives["ttft"], scope="", window_s=15.0, measured=[one])

    heard = watch(made, read_on, until="point")
    assert ("changed", "objectives") in heard
    point = json.loads(heard[-1][1])
    assert point["objective"] == "ttft"
    assert point["at"] == end.timestamp()
    assert point["values"]["bad"] == [10.0]


def test_a_page_hears_nothing_of_another_tenant() -> None:
    made, other = world(), world("other")

    def change() -> None:
        with transaction.atomic():
            incident(other)
            Incident.objects.create(
                tenant=made.tenant, objective=made.objectives["tpot"], trigger="two windows",
                bad_since=made.now, opened_at=made.now,
            )  # fmt: skip

    heard = watch(made, change, until="changed incidents")
    assert ("changed", "actions") not in heard
    assert ("changed", "deliveries") not in heard


def test_a_look_costs_seven_queries_however_many_engines(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    made = world()
    for name in ("engine-1", "engine-2"):
        Engine.objects.create(tenant=made.tenant, node=made.engine.node, name=name)
    with django_assert_num_queries(7):
        live.stamps_read([made.tenant.pk], made.now)


def test_strangers_get_no_stream() -> None:
    async def go() -> int:
        return int((await AsyncClient().get("/events/")).status_code)

    assert asyncio.run(go()) == 403


def test_pages_share_one_poller_and_leave_nothing_behind() -> None:
    made = world()
    key = signed_in(made)

    async def go() -> tuple[int, int, bool]:
        hub = live.hub()
        streams = [hub.stream(made.tenant.pk, key) for _ in range(50)]
        async with asyncio.timeout(WAIT_S):
            for stream in streams:
                assert (await anext(stream)).startswith("retry")
                assert (await anext(stream)).startswith("event: ready")
            pages, poller = hub.pages, hub._poller
            waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.to_thread(incident, made)
            assert {text.split("\n")[0] for text in await asyncio.gather(*waiting)} == {
                "event: changed"
            }
            same = hub._poller is poller
            for stream in streams:
                await stream.aclose()
        return pages, hub.pages, same

    assert asyncio.run(go()) == (50, 0, True)


def test_closing_the_hub_ends_every_stream() -> None:
    made = world()
    key = signed_in(made)

    async def go() -> list[str]:
        hub = live.hub()
        stream = hub.stream(made.tenant.pk, key)
        async with asyncio.timeout(WAIT_S):
            await anext(stream)
            await anext(stream)
            rest = asyncio.ensure_future(_all(stream))
            await asyncio.sleep(0)
            hub.close()
            return await rest

    assert asyncio.run(go()) == []


async def _all(stream: AsyncIterator[str]) -> list[str]:
    return [text async for text in stream]


def test_a_page_that_lags_too_far_behind_is_told_to_connect_again() -> None:
    made = world()
    key = signed_in(made)

    async def go() -> list[str]:
        hub = live.hub()
        stream = hub.stream(made.tenant.pk, key)
        async with asyncio.timeout(WAIT_S):
            await anext(stream)
            await anext(stream)
            for _ in range(live.QUEUE_MAX + 1):
                hub._tell(made.tenant.pk, live.message("changed", "fleet"))
            return await _all(stream)

    assert asyncio.run(go()) == []


def test_a_stream_ends_in_time_to_be_asked_again_who_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world()
    key = signed_in(made)
    monkeypatch.setattr(live, "STREAM_S_MAX", 0.2)

    async def go() -> list[str]:
        async with asyncio.timeout(WAIT_S):
            return await _all(live.hub().stream(made.tenant.pk, key))

    said = asyncio.run(go())
    assert said[0].startswith("retry")
    assert said[-1] == ": still here\n\n"


def test_a_failed_look_does_not_end_the_looking(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = world()
    key = signed_in(made)
    monkeypatch.setattr(live, "POLL_S", 0.05)
    real, fails = live.stamps_read, 2

    def stamps_read(*args: Any) -> Any:
        nonlocal fails
        if hub_open and fails:
            fails -= 1
            raise ValueError("a bug of ours")
        return real(*args)

    hub_open = False
    monkeypatch.setattr(live, "stamps_read", stamps_read)

    async def go() -> str:
        nonlocal hub_open
        async with asyncio.timeout(WAIT_S):
            stream = live.hub().stream(made.tenant.pk, key)
            await anext(stream)
            await anext(stream)
            hub_open = True
            await asyncio.to_thread(incident, made)
            told = await anext(stream)
            await stream.aclose()
        return told

    assert asyncio.run(go()).startswith("event: changed")
    assert caplog.text.count("what changed could not be read") == 2


def signs_out(made: World) -> None:
    ada = get_user_model().objects.get(username="ada")
    for session in Session.objects.all():
        if session.get_decoded()["_auth_user_id"] == str(ada.pk):
            session.delete()


def is_deactivated(made: World) -> None:
    owner = member(made.tenant, "owner", role=Membership.Role.OWNER)
    assert owner.has_usable_password()
    ada = Membership.objects.get(user__username="ada")
    member_deactivate(member=ada, actor="owner", now=made.now)


def is_taken_out(made: World) -> None:
    Membership.objects.filter(user__username="ada").delete()


def changes_the_password_elsewhere(made: World) -> None:
    ada = get_user_model().objects.get(username="ada")
    ada.set_password("another tide, another time")
    ada.save()


@pytest.mark.parametrize(
    "leaves", [signs_out, is_deactivated, is_taken_out, changes_the_password_elsewhere]
)
def test_the_stream_of_who_may_see_no_more_ends_within_seconds(
    leaves: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world()
    monkeypatch.setattr(live, "POLL_S", 0.05)
    monkeypatch.setattr(live, "ASK_S", 0.1)

    async def go() -> tuple[str, str]:
        client, guest = AsyncClient(), AsyncClient()
        await client.aforce_login(await asyncio.to_thread(member, made.tenant))
        await guest.aforce_login(await asyncio.to_thread(member, made.tenant, "bob"))
        streams = [messages(await one.get("/events/")) for one in (client, guest)]
        async with asyncio.timeout(WAIT_S):
            for stream in streams:
                assert [await anext(stream), await anext(stream)][1][0] == "ready"
            ends = asyncio.ensure_future(_rest(streams[0]))
            await asyncio.sleep(0.5)
            assert not ends.done()
            await asyncio.to_thread(leaves, made)
            await ends
            await asyncio.to_thread(incident, made)
            told = await anext(streams[1])
            await streams[1].aclose()
        return told

    assert asyncio.run(go())[0] == "changed", "and nobody else's"


async def _rest(stream: AsyncIterator[tuple[str, str]]) -> None:
    async for _message in stream:
        pass


def test_who_listens_is_asked_in_three_queries(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    made = world()
    keys = [signed_in(made)]
    for name in ("bob", "eve"):
        client = Client()
        client.force_login(member(made.tenant, name))
        keys.append(str(client.session.session_key))
    with django_assert_num_queries(3):
        known = tenants_of_sessions([*keys, "", "unknown"])
    assert known == dict.fromkeys(keys, made.tenant.pk)
