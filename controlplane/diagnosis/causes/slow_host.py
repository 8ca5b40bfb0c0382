"""Steps take longer at the same tokens, and nothing the engine was told or sent explains it.

Runbook: docs/causes/slow_host.md. What is left when a fit of the windows before says how long the
steps should take: another process on the host, a lower clock, swapping. No knob cures it.
"""

from __future__ import annotations

from controlplane.diagnosis.cause import (
    EAGER_GREW_MAX,
    FORWARD_CPU,
    GPU_CLOCK,
    GRAPH_STEPS,
    INFEASIBLE,
    Fact,
    Finding,
    Scene,
    counts_requests,
    cpu_share,
    eager_share,
    follows_from_slowness,
    gettext_noop,
    measured,
    ms,
    score,
    slower_fact,
    step_time,
    traffic_fact,
)

ONSET_WINDOWS = 3  # a change of a setting so near the first bad window may be why
# These move tokens between steps; what a step of so many takes stays the same.
SCHEDULING = frozenset(
    {
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_wait_ms",
        "prefill_chunk_tokens",
        "shed_below_priority",
    }
)
CLOCK_FELL_MAX = 0.1  # a GPU clock lower by more is throttled, not the host's doing
CPU_FELL_MIN = 0.1  # others use the CPU when the model gets so much less of it

KNOBS = "engine:knob"


class SlowHost:
    slug = "slow_host"
    label = gettext_noop("slow host")

    def examine(self, scene: Scene) -> Finding:
        evidence = (
            counts_requests(scene),
            slower_fact(scene, wanted=True, weight=3),
            _unchanged_fact(scene),
            *_graph_fact(scene),
            *_clock_fact(scene),
            *_cpu_fact(scene),
            traffic_fact(scene, grew=False, weight=2),
        )
        step = step_time(scene)
        facts = {
            "slower": step.slower if step else None,
            "expected_step_s": step.before.step_s(step.p, step.d) if step and step.before else None,
        }
        where = f"host {scene.engine.node}" if scene.engine.node else "the engine's host"
        return Finding(
            self.slug,
            score(evidence),
            _because(scene),
            facts,
            evidence,
            no_remedy=(
                f"no knob makes a slow host fast: a person has to look at {where} (other "
                "processes, CPU limits and clocks, swapping) or move its load elsewhere"
            ),
            verdict=INFEASIBLE,
            explains=follows_from_slowness(scene),
        )


def _unchanged_fact(scene: Scene) -> Fact:
    """Whether a setting moved around the time it began that the fit does not account for."""
    reach = ONSET_WINDOWS * scene.window_s
    near = [
        change
        for change in scene.changes
        if change.knob not in SCHEDULING
        and abs((change.at - scene.bad_since).total_seconds()) <= reach
    ]
    moved = ", ".join(f"{c.knob} from {c.before} to {c.after}" for c in near)
    return measured(
        f"Settings that change how long a token takes were changed when it began: {moved}"
        if near
        else "No setting that changes how long a token takes was changed when it began",
        not near,
        metric=KNOBS,
        unit="changes",
        value=float(len(near)),
        threshold=0,
        required=True,
    )


def _graph_fact(scene: Scene) -> tuple[Fact, ...]:
    """Whether as many steps as before replay a captured graph; nothing where none is counted."""
    track = eager_share(scene)
    if track.value is None or track.before is None:
        return ()
    return (
        measured(
            f"{track.value:.0%} of the steps run without a captured graph, "
            f"{track.before:.0%} before",
            track.value - track.before <= EAGER_GREW_MAX,
            track=track,
            metric=GRAPH_STEPS,
            unit="share of steps",
            threshold=track.before + EAGER_GREW_MAX,
            required=True,
        ),
    )


def _clock_fact(scene: Scene) -> tuple[Fact, ...]:
    """Whether the GPU's clock held; nothing where no GPU is read."""
    clock = scene.node_gauge(GPU_CLOCK)
    if clock.value is None or not clock.before:
        return ()
    bar = (1 - CLOCK_FELL_MAX) * clock.before
    return (
        measured(
            f"The GPU's clock is {clock.value / 1e6:.0f} MHz, {clock.before / 1e6:.0f} MHz before",
            clock.value >= bar,
            track=clock,
            metric=GPU_CLOCK,
            unit="Hz",
            threshold=bar,
            required=True,
        ),
    )


def _cpu_fact(scene: Scene) -> tuple[Fact, ...]:
    """Whether the model gets less CPU for its time; nothing where that is not counted."""
    track = cpu_share(scene)
    if track.value is None or track.before is None:
        return ()
    bar = (1 - CPU_FELL_MIN) * track.before
    return (
        measured(
            f"The model gets {track.value:.0%} of a CPU while it runs, {track.before:.0%} before",
            track.value <= bar,
            track=track,
            metric=FORWARD_CPU,
            unit="share of a CPU",
            threshold=bar,
        ),
    )


def _because(scene: Scene) -> str:
    step = step_time(scene)
    if step is None or step.before is None or step.slower is None:
        return "it cannot be told whether the steps take longer than their tokens explain"
    expected = step.before.step_s(step.p, step.d)
    takes = expected / (1 - step.slower)
    if takes <= expected:
        return scene.because(
            f"a step took {ms(takes)}, no longer than the {ms(expected)} its tokens explain"
        )
    return scene.because(f"a step took {ms(takes)}, and its tokens explain {ms(expected)} of it")


CAUSE = SlowHost()
