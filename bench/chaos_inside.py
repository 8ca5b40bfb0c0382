"""What chaos needs a house's own database for, in processes that hold its TRIMTAB_HOME.

    python bench/chaos_inside.py VERB …

    changes SEED TTL_S_MIN TTL_S_MAX [ENGINE…]   until SIGTERM: order changes
    order JSON                                   one command; prints its id
    report                                       commands, actions, incidents
    spans < LEDGER                               compare the ledger to the store

Orders go through the product's own service, as the loop's do; `spans` opens the telemetry store,
so the control plane must have ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
django.setup()

from django.utils import timezone  # noqa: E402

from controlplane.accounts.models import Tenant  # noqa: E402
from controlplane.actions.models import Action, Priority  # noqa: E402
from controlplane.actions.selectors import action_in_flight  # noqa: E402
from controlplane.diagnosis.models import Incident  # noqa: E402
from controlplane.fleet.models import Command, Engine  # noqa: E402
from controlplane.fleet.services import command_create  # noqa: E402
from gpu_agent.protocol import CommandKind, CommandState  # noqa: E402
from tracing import query, wiring  # noqa: E402

# Any of these carries the load, but the smallest caps: those give the loop something to mend.
MENU: dict[str, tuple[int, ...]] = {
    "max_num_seqs": (2, 4, 8, 32, 64),
    "max_num_batched_tokens": (512, 1024, 2048, 4096),
    "prefill_chunk_tokens": (128, 256, 512),
    "max_wait_ms": (0, 2, 5),
}
CAP_CARRIES = 16
FIND_S_MAX = 12.0
LOOP_S_MAX = 40.0
DEADLINE_S = 15.0
PATIENCE_S = 45.0
POLL_S = 0.1
ENDS = {CommandKind.COMMIT: 0.45, CommandKind.REVERT: 0.25, None: 0.3}

stopping = threading.Event()


def changes(seed: int, ttl_s: tuple[float, float], engines: list[str]) -> None:
    """Side by side on the engines named, or on the first there is, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    hands = [
        threading.Thread(target=trials, args=(random.Random(f"{seed}/{name}"), ttl_s, name))
        for name in engines or [""]
    ]
    for hand in hands:
        hand.start()
    for hand in hands:
        hand.join()


def trials(draw: random.Random, ttl_s: tuple[float, float], name: str) -> None:
    """One trial after the other: committed, reverted, or left to the agent's own timer."""
    engines = Engine.objects.filter(config_version__isnull=False)
    if name:
        engines = engines.filter(name=name)
    while not stopping.wait(draw.uniform(0.3, 2.5)):
        engine = engines.first()
        if engine is None or (action_in_flight(engine) and draw.random() < 0.7):
            stopping.wait(1)  # the loop's own trial: mostly let it be, sometimes collide with it
            continue
        knob = draw.choice([name for name in MENU if name in engine.values])
        now_at = engine.values[knob]
        value = draw.choice([value for value in MENU[knob] if value != now_at])
        trial(draw, engine, {knob: value}, {knob: now_at}, draw.uniform(*ttl_s))


def trial(
    draw: random.Random,
    engine: Engine,
    values: dict[str, Any],
    undo: dict[str, Any],
    ttl_s: float,
) -> None:
    apply = order(engine, CommandKind.APPLY, values=values, undo=undo, ttl_s=ttl_s)
    until_final(apply)
    if apply.result_state != CommandState.APPLIED:
        return
    end = draw.choices(list(ENDS), list(ENDS.values()))[0]
    if end is None:
        until(apply, lambda: apply.result_state != CommandState.APPLIED, ttl_s + PATIENCE_S)
        return
    # Some ends come at once, some so late that they race the agent's timer.
    stopping.wait(draw.uniform(0, 1.1 * ttl_s) * draw.choice((0.1, 1)))
    until_final(order(engine, end, target=apply))
    if end is CommandKind.COMMIT and values.get("max_num_seqs", CAP_CARRIES) < CAP_CARRIES:
        leave_to_the_loop(engine)


def leave_to_the_loop(engine: Engine) -> None:
    """Time for the loop to find the cap too small, and for the trial that it then starts."""
    began = timezone.now()
    while not action_in_flight(engine):
        if timezone.now() > began + timedelta(seconds=FIND_S_MAX) or stopping.wait(POLL_S):
            return
    while action_in_flight(engine) and timezone.now() < began + timedelta(seconds=LOOP_S_MAX):
        if stopping.wait(POLL_S):
            return


def order(
    engine: Engine,
    kind: CommandKind,
    *,
    values: dict[str, Any] | None = None,
    undo: dict[str, Any] | None = None,
    ttl_s: float = 10.0,
    target: Command | None = None,
) -> Command:
    """`values` in the engine's present version; or the end of the trial of `target`."""
    return command_create(
        engine=engine,
        action_id=target.action_id if target else uuid.uuid4(),
        kind=kind,
        values=values or {},
        undo=undo or {},
        expected_config_version=engine.config_version if target is None else None,
        ttl_s=ttl_s,
        deadline=timezone.now() + timedelta(seconds=DEADLINE_S),
        target_command_id=target.pk if target else None,
    )


def until_final(command: Command) -> None:
    until(command, lambda: command.finished_at is not None, DEADLINE_S + PATIENCE_S)


def until(command: Command, met: Any, seconds: float) -> None:
    """Polls the row; gives up when chaos ends or the time is over: the report tells."""
    deadline = timezone.now() + timedelta(seconds=seconds)
    while not met() and timezone.now() < deadline and not stopping.wait(POLL_S):
        command.refresh_from_db()


def order_one(text: str) -> dict[str, Any]:
    """{"values", "ttl_s"} starts a trial, {"kind": "commit" | "revert", "target"} ends one."""
    asked = json.loads(text)
    engine = Engine.objects.get()
    if "target" in asked:
        target = Command.objects.get(pk=asked["target"])
        made = order(engine, CommandKind(asked["kind"]), target=target)
    else:
        undo = {name: engine.values[name] for name in asked["values"]}
        made = order(
            engine, CommandKind.APPLY, values=asked["values"], undo=undo, ttl_s=asked["ttl_s"]
        )
    return {"id": str(made.pk)}


def report() -> dict[str, Any]:
    applies = {
        command.action_id: str(command.pk) for command in Command.objects.filter(kind="apply")
    }
    return {
        "commands": [
            {
                "id": str(command.pk),
                "kind": command.kind,
                "state": command.result_state,
                "final": command.finished_at is not None,
            }
            for command in Command.objects.order_by("generation")
        ],
        "actions": [
            {
                "id": str(action.pk),
                "state": action.state,
                "ended": action.ended_at is not None,
                "apply": applies.get(action.pk),
                "by_person": action.priority == Priority.PERSON,
                "undoes": action.undoes_id is not None,
                "what": str(action),
            }
            for action in Action.objects.order_by("created_at")
        ],
        "engines": {engine.name: engine.values for engine in Engine.objects.all()},
        "incidents": [
            {
                "id": str(incident.pk),
                "what": str(incident),
                "state": incident.state,
                "openings": 1 + incident.reopened,
                "told": [[d.event, d.state] for d in incident.deliveries.all()],
            }
            for incident in Incident.objects.order_by("opened_at")
        ],
    }


def spans(ledger: dict[str, list[str]]) -> dict[str, int]:
    """How the store, read as the product reads it, differs from what was acknowledged."""
    [tenant] = Tenant.objects.all()
    reader = query.reader(str(tenant.pk))
    found = {"stored": 0, "missing": 0, "twice": 0, "unacknowledged": 0}
    for trace_id, acknowledged in ledger.items():
        stored = Counter(span.span_id for span in reader.trace(trace_id))
        found["stored"] += stored.total()
        found["missing"] += len(set(acknowledged) - stored.keys())
        found["twice"] += stored.total() - len(stored)
        found["unacknowledged"] += len(stored.keys() - set(acknowledged))
    wiring.close()
    return found


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "changes":
        changes(int(rest[0]), (float(rest[1]), float(rest[2])), rest[3:])
    elif verb == "order":
        print(json.dumps(order_one(rest[0])))
    elif verb == "report":
        print(json.dumps(report()))
    elif verb == "spans":
        print(json.dumps(spans(json.load(sys.stdin))))
    else:
        raise SystemExit(f"{verb!r}: allowed are changes, order, report, spans")
