"""Requests are missed because they are turned away by their priority, on purpose.

Runbook: docs/causes/shed_by_priority.md. Low tiers are turned away so that the others are served in
time; a promise that counts them as missed stays broken meanwhile. What it misses then tells of no
cap and no memory, even where the queue of before is still to be seen.
"""

from __future__ import annotations

from controlplane.diagnosis.cause import (
    SHED,
    SHED_BY_PRIORITY,
    SHED_KNOB,
    Change,
    Fact,
    Finding,
    Scene,
    Track,
    arrivals,
    counts_shed,
    gettext_noop,
    measured,
    score,
)

MISSED_SHARE_MIN = 0.5  # most of what the objective missed
ANSWERED_MIN = 0.9  # of those let in: some are still being served as the windows end
LOWEST = 0.0  # nobody has a lower priority, so that nobody is turned away

FINISHED = "vllm:request_success_total"


class ShedByPriority:
    slug = SHED_BY_PRIORITY
    label = gettext_noop("requests turned away by their priority")

    def examine(self, scene: Scene) -> Finding:
        below, change = scene.engine.number(SHED_KNOB), _change(scene)
        let_in, shed = arrivals(scene).value, scene.rate(SHED).value
        received = None if let_in is None or shed is None else let_in + shed
        of_missed = _share_fact(scene)
        evidence = (
            _objective_fact(scene),
            of_missed,
            _knob_fact(below, change),
            _others_fact(scene, let_in),
        )
        facts = {
            "shed_per_s": shed,
            "received_per_s": received,
            "missed_share": of_missed.value,
            "below": below,
            "by": change.by if change else "",
        }
        return Finding(
            self.slug,
            score(evidence),
            _because(scene, shed, received, below),
            facts,
            evidence,
            no_remedy=(
                "they are turned away so that the others are served in time: what Trimtab turned "
                "away it serves again, on trial, once no other promise is broken; to answer all of "
                "them before that takes more engines or less load"
            ),
            explains=(
                "running_cap_too_small",
                "load_beyond_capacity",
                "kv_pool_exhausted",
                "kv_fragmentation",
            ),
            applies=evidence[0].supports,
        )


def _change(scene: Scene) -> Change | None:
    """The newest move of the threshold, where it is one of those the scene shows."""
    moves = [change for change in scene.changes if change.knob == SHED_KNOB]
    return moves[-1] if moves else None


def _missed(scene: Scene) -> float | None:
    """The requests missed in the incident, as the objective counts them; None: not measured."""
    if not counts_shed(scene):
        return None
    spec = scene.objective.spec
    ended = scene.growth_by(spec["metric"], "finished_reason") if spec["bad_reasons"] else {}
    counts = [ended.get(reason) for reason in spec["bad_reasons"]]
    counts += [scene.growth(metric) for metric in spec["bad_metrics"]]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _objective_fact(scene: Scene) -> Fact:
    counts = counts_shed(scene)
    says = "counts" if counts else "does not count"
    text = f"“{scene.objective.name}” {says} requests that are turned away as missed"
    return Fact(text, counts, required=True, weight=0.5)


def _share_fact(scene: Scene) -> Fact:
    """Of the requests the objective missed, those turned away by their priority."""
    shed, missed, share = scene.growth(SHED), _missed(scene), None
    if shed is None:
        text = "How many requests are turned away by their priority was not measured"
    elif not missed:
        text = "No request was counted as missed for having been turned away"
    else:
        share = min(1.0, shed / missed)
        text = f"{shed:.0f} of the {missed:.0f} missed requests were turned away by their priority"
    return measured(
        text,
        share is not None and share >= MISSED_SHARE_MIN,
        track=Track(None, share, scene.rate(SHED).points),
        metric=SHED,
        unit="share of the missed",
        threshold=MISSED_SHARE_MIN,
        required=True,
        weight=2,
    )


def _knob_fact(below: float | None, change: Change | None) -> Fact:
    if below is None:
        text = "Below which priority requests are turned away is not known: no agent reads it"
    else:
        text = f"{SHED_KNOB} is {below:g}"
        if below <= LOWEST:
            text += ", which turns nobody away"
    if change is not None:
        who = change.by if change.by_hand else "Trimtab" if change.by else "somebody"
        text += f"; {who} changed it from {change.before} to {change.after}"
        text += f" at {change.at:%H:%M:%S} UTC"
    return measured(
        text,
        below is not None and below > LOWEST,
        metric="engine:knob",
        unit="priority",
        value=below,
        threshold=LOWEST,
        required=True,
    )


def _others_fact(scene: Scene, let_in: float | None) -> Fact:
    """Whether those who are not turned away are answered."""
    done = scene.rate(FINISHED)
    if done.value is None or let_in is None:
        text = "How many of the others are answered was not measured"
        return measured(text, False, metric=FINISHED, weight=0.5)
    return measured(
        f"{done.value:.3g} requests a second are answered and {let_in:.3g} are let in",
        done.value >= ANSWERED_MIN * let_in,
        track=done,
        metric=FINISHED,
        unit="1/s",
        threshold=ANSWERED_MIN * let_in,
        weight=0.5,
    )


def _because(scene: Scene, shed: float | None, received: float | None, below: float | None) -> str:
    if shed is None or received is None:
        return "it is not measured how many requests arrive and are turned away by their priority"
    under = f" (below {below:g})" if shed and below is not None else ""
    return scene.because(
        f"{shed:.3g} of {received:.3g} requests a second were turned away by their priority{under}"
    )


CAUSE = ShedByPriority()
