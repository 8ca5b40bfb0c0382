"""Nodes, engines as their agents read them back, and the commands agents fetch."""

from __future__ import annotations

import uuid

from django.db import models

from controlplane.accounts.models import Tenant
from gpu_agent.protocol import CommandKind


class Node(models.Model):
    """A host with an agent. `gpu_status` is "ok" or says why there is no reading ("no GPU: …").

    `sent_at` is the agent's own time of the newest heartbeat heard: an older one changes nothing.
    `kill_switch`: the node's stop file exists, so its agent lets nothing be changed.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="nodes")
    agent_id = models.CharField(max_length=64)
    name = models.CharField(max_length=100)
    boot_id = models.CharField(max_length=64, blank=True)
    agent_version = models.CharField(max_length=32, blank=True)
    gpus = models.JSONField(default=list, blank=True)
    gpu_status = models.CharField(max_length=200, blank=True)
    spool_bytes = models.BigIntegerField(default=0)
    spool_dropped_total = models.BigIntegerField(default=0)
    agent_cpu_seconds = models.FloatField(default=0)
    agent_rss_bytes = models.BigIntegerField(default=0)
    clock_skew_s = models.FloatField(default=0)
    kill_switch = models.BooleanField(default=False)
    sent_at = models.DateTimeField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    stopped_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "agent_id"], name="agent_once")]

    def __str__(self) -> str:
        return self.name


class Engine(models.Model):
    """One serving process. `values` are what was read back, never what was last commanded.

    `knobs` is the engine's own table: name → {value, unit, minimum, maximum, apply_class}.
    `set_by` says who last set a knob, as far as it was seen to move: name → {by, at, from, version,
    versions}. More than one of `versions` passed between two looks: it may have been another hand.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="engines")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="engines")
    name = models.CharField(max_length=100)
    service = models.CharField(max_length=100)
    adapter = models.CharField(max_length=40)
    url = models.CharField(max_length=300)
    model = models.CharField(max_length=100, blank=True)
    reachable = models.BooleanField(default=False)
    error = models.CharField(max_length=300, blank=True)
    config_version = models.BigIntegerField(null=True, blank=True)
    values = models.JSONField(default=dict, blank=True)
    knobs = models.JSONField(default=dict, blank=True)
    changed_by = models.CharField(max_length=100, blank=True)
    changed_at = models.DateTimeField(null=True, blank=True)
    set_by = models.JSONField(default=dict, blank=True)
    generation = models.BigIntegerField(default=0)
    last_seen_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="engine_name")]

    def __str__(self) -> str:
        return self.name


class Command(models.Model):
    """An order to an agent, offered at every sync until its result is final.

    `action_id` is plain: fleet stands below actions. `result_state` holds the agent's last word
    (gpu_agent.protocol.CommandState), empty until it spoke.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="commands")
    engine = models.ForeignKey(Engine, on_delete=models.CASCADE, related_name="commands")
    action_id = models.UUIDField(db_index=True)
    kind = models.CharField(max_length=10, choices=[(k.value, k.value) for k in CommandKind])
    generation = models.BigIntegerField()
    target_command_id = models.UUIDField(null=True, blank=True)
    values = models.JSONField(default=dict, blank=True)
    undo = models.JSONField(default=dict, blank=True)
    expected_config_version = models.BigIntegerField(null=True, blank=True)
    ttl_s = models.FloatField(default=90)
    deadline = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    offered_at = models.DateTimeField(null=True, blank=True)
    offers = models.PositiveIntegerField(default=0)
    result_state = models.CharField(max_length=12, blank=True)
    result_at = models.DateTimeField(null=True, blank=True)
    result = models.JSONField(default=dict, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["action_id", "kind"], name="one_command_per_kind"),
            models.UniqueConstraint(fields=["engine", "generation"], name="generation_once"),
        ]
        indexes = [models.Index(fields=["engine", "finished_at"], name="command_open")]

    def __str__(self) -> str:
        return f"{self.kind} {self.engine} g{self.generation}"
