"""The engine launches its kernels one by one again, though a captured graph should replay them.

Runbook: docs/causes/graph_capture_lost.md. A replayed graph pays the launches of a step once; eager
steps pay them every time, so the step's fixed part grows and its cost of a token does not. The
engine counts its steps by mode, so this is seen and not inferred.
"""

from __future__ import annotations

from controlplane.diagnosis.cause import (
    CAP,
    GRAPH_STEPS,
    RUNNING,
    STEP_TIME,
    Fact,
    Finding,
    Scene,
    Track,
    Wish,
    counts_requests,
    eager_share,
    follows_from_slowness,
    gettext_noop,
    measured,
    ms,
    score,
    several,
    slower_fact,
    step_time,
)

KNOB = "graph_capture"
EAGER_MIN = 0.5  # most steps run without a graph
SLOWER_MIN = 0.05  # the steps are counted as eager, so that little is enough to be felt
FIXED_GREW = 1.25  # the step's fixed part, now over before


class GraphCaptureLost:
    slug = "graph_capture_lost"
    label = gettext_noop("captured graph lost")

    def examine(self, scene: Scene) -> Finding:
        eager = eager_share(scene)
        step = step_time(scene)
        told = step is not None and step.slower is not None
        evidence = (
            counts_requests(scene),
            _eager_fact(eager),
            _meant_fact(scene, eager),
            slower_fact(scene, wanted=True, required=told, bar=SLOWER_MIN),
            _fixed_fact(scene),
        )
        remedy, no_remedy = _remedy(scene)
        facts = {
            "eager_share": eager.value,
            "eager_share_before": eager.before,
            "fixed_s": step.fixed if step else None,
            "fixed_s_before": step.before.a if step and step.before else None,
        }
        return Finding(
            self.slug,
            score(evidence),
            _because(scene, eager),
            facts,
            evidence,
            remedy,
            no_remedy,
            explains=("slow_host", *follows_from_slowness(scene)),
        )


def _eager_fact(eager: Track) -> Fact:
    if eager.value is None:
        text = "Whether steps replay a captured graph was not measured"
    else:
        then = "" if eager.before is None else f", {eager.before:.0%} before"
        text = f"{eager.value:.0%} of the steps that have a captured graph run without it{then}"
    return measured(
        text,
        eager.value is not None and eager.value >= EAGER_MIN,
        track=eager,
        metric=GRAPH_STEPS,
        unit="share of steps",
        threshold=EAGER_MIN,
        required=True,
        weight=2,
    )


def _meant_fact(scene: Scene, eager: Track) -> Fact:
    """Eager by choice, now as before, is no fault."""
    on = scene.engine.values.get(KNOB) == "on"
    was = eager.before is not None and eager.before < EAGER_MIN
    if on:
        text = f"{KNOB} is on, so the steps are meant to replay a graph"
    elif was:
        text = f"{KNOB} is not on, but most steps replayed a graph before"
    else:
        text = f"{KNOB} is not on, and no steps are known to have replayed a graph before"
    return measured(
        text,
        on or was,
        metric=GRAPH_STEPS,
        unit="share of steps",
        value=eager.before,
        threshold=EAGER_MIN,
        required=True,
    )


def _fixed_fact(scene: Scene) -> Fact:
    step = step_time(scene)
    if step is None or step.before is None or step.fixed is None:
        text = "The fixed part of a step's time was not measured both before and now"
        return measured(text, False, metric=STEP_TIME, unit="s", weight=0.5)
    bar = FIXED_GREW * step.before.a
    return measured(
        f"The fixed part of a step's time, whatever its tokens, was {ms(step.before.a)} before and "
        f"is {ms(max(0.0, step.fixed))} now",
        step.fixed > bar,
        track=Track(step.before.a, step.fixed, scene.means(STEP_TIME).points),
        metric=STEP_TIME,
        unit="s",
        threshold=bar,
        weight=0.5,
    )


def _remedy(scene: Scene) -> tuple[tuple[Wish, ...], str]:
    """On again; a smaller batch where it has outgrown the largest graph captured.

    A batch above it runs slowly, so more of it piles up, and it does not come back by itself.
    """
    if not scene.engine.supports(KNOB):
        return (), f"{scene.engine.name} has no {KNOB} to turn on here"
    if scene.engine.values[KNOB] != "on":
        return (Wish(KNOB, "on", "most steps replayed a graph before", exact=True),), ""
    ceiling, running = scene.engine.graph_seqs_max, scene.gauge(RUNNING, over="max").value
    cap = scene.engine.number(CAP)
    if ceiling and running and cap and running > ceiling and cap > ceiling:
        run = several(running, "request runs", "requests run", ".0f")
        why = f"{run}; graphs are captured for {ceiling:g} at most"
        return (Wish(CAP, ceiling, why),), ""
    return (), (
        f"{KNOB} is on already and the engine runs eagerly all the same: a person has to look why "
        "it cannot capture (memory for graphs, a driver) or restart it"
    )


def _because(scene: Scene, eager: Track) -> str:
    if eager.value is None:
        return "it is not measured whether steps replay a captured graph"
    then = "" if eager.before is None else f" ({eager.before:.0%} before)"
    step = step_time(scene)
    grew = ""
    if step and step.before and step.fixed is not None and step.fixed > step.before.a:
        grew = f": the fixed part of a step took {ms(step.fixed)}, {ms(step.before.a)} before"
    text = f"{eager.value:.0%} of the steps ran without a captured graph{then}{grew}"
    return scene.because(text)


CAUSE = GraphCaptureLost()
