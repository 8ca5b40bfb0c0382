"""What of the harm a changed setting has done by itself, where that can be reckoned. Pure.

What a setting moves is moved by other things as well: a crowd and a slow host make queues, larger
batches and longer prompts of their own. So each is asked how far the setting alone would go.
"""

from __future__ import annotations

import math

from controlplane.diagnosis.amounts import ms
from controlplane.diagnosis.capacity import capacity_per_s
from controlplane.diagnosis.demand import ARRIVALS, arrivals
from controlplane.diagnosis.facts import BEYOND_MIN, CAP, QUEUE_TIME, Fact, measured
from controlplane.diagnosis.scene import METRIC_OF, RUNNING, Change, Scene, mean
from controlplane.diagnosis.step_time import step_time

ENOUGH_MIN = 0.5  # of the harm
PREFILL_TIME = "vllm:request_prefill_time_seconds"


def attributed(scene: Scene, change: Change | None) -> tuple[Fact, ...]:
    """Whether the change alone does so much of the harm; nothing where that cannot be reckoned."""
    if change is None or isinstance(change.before, str) or isinstance(change.after, str):
        return ()
    before, after, down = change.before, change.after, change.after < change.before
    if change.knob == CAP:
        return _cap_fact(scene, before, after) if down else _room_fact(scene, before)
    if change.knob == "max_wait_ms" and not down:
        return _wait_fact(scene, (after - before) / 1000)
    if change.knob in ("prefill_chunk_tokens", "max_num_batched_tokens") and down:
        return _prompt_fact(scene)
    return ()


def _cap_fact(scene: Scene, before: float, after: float) -> tuple[Fact, ...]:
    """Of what arrives and is not served, what the former cap would have served.

    A cap that serves all of it can still be short of the crowds, unless it is a slow engine's.
    """
    load, step = arrivals(scene).value, step_time(scene)
    was, now = capacity_per_s(scene, before), capacity_per_s(scene, after)
    if load is None or was is None or now is None:
        return ()
    needed = BEYOND_MIN * load  # at all it can serve the queue stays as long as it is
    slower = step is not None and step.is_slower
    short, lost = needed - now, min(was, needed) - now
    return (
        measured(
            f"{load:.3g} requests arrive a second; at the speed of before a cap of {after:g} "
            f"serves {now:.3g}, and {before:g} would serve {was:.3g}",
            lost >= ENOUGH_MIN * short if short > 0 else not slower,
            metric=ARRIVALS,
            unit="1/s",
            value=now,
            threshold=needed,
            required=True,
        ),
    )


def _room_fact(scene: Scene, cap: float) -> tuple[Fact, ...]:
    """Of those that run beyond the ones of before, who would not under the former cap."""
    running, looks = scene.gauge(RUNNING), scene.steps(RUNNING)
    beyond = mean([max(0.0, look - cap) for look in looks if not math.isnan(look)])
    if beyond is None or running.value is None or running.before is None:
        return ()
    grown = max(0.0, running.value - running.before)
    return (
        measured(
            f"{grown:.1f} more run than before, {beyond:.1f} of them beyond the {cap:g} that were "
            "allowed to",
            beyond > 0 and beyond >= ENOUGH_MIN * grown,
            track=running,
            metric=RUNNING,
            unit="requests",
            value=beyond,
            threshold=ENOUGH_MIN * grown,
            required=True,
        ),
    )


def _wait_fact(scene: Scene, longer_s: float) -> tuple[Fact, ...]:
    queue = scene.means(QUEUE_TIME)
    if queue.value is None or queue.before is None:
        return ()
    grown = queue.value - queue.before
    return (
        measured(
            f"A request waits {ms(longer_s)} longer for others at most; in the queue it waits "
            f"{ms(max(0.0, grown))} longer than before",
            longer_s >= ENOUGH_MIN * grown,
            track=queue,
            metric=QUEUE_TIME,
            unit="s",
            threshold=queue.before + longer_s / ENOUGH_MIN,
            required=True,
        ),
    )


def _prompt_fact(scene: Scene) -> tuple[Fact, ...]:
    """Smaller chunks lengthen the prompt's part of a request, and nothing else of it."""
    whole, queue, prompt = (scene.means(m) for m in (METRIC_OF["e2e"], QUEUE_TIME, PREFILL_TIME))
    times = [t for track in (whole, queue, prompt) for t in (track.before, track.value)]
    if any(t is None for t in times):
        return ()
    whole_before, whole_now, queue_before, queue_now, before, now = (t or 0.0 for t in times)
    grown = (whole_now - queue_now) - (whole_before - queue_before)
    return (
        measured(
            f"Once it runs a request takes {ms(max(0.0, grown))} longer than before, and its "
            f"prompt {ms(max(0.0, now - before))}",
            now - before >= ENOUGH_MIN * grown,
            track=prompt,
            metric=PREFILL_TIME,
            unit="s",
            threshold=before + ENOUGH_MIN * max(0.0, grown),
            required=True,
        ),
    )
