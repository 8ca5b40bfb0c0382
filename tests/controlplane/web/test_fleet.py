"""Fleet and node: what is out there, how it is set, by whom, and where it drifts."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from controlplane.fleet.models import Command, Engine, Node
from controlplane.fleet.services import command_create, sync
from controlplane.web.knobs import configuration
from tests.controlplane.web.answers import text
from tests.controlplane.web.measured import RESOURCE, pairs, send_metrics
from tests.controlplane.web.world import World, heartbeat, world


def told(made: World, value: int = 32) -> Command:
    """A change of max_num_seqs that the agent has carried out."""
    command = command_create(
        engine=made.engine, action_id=made.tenant.pk, kind="apply", values={"max_num_seqs": value},
        undo={"max_num_seqs": 8}, expected_config_version=7, ttl_s=90,
        deadline=made.now + timedelta(seconds=30),
    )  # fmt: skip
    command.result_state, command.result_at = "applied", made.now
    command.save()
    return command


def turned(made: World, value: int, by: str) -> Engine:
    """A person's hand on the knob, as the agent reads it back."""
    at = made.now + timedelta(seconds=2)
    values = {**made.engine.values, "max_num_seqs": value}
    request = heartbeat(
        at, config_version=8, values=values, changed_by=by, changed_at=at.isoformat()
    )
    sync(tenant=made.tenant, request=request, now=at)
    return Engine.objects.get(pk=made.engine.pk)


def test_the_fleet_lists_nodes_with_gpu_engines_and_configuration(ada: Any, empty: World) -> None:
    client = ada(empty)
    said = text(client.get("/fleet/"))
    for words in ("1 node, 1 engine, 1 GPU", "NVIDIA H100 80GB HBM3", "nothing commanded yet"):
        assert words in said
    told(empty)
    assert "as commanded" in text(client.get("/fleet/"))
    turned(empty, 24, "cli/ada")
    assert "1 knob drifts" in text(client.get("/fleet/"))


def test_a_node_without_gpu_says_why(ada: Any, empty: World) -> None:
    Node.objects.update(gpus=[], gpu_status="no GPU: NVML library not found")
    client = ada(empty)
    for address in ("/fleet/", "/fleet/node-a/"):
        assert "no GPU: NVML library not found" in text(client.get(address))


def test_a_node_shows_knobs_with_bounds_class_and_who_set_them(ada: Any, empty: World) -> None:
    turned(empty, 48, "cli/ada")
    said = text(ada(empty).get("/fleet/node-a/"))
    assert "cli/ada" in said
    assert "32 → 48" in said
    assert "48 of 1 to 256" in said  # the drawing, in words
    assert "not supported on this device" in said
    assert "between steps" in said
    assert said.count("unchanged so far") == 5


def test_who_set_a_knob_is_said_in_words_and_leads_to_the_action(ada: Any, empty: World) -> None:
    command = told(empty)
    turned(empty, 48, f"trimtab-agent revert {command.pk}")
    client = ada(empty)
    said = text(client.get("/fleet/node-a/"))
    assert "trimtab-agent" not in said
    link = f'href="/actions/?engine=engine-0#action-{command.action_id}"'
    assert f"{link}>Trimtab, taking a change back</a>" in said
    assert "configuration 8 by Trimtab, taking a change back" in said
    assert "trimtab-agent" not in text(client.get("/fleet/"))


def test_drift_is_told_as_a_story(ada: Any, empty: World) -> None:
    told(empty)
    turned(empty, 24, "cli/ada")
    said = text(ada(empty).get("/fleet/node-a/"))
    assert "runs 24, told was 32" in said
    assert "because it was turned by" in said


def test_an_unreachable_engine_says_what_its_agent_heard(ada: Any, empty: World) -> None:
    Engine.objects.update(reachable=False, error="connection refused")
    said = text(ada(empty).get("/fleet/node-a/"))
    assert "The agent cannot read it." in said
    assert "connection refused" in said


def test_an_empty_fleet_says_what_to_type(ada: Any, empty: World) -> None:
    Node.objects.all().delete()
    assert "trimtab agent --node node-a" in text(ada(empty).get("/fleet/"))


def test_another_tenants_node_is_not_found(ada: Any, empty: World) -> None:
    other = world("other")
    Node.objects.filter(tenant=other.tenant).update(name="node-z")
    client = ada(empty)
    assert client.get("/fleet/node-z/").status_code == 404
    assert "node-z" not in text(client.get("/fleet/"))


def test_queries_do_not_grow_with_nodes(ada: Any, empty: World) -> None:
    client = ada(empty)

    def cost() -> int:
        with CaptureQueriesContext(connection) as queries:
            text(client.get("/fleet/"))
        return len(queries)

    once = cost()
    for i in range(5):
        node = Node.objects.create(tenant=empty.tenant, agent_id=f"b-{i}", name=f"node-{i}")
        Engine.objects.create(tenant=empty.tenant, node=node, name=f"engine-{i + 1}", service="x")
    assert cost() == once


@pytest.mark.parametrize(
    ("knob", "at"),
    [
        ({"value": 16, "minimum": 1, "maximum": 256}, 0.5),
        ({"value": 25, "minimum": 0, "maximum": 50}, 0.5),
        ({"value": 999, "minimum": 0, "maximum": 50}, 1.0),
        ({"value": 0, "minimum": 1, "maximum": 256}, 0.0),
        ({"value": "on", "choices": ["on", "off"]}, None),
        ({"value": 5, "minimum": 5, "maximum": 5}, None),
        ({"value": True, "minimum": 0, "maximum": 1}, None),
        ({"value": 3, "minimum": "1", "maximum": None}, None),
        ("broken", None),
    ],
)
def test_a_knob_stands_where_its_value_lies_within_the_bounds(knob: Any, at: Any) -> None:
    (row,) = configuration(Engine(knobs={"k": knob}), []).rows
    assert row.at == pytest.approx(at)


# --- cells by a measure --------------------------------------------------------------------------


def test_cells_are_coloured_by_what_was_measured(ada: Any, full: World) -> None:
    client = ada(full)
    said = text(client.get("/fleet/"))
    assert 'class="reading' not in said
    said = text(client.get("/fleet/?measure=running"))
    engine, gpu = (cell for cell in said.split('class="cell"')[1:3])
    share = re.search(r'class="l([1-5])" width="100%" y="([\d.]+)%" height="([\d.]+)%"', engine)
    assert share is not None
    running = int(re.search(r'reading num">(\d+)<', engine)[1])  # type: ignore[index]
    cap = full.engine.values["max_num_seqs"]
    assert abs(float(share[3]) - 100 * running / cap) < 100 / cap
    assert "reading muted" in gpu, "what is measured of engines says nothing of a GPU"
    assert "reading muted" in text(client.get("/fleet/?measure=kv")).split('class="cell"')[1]
    assert "measure=running" in text(client.get("/fleet/?measure=running&part=all"))


def test_what_an_engine_cannot_have_is_no_reading(ada: Any, empty: World) -> None:
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    resource.resource.attributes.extend(pairs(RESOURCE))
    for metric in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        points = resource.scope_metrics.add().metrics.add(name=metric).gauge.data_points
        at = int(empty.now.timestamp() * 1e9) - 2_000_000_000
        points.add(time_unix_nano=at, as_double=math.inf)
    send_metrics(empty, request.SerializeToString())
    client = ada(empty)
    for slug in ("running", "waiting"):
        assert 'class="reading num"' not in text(client.get(f"/fleet/?measure={slug}"))


def test_a_measure_nobody_knows_is_not_there(ada: Any, empty: World) -> None:
    assert ada(empty).get("/fleet/?measure=beauty").status_code == 404


def test_measures_are_the_tenants_own(ada: Any, full: World) -> None:
    said = text(ada(world("other"), "eve").get("/fleet/?measure=running"))
    assert 'class="reading num"' not in said
