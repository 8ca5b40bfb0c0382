"""Story lines, evidence, actions and messages: an incident from its first window to every end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from django.utils.text import capfirst

from controlplane.actions.models import NEXT, Action, State, Transition, Verdict
from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.models import Diagnosis, Evidence, Incident, Severity
from controlplane.diagnosis.selectors import Story
from controlplane.fleet.models import Engine
from controlplane.web.pages.incidents import Compared
from controlplane.web.story import Step, StoryLine
from slo.indicator import REQUESTS
from slo.models import Objective

# A moment to stand still at, so that two pictures of the page are one.
NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
BECAUSE = (
    "31 requests wait behind a cap of 8 running, and 73 % of the time to the first token is queue"
)
WHAT = "184 of 412 requests missed “First token within 500 ms” on engine-0"


def ago(**length: float) -> datetime:
    return NOW - timedelta(**length)


def objective(name: str = "First token within 500 ms", target: float = 0.99) -> Objective:
    slug = name.lower().replace(" ", "-")
    return Objective(slug=slug, name=name, service="chat", target=target, indicator="latency")


def story_lines() -> list[StoryLine]:
    """From the first bad window to every end an incident can have."""
    explained = Step("explained", "done", ago(minutes=3))
    told = Step("told", "done", ago(minutes=3), "chat-oncall")
    found = (Step("detected", "done", ago(minutes=3, seconds=4)), explained, told)
    acted = Step("acted", "done", ago(minutes=2), "max_num_seqs=32")
    none = Step("no action", "next")
    lines = [
        _line(
            "bad",
            "",
            "",
            Step("detected", "done", ago(seconds=20)),
            Step("explain", "now"),
            Step("tell", "next"),
            Step("act", "next"),
            Step("verify", "next"),
        ),
        _line(
            "act",
            BECAUSE,
            "Changed max_num_seqs from 8 to 32 on engine-0, now checking.",
            *found,
            acted,
            Step("verifying", "now"),
        ),
        _line(
            "ok",
            BECAUSE,
            "Kept max_num_seqs at 32 (was 8) on engine-0: 44.7 % of requests "
            "missed the objective before and 0.6 % after, at the same load.",
            *found,
            acted,
            Step("kept", "done", ago(seconds=30)),
            Step("over", "done", NOW),
        ),
        _line(
            "bad",
            BECAUSE,
            "Kept max_num_seqs at 32 (was 8) on engine-0: 44.7 % of requests missed the objective "
            "before and 7.4 % after. Since 12:29:15, 25.0% of 208 requests missed it all the same; "
            "that is not explained, so nothing more is changed.",
            *found,
            acted,
            Step("kept", "done", ago(minutes=1)),
        ),
        _line(
            "bad",
            BECAUSE,
            "Undid the change of max_num_seqs from 8 to 32 on engine-0: 39 % of requests still "
            "missed the objective, 45 % before; that may be chance.",
            *found,
            acted,
            Step("rolled back", "failed", ago(seconds=30)),
            Step("next try from", "next", NOW + timedelta(minutes=2, seconds=30)),
        ),
        _line(
            "bad",
            "no cause has enough evidence",
            "Nothing is changed, because the evidence carries no cause.",
            *found,
            none,
            cause="unknown",
            severity=Severity.TICKET,
        ),
        _line(
            "bad",
            "load beyond capacity: 14 requests a second arrive, 9 can be served",
            "No knob makes room for that: add an engine, or shed what matters least.",
            *found[:2],
            Step("not told", "failed", None, "chat-oncall"),
            none,
            cause="load_beyond_capacity",
        ),
    ]
    for number, line in enumerate(lines):
        line.incident.pk = UUID(int=number + 1)
        line.incident.bad_since -= timedelta(minutes=number)
    return lines


def _line(
    state: str,
    because: str,
    doing: str,
    *steps: Step,
    cause: str = "running_cap_too_small",
    severity: Severity = Severity.PAGE,
) -> StoryLine:
    incident = Incident(
        objective=objective(),
        scope="engine-0",
        severity=severity,
        bad_since=ago(minutes=4),
        opened_at=ago(minutes=3),
        state="closed" if state == "ok" else "open",
    )
    diagnosis = Diagnosis(incident=incident, made_at=ago(minutes=3)) if because else None
    story = Story(
        what=WHAT,
        because=because,
        cause=cause if because else "",
        diagnosis=diagnosis,
        cause_label=cause.replace("_", " ").capitalize() if because else "",
    )
    return StoryLine(incident, story, doing, steps, state, None, (), ())


def evidence() -> list[Evidence]:
    def points(low: float, rise: float) -> list[list[float | None]]:
        return [
            [ago(minutes=12 - i / 4).timestamp(), None if i == 9 else low + (rise if i > 30 else 0)]
            for i in range(48)
        ]

    return [
        Evidence(
            supports=True,
            sentence="31 requests wait",
            metric="vllm:num_requests_waiting",
            unit="requests",
            before=0.4,
            value=31,
            threshold=1,
            points=points(0.4, 30.6),
        ),
        Evidence(
            supports=True,
            sentence="Queueing is 73 % of the time to the first token",
            unit="share",
            before=0.04,
            value=0.73,
            threshold=0.5,
            points=points(0.04, 0.69),
        ),
        Evidence(
            supports=False,
            sentence="Arrivals grew only by a third",
            unit="1/s",
            before=5.6,
            value=7.5,
            points=[],
        ),
    ]


@dataclass(frozen=True)
class ActionSample:
    action: Action
    compared: Compared | None
    steps: tuple[Transition, ...]


PRICE = ({"objective": "Each token within 50 ms", "before": 0.0, "after": 0.0231, "budget": 0.01},)
VERDICTS = {
    State.VERIFIED: Verdict.BETTER,
    State.ROLLED_BACK: Verdict.INCONCLUSIVE,
    State.ROLLBACK_FAILED: Verdict.WORSE,
    State.EXPIRED: Verdict.EXPIRED,
}


def actions() -> list[ActionSample]:
    """One in each state."""
    return [_action(State(state)) for state in State.values]


def _action(state: State) -> ActionSample:
    changes = {"max_num_seqs": {"from": 8, "to": 32}}
    over = state not in NEXT
    action = Action(
        engine=Engine(name="engine-0"),
        changes=changes,
        state=state,
        verdict=VERDICTS.get(state, ""),
        why="up to 39 requests run or wait while there is a queue",
        predicted={"bad_share_max": 0.01} if state == State.VERIFIED else {},
        created_at=ago(minutes=3),
        ended_at=ago(seconds=20) if over else None,
    )
    steps = [Transition(to_state=State.PROPOSED, at=ago(minutes=3), actor="autopilot")]
    if state != State.PROPOSED:
        steps.append(Transition(to_state=state, at=ago(minutes=1), actor="loop", reason="as shown"))
    compared = None
    if state in VERDICTS and state != State.EXPIRED:
        good = state == State.VERIFIED
        compared = Compared(
            0.447,
            0.006 if good else 0.39,
            412,
            343,
            REQUESTS,
            1e-5 if good else 0.11,
            2,
            "",
            price=PRICE if good else (),
        )
    return ActionSample(action, compared, tuple(steps))


def deliveries() -> list[Delivery]:
    channel = Channel(name="chat-oncall")
    message = {"title": WHAT, "what": f"{WHAT}.", "text": f"{WHAT}. {capfirst(BECAUSE)}."}
    return [
        Delivery(
            pk=UUID(int=1),
            channel=channel,
            message=message,
            state="sent",
            attempts=1,
            last_status=200,
            sent_at=ago(minutes=3),
        ),
        Delivery(
            pk=UUID(int=2),
            channel=channel,
            message=message,
            state="pending",
            attempts=2,
            last_error="connection refused",
        ),
        Delivery(
            pk=UUID(int=3),
            channel=channel,
            message=message,
            state="failed",
            attempts=8,
            last_status=404,
            last_error="no such hook",
        ),
    ]
