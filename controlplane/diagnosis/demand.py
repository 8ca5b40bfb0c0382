"""What the engine is asked to do: requests per second and their lengths, before and now. Pure."""

from __future__ import annotations

from controlplane.diagnosis.scene import Scene, Track

# So much more work than before is no noise of the arrivals: the traffic has changed.
GREW_MIN = 1.15

ARRIVALS = "engine:requests_received_total"
SHED = "engine:requests_shed_total"
REJECTED = "vllm:admission_rejections_total"
PROMPT = "vllm:request_prompt_tokens"
OUTPUT = "vllm:request_generation_tokens"

Lengths = tuple[float, float]


def arrivals(scene: Scene) -> Track:
    """Requests per second to be served: received, less those shed by their priority."""
    received, shed = scene.rate(ARRIVALS), scene.rate(SHED)

    def less(all_of_them: float | None, turned_away: float | None) -> float | None:
        return None if all_of_them is None else all_of_them - (turned_away or 0.0)

    before = less(received.before, shed.before)
    return Track(before, less(received.value, shed.value), received.points)


def lengths(scene: Scene, *, reference: bool = False) -> Lengths | None:
    """Mean prompt and output tokens of the requests that ended; None when none was measured.

    Those of the reference where none of the incident's has ended yet.
    """
    prompt = scene.histogram(PROMPT, reference=reference)
    output = scene.histogram(OUTPUT, reference=reference)
    if prompt and output and prompt.mean is not None and output.mean:
        return prompt.mean, output.mean
    return None if reference else lengths(scene, reference=True)


def longer(scene: Scene) -> float:
    """How many times as long as before requests are, in the length that grew more; 1 if unknown."""
    now, before = lengths(scene), lengths(scene, reference=True)
    if now is None or before is None or not all(before):
        return 1.0
    return max(new / old for new, old in zip(now, before, strict=True))


def demand_grew(scene: Scene) -> float | None:
    """How many times the work of before arrives: requests a second times how much longer they are.

    At most that: a request twice as long in one of its two lengths counts as two. None when the
    arrivals of before or now were not measured.
    """
    load = arrivals(scene)
    if load.value is None or not load.before:
        return None
    return load.value / load.before * longer(scene)


def demand_text(scene: Scene) -> str:
    """“45 requests arrive a second, on average of 101 prompt and 40 output tokens; before it was
    15 a second, of 99 and 41”."""
    load = arrivals(scene)
    now, before = lengths(scene), lengths(scene, reference=True)
    if load.value is None:
        return "How many requests arrive was not measured"
    text = f"{load.value:.3g} requests arrive a second"
    if now:
        text += f", on average of {now[0]:.0f} prompt and {now[1]:.0f} output tokens"
    if load.before is not None:
        text += f"; before it was {load.before:.3g} a second"
        if before:
            text += f", of {before[0]:.0f} and {before[1]:.0f}"
    return text
