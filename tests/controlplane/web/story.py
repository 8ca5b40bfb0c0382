"""The world's incident as the loop leaves it: explained, told, acted on, and how that ends."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

from controlplane.actions.models import Action, State, Transition, Verdict
from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.models import Diagnosis, Evidence, Incident
from slo.indicator import REQUESTS
from slo.models import Reading
from tests.controlplane.web.measured import lateness, windows
from tests.controlplane.web.world import TRACE_ID, World

BECAUSE = (
    "31 requests wait behind a cap of 8 running, and 73 % of the time to the first token is queue"
)
STEPS = (
    (State.PROPOSED, 0, "autopilot", "raise max_num_seqs to cover running and waiting"),
    (State.APPROVED, 0, "autopilot", "within bounds, hot, one step of two"),
    (State.DISPATCHED, 1, "loop", ""),
    (State.ACKNOWLEDGED, 3, "agent node-a", "journaled"),
    (State.APPLIED, 4, "agent node-a", "read back: max_num_seqs 32, version 8"),
    (State.VERIFYING, 5, "loop", "skipping one control window"),
)


def incident(world: World, *, until: State = State.VERIFYING, closed: bool = False) -> Incident:
    """The TTFT incident with its explanation, its action as far as `until`, and its message."""
    now, tenant = world.now, world.tenant
    opened = now - timedelta(minutes=3, seconds=20)
    found = Incident.objects.create(
        tenant=tenant, objective=world.objectives["ttft"], scope="engine-0", trigger="two windows",
        bad_since=opened - timedelta(seconds=32), opened_at=opened, bad_events=184,
        total_events=412, example_trace_id=TRACE_ID,
        state="closed" if closed else "open",
        closed_at=now - timedelta(seconds=40) if closed else None,
    )  # fmt: skip
    explain(world, found, opened + timedelta(seconds=1))
    act(world, found, opened + timedelta(seconds=2), until)
    channel, _made = Channel.objects.get_or_create(
        tenant=tenant, name="chat-oncall", url="http://127.0.0.1:8300/hook"
    )
    what = "184 of 412 requests missed “First token within 500 ms” on engine-0"
    Delivery.objects.create(
        tenant=tenant, channel=channel, incident=found, state="sent", attempts=1, last_status=200,
        message={"title": what, "what": f"{what}.", "text": f"{what}. {BECAUSE}."},
        next_try_at=opened, created_at=opened + timedelta(seconds=1),
        sent_at=opened + timedelta(seconds=3),
    )  # fmt: skip
    return found


def explain(world: World, found: Incident, at: datetime) -> Diagnosis:
    rival = {
        "cause": "batch_too_large", "score": 0.12,
        "because": "a step takes 31 ms, as long as before",
    }  # fmt: skip
    diagnosis = Diagnosis.objects.create(
        incident=found, made_at=at, cause="running_cap_too_small", score=0.91, because=BECAUSE,
        rivals=[rival], remedy=[{"knob": "max_num_seqs", "to": 39, "why": "running + waiting"}],
        window_start=found.bad_since, window_end=at,
    )  # fmt: skip

    def fact(cause: str, supports: bool, sentence: str, scale: tuple[float, float], **columns: Any):
        points = [
            (end.timestamp(), None if i == 9 else scale[0] + scale[1] * lateness(world, end))
            for i, end in enumerate(windows(world, 12)[:44])
        ]
        Evidence.objects.create(
            diagnosis=diagnosis, cause=cause, supports=supports, sentence=sentence,
            before=scale[0], value=scale[0] + scale[1], points=points, **columns,
        )  # fmt: skip

    cap, batch = "running_cap_too_small", "batch_too_large"
    fact(cap, True, "31 requests wait", (0.4, 30.6), metric="vllm:num_requests_waiting",
         unit="requests", threshold=1.0)  # fmt: skip
    fact(cap, True, "8 of 8 allowed requests run all the time", (5.1, 2.9),
         metric="vllm:num_requests_running", unit="requests", threshold=8.0)  # fmt: skip
    fact(cap, True, "Queueing is 73 % of the time to the first token", (0.04, 0.69),
         metric="vllm:request_queue_time_seconds", unit="share", threshold=0.5)  # fmt: skip
    fact(cap, True, "The KV cache has room: 41 % is in use", (0.29, 0.12),
         metric="vllm:kv_cache_usage_perc", unit="share", threshold=0.9)  # fmt: skip
    fact(cap, False, "Arrivals grew only by a third", (5.6, 1.9),
         metric="engine:requests_received_total", unit="1/s")  # fmt: skip
    fact(batch, False, "A step takes 31 ms, as long as before", (0.030, 0.001),
         metric="engine:step_seconds", unit="s", threshold=0.05)  # fmt: skip
    return diagnosis


def goes_on(found: Incident, kept_at: datetime) -> Diagnosis:
    """What a change kept then has left: three windows with a quarter missed, and a look at them
    that explains nothing."""
    Reading.objects.filter(objective=found.objective, window_end__gt=kept_at).delete()
    for number in (1, 2, 3):
        Reading.objects.create(
            objective=found.objective, scope=found.scope, good=75, total=100, signal="ok",
            window_end=kept_at + number * timedelta(seconds=15),
        )  # fmt: skip
    ask = "1 engine serves chat, and it needs 1 more like engine-0"
    at = kept_at + timedelta(seconds=50)
    newest = Diagnosis.objects.create(
        incident=found, made_at=at, cause="unknown", score=0.4, window_start=kept_at, window_end=at,
        because="no cause examined explains it; the nearest, load beyond capacity, fails on: "
        "80 % busy",
        facts={"no_action": "the cause is not known, so nothing is changed"},
        rivals=[
            {"cause": "load_beyond_capacity", "score": 0.4, "because": "87 served",
             "no_remedy": ask},
            {"cause": "slow_host", "score": 0.1, "because": "10 % busy", "no_remedy": ""},
        ],
    )  # fmt: skip
    newest.evidence.create(
        cause="load_beyond_capacity", supports=False, sentence="a step 80 % of the time"
    )
    return newest


def act(world: World, found: Incident, at: datetime, until: State) -> Action:
    action = Action.objects.create(
        tenant=world.tenant, engine=world.engine, incident=found, cause="running_cap_too_small",
        why="up to 39 requests run or wait while there is a queue; 32 is two steps up",
        changes={"max_num_seqs": {"from": 8, "to": 32}}, expected_config_version=7,
        idempotency_key=uuid.uuid4().hex, deadline=at + timedelta(seconds=30), created_at=at,
    )  # fmt: skip
    previous = ""
    for state, after_s, actor, reason in STEPS:
        Transition.objects.create(
            action=action, from_state=previous, to_state=state, at=at + timedelta(seconds=after_s),
            actor=actor, reason=reason,
        )  # fmt: skip
        previous = state
    action.state, action.applied_at = State.VERIFYING, at + timedelta(seconds=4)
    action.save()
    if until in (State.VERIFIED, State.ROLLED_BACK):
        end(action, until, at + timedelta(seconds=80))
    return action


def end(action: Action, state: State, at: datetime) -> None:
    """The verification's last word."""
    better = state == State.VERIFIED
    sentence = (
        "44.7 % of requests missed the objective before and 0.6 % after, at the same load."
        if better
        else "39 % of requests still missed the objective, 45 % before; that may be chance."
    )
    action.outcome = {
        "before": {"good": 228, "total": 412},
        "after": {"good": 341, "total": 343} if better else {"good": 209, "total": 343},
        "p_value": 0.00001 if better else 0.11, "looks": 2, "sentence": sentence, "unit": REQUESTS,
    }  # fmt: skip
    action.verdict = Verdict.BETTER if better else Verdict.INCONCLUSIVE
    action.ended_at, previous = at, action.state
    steps = [state] if better else [State.ROLLING_BACK, state]
    for i, step in enumerate(steps):
        Transition.objects.create(
            action=action, from_state=previous, to_state=step, at=at + timedelta(seconds=i),
            actor="loop", reason=action.verdict,
        )  # fmt: skip
        previous = step
    action.state = state
    action.save()
