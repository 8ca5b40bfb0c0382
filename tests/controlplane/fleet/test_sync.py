from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import tenant_create
from controlplane.fleet import limits
from controlplane.fleet.models import Command, Engine, Node
from controlplane.fleet.services import FleetConflict, prune, sync
from gpu_agent.protocol import CommandState, SyncReply, SyncRequest, WireError
from tests.controlplane.fleet.agent_side import (
    GENERATION,
    START,
    an_apply,
    an_engine,
    heartbeat,
    report,
    result,
)
from tests.kills import killed_at_every_statement

pytestmark = pytest.mark.django_db
SECOND = timedelta(seconds=1)


def test_a_heartbeat_makes_the_node_and_its_engines_known(tenant: Tenant) -> None:
    request = heartbeat(gpu_status="no GPU: no driver", spool_bytes=5, rss_bytes=9)
    reply = sync(tenant=tenant, request=request, now=START + SECOND)
    assert (reply.commands, reply.accepted_results, reply.poll_after_s) == ([], [], 2)
    assert reply.server_time == (START + SECOND).isoformat()
    node, engine = Node.objects.get(), Engine.objects.get()
    assert (node.name, node.gpu_status, node.spool_bytes) == ("node-0", "no GPU: no driver", 5)
    assert (node.clock_skew_s, node.last_seen_at) == (-1, START + SECOND)
    assert (engine.service, engine.config_version, engine.values) == (
        "chat", 7, {"max_num_seqs": 32},
    )  # fmt: skip


def test_an_unreachable_engine_keeps_what_was_last_read(tenant: Tenant) -> None:
    an_engine(tenant)
    gone = report(
        reachable=False, config_version=None, values={}, knobs={}, model="", error="x" * 999
    )
    later = START + SECOND
    sync(tenant=tenant, request=heartbeat(later, engines=[gone]), now=later)
    engine = Engine.objects.get()
    assert (engine.reachable, engine.config_version, engine.model) == (False, 7, "llama-1.3m")
    assert engine.values == {"max_num_seqs": 32}
    assert engine.last_seen_at == START
    assert len(engine.error) == limits.ERROR_CHARS_MAX


def test_an_overtaken_heartbeat_changes_no_fact_but_its_results_count(tenant: Tenant) -> None:
    command = an_apply(an_engine(tenant))
    newer = heartbeat(START + 2 * SECOND, engines=[report(config_version=8)])
    sync(tenant=tenant, request=newer, now=START + 2 * SECOND)
    older = heartbeat(
        START + SECOND, results=[result(command, CommandState.APPLIED)], stopping=True
    )
    reply = sync(tenant=tenant, request=older, now=START + 3 * SECOND)
    assert reply.accepted_results == [str(command.pk)]
    assert Engine.objects.get().config_version == 8
    assert Node.objects.get().stopped_at is None
    assert Node.objects.get().last_seen_at == START + 3 * SECOND


def test_a_clock_set_back_is_news_again(tenant: Tenant) -> None:
    an_engine(tenant)
    back = START - timedelta(hours=1)
    sync(tenant=tenant, request=heartbeat(back, engines=[report(config_version=9)]), now=START)
    assert Engine.objects.get().config_version == 9
    assert Node.objects.get().clock_skew_s == -3_600


def test_a_command_is_offered_until_its_result_is_final(tenant: Tenant) -> None:
    command = an_apply(an_engine(tenant))
    at = START

    def poll(state: CommandState | None) -> SyncReply:
        nonlocal at
        at += SECOND
        results = [result(command, state, at)] if state else []
        return sync(tenant=tenant, request=heartbeat(at, results=results), now=at)

    (offered,) = poll(None).commands
    assert offered.command_id == str(command.pk)
    assert (offered.values, offered.undo) == ({"max_num_seqs": 64}, {"max_num_seqs": 32})
    assert (offered.expected_config_version, offered.generation) == (7, GENERATION + 1)
    for state in (CommandState.RECEIVED, CommandState.APPLYING):
        reply = poll(state)
        assert [c.command_id for c in reply.commands] == [str(command.pk)]
        assert reply.accepted_results == []
    done = poll(CommandState.APPLIED)
    assert (done.commands, done.accepted_results) == ([], [str(command.pk)])
    command.refresh_from_db()
    assert (command.offers, command.offered_at) == (3, START + SECOND)
    assert command.finished_at == at
    assert command.result["state"] == "applied"


def test_commands_come_in_order_of_generation(tenant: Tenant) -> None:
    engine = an_engine(tenant)
    made = [an_apply(engine) for _ in range(3)]
    reply = sync(tenant=tenant, request=heartbeat(START + SECOND), now=START + SECOND)
    assert [c.command_id for c in reply.commands] == [str(c.pk) for c in made]
    assert [c.generation - GENERATION for c in reply.commands] == [1, 2, 3]


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        (["applied", "applying", "received"], "applied"),
        (["applied", "applied"], "applied"),
        (["rejected", "applying"], "rejected"),
        (["applied", "reverted", "applied"], "reverted"),
        (["failed", "rejected"], "failed"),
        (["reverted", "committed"], "reverted"),
    ],
)
def test_a_result_never_goes_back(tenant: Tenant, told: list[str], believed: str) -> None:
    command = an_apply(an_engine(tenant))
    for seconds, state in enumerate(told, start=1):
        at = START + seconds * SECOND
        words = result(command, CommandState(state), at, reason=state)
        sync(tenant=tenant, request=heartbeat(at, results=[words]), now=at)
    command.refresh_from_db()
    assert (command.result_state, command.result["reason"]) == (believed, believed)
    assert command.finished_at == START + SECOND


def test_a_trial_undone_by_its_timer_is_told_after_it_was_applied(tenant: Tenant) -> None:
    command = an_apply(an_engine(tenant))
    for seconds, state in ((1, CommandState.APPLIED), (95, CommandState.REVERTED)):
        at = START + seconds * SECOND
        words = result(command, state, at, reason="ttl" if seconds > 1 else "")
        reply = sync(tenant=tenant, request=heartbeat(at, results=[words]), now=at)
        assert reply.accepted_results == [str(command.pk)]
    command.refresh_from_db()
    assert (command.result_state, command.result["reason"]) == ("reverted", "ttl")


def test_a_result_of_an_unknown_command_may_be_forgotten(
    tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    command = an_apply(an_engine(tenant))
    words = result(command, CommandState.APPLIED)
    command.delete()
    reply = sync(tenant=tenant, request=heartbeat(results=[words]), now=START)
    assert reply.accepted_results == [words.command_id]
    assert "result of unknown command" in caplog.text


def test_another_tenants_command_is_unknown(tenant: Tenant) -> None:
    other = tenant_create(slug="other", name="Other")
    command = an_apply(an_engine(other))
    words = result(command, CommandState.APPLIED)
    reply = sync(tenant=tenant, request=heartbeat(results=[words]), now=START)
    assert reply.commands == []
    command.refresh_from_db()
    assert command.result_state == ""


def snapshot() -> list[object]:
    """All that a sync writes, without the count of offers, which may be larger."""
    columns = [f.attname for f in Command._meta.concrete_fields if f.attname != "offers"]
    return [*Node.objects.values(), *Engine.objects.values(), *Command.objects.values(*columns)]


def test_a_kill_between_any_two_statements_leaves_nothing_half_done(tenant: Tenant) -> None:
    first, _second = an_apply(engine := an_engine(tenant)), an_apply(engine)
    at = START + SECOND
    request = heartbeat(
        at, engines=[report(config_version=8)], results=[result(first, CommandState.APPLIED)]
    )
    reply, deaths = killed_at_every_statement(
        lambda: sync(tenant=tenant, request=request, now=at), snapshot
    )
    assert deaths > 5
    assert len(reply.commands) == 1
    after = snapshot()
    again = sync(tenant=tenant, request=request, now=at)
    assert dataclasses.asdict(again) == dataclasses.asdict(reply)
    assert snapshot() == after


def test_one_agent_id_on_two_living_hosts_is_a_conflict(tenant: Tenant) -> None:
    an_engine(tenant)
    clone = heartbeat(START + SECOND, node="node-1", boot_id="boot-2", engines=[])
    with pytest.raises(FleetConflict, match=r"agent_id='a-1' of node 'node-1' .* by node 'node-0'"):
        sync(tenant=tenant, request=clone, now=START + SECOND)
    assert Node.objects.get().boot_id == "boot-1"


@pytest.mark.parametrize("stopping", [True, False])
def test_a_host_that_rebooted_is_the_same_agent(tenant: Tenant, stopping: bool) -> None:
    an_engine(tenant)
    at = START + SECOND
    sync(tenant=tenant, request=heartbeat(at, stopping=stopping), now=at)
    at += SECOND if stopping else limits.LATE_AFTER + SECOND
    sync(tenant=tenant, request=heartbeat(at, boot_id="boot-2"), now=at)
    node = Node.objects.get()
    assert (node.boot_id, node.stopped_at) == ("boot-2", None)


def test_an_engine_of_another_living_node_is_a_conflict_and_moves_once_that_is_gone(
    tenant: Tenant,
) -> None:
    engine = an_engine(tenant)
    at = START + SECOND
    other = heartbeat(at, agent_id="a-2", node="node-1")
    with pytest.raises(FleetConflict, match="engine 'engine-0' of node 'node-1' is reported by"):
        sync(tenant=tenant, request=other, now=at)
    assert Node.objects.count() == 1
    at = START + limits.LATE_AFTER + SECOND
    sync(tenant=tenant, request=dataclasses.replace(other, sent_at=at.isoformat()), now=at)
    engine.refresh_from_db()
    assert engine.node.name == "node-1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 2}, "SyncRequest.protocol: got 2, want 1"),
        ({"agent_id": ""}, "SyncRequest.agent_id: got '', allowed: 1 to 64 characters"),
        ({"node": "n" * 101}, "SyncRequest.node: got 'n{100}…', allowed: 1 to 100 characters"),
        ({"sent_at": "yesterday"}, "SyncRequest.sent_at: got 'yesterday', want an RFC 3339 time"),
        ({"sent_at": "2026-03-01T00:00:00"}, "SyncRequest.sent_at: got .* with its zone"),
        ({"spool_bytes": -1}, "SyncRequest.spool_bytes: got -1, allowed: 0 to"),
        ({"engines": [report(), report()]}, r"engines\[1\].name: got 'engine-0' a second time"),
        ({"engines": [report(url="")]}, r"engines\[0\].url: got '', allowed: 1 to 300"),
        ({"engines": [report(str(i)) for i in range(65)]}, "engines: got 65, allowed: at most 64"),
        ({"gpus": [{}] * 65}, "SyncRequest.gpus: got 65, allowed: at most 64"),
    ],
)
def test_a_message_over_its_limits_is_refused_whole(
    tenant: Tenant, changes: dict[str, Any], words: str
) -> None:
    request: SyncRequest = heartbeat(**changes)
    with pytest.raises(WireError, match=words):
        sync(tenant=tenant, request=request, now=START)
    assert not Node.objects.exists()


def test_a_tenant_has_so_many_nodes_and_a_node_so_many_engine_names(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NODES_PER_TENANT_MAX", 1)
    monkeypatch.setattr(limits, "ENGINES_KNOWN_PER_NODE_MAX", 1)
    an_engine(tenant)
    with pytest.raises(FleetConflict, match="one node more than the 1"):
        sync(tenant=tenant, request=heartbeat(agent_id="a-2", engines=[]), now=START)
    with pytest.raises(FleetConflict, match="one more than the 1 names"):
        sync(tenant=tenant, request=heartbeat(engines=[report("engine-1")]), now=START)
    assert (Node.objects.count(), Engine.objects.count()) == (1, 1)


def test_what_was_not_heard_of_for_so_long_is_forgotten_and_may_come_back(tenant: Tenant) -> None:
    done = an_apply(an_engine(tenant))
    Command.objects.filter(pk=done.pk).update(finished_at=START)
    renamed = heartbeat(START + SECOND, engines=[report("engine-1")])
    sync(tenant=tenant, request=renamed, now=START + SECOND)
    assert prune(START) == 0
    assert prune(START + SECOND) == 2  # the command and the engine under its old name
    assert prune(START + 2 * SECOND) == 2
    assert not Node.objects.exists()
    back = START + timedelta(days=40)
    sync(tenant=tenant, request=heartbeat(back), now=back)
    again = an_apply(Engine.objects.get())
    assert again.generation > done.generation
