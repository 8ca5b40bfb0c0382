"""What the engine is asked to do: requests per second and their lengths, before and now. Pure."""

from __future__ import annotations

from controlplane.diagnosis.scene import RUNNING, Scene, Track

# So much more work than before is no noise of the arrivals: the traffic has changed.
GREW_MIN = 1.15
HELD_GREW_MIN = 1.5  # a few looks at who happens to run tell no less

ARRIVALS = "engine:requests_received_total"
SHED = "engine:requests_shed_total"
REJECTED = "vllm:admission_rejections_total"
PROMPT = "vllm:request_prompt_tokens"
OUTPUT = "vllm:request_generation_tokens"
KV_USED = "vllm:kv_cache_usage_perc"
KV_BLOCKS = "engine:kv_blocks"
KV_BLOCK_SIZE = "kv_block_size"

Lengths = tuple[float, float]


def arrivals(scene: Scene) -> Track:
    """Requests per second to be served: received, less those shed by their priority."""
    received, shed = scene.rate(ARRIVALS), scene.rate(SHED)

    def less(all_of_them: float | None, turned_away: float | None) -> float | None:
        return None if all_of_them is None else all_of_them - (turned_away or 0.0)

    before = less(received.before, shed.before)
    return Track(before, less(received.value, shed.value), received.points)


def arrivals_now(scene: Scene) -> float | None:
    """Requests per second to be served in the newest window: a crowd may be over by now."""
    newest = scene.rate(ARRIVALS).points[-1:], scene.rate(SHED).points[-1:]
    received, shed = (points[0][1] if points else None for points in newest)
    return None if received is None else received - (shed or 0.0)


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
    """How many times as long as before requests are, in the length that grew more; 1 if unknown.

    Of those that ended, or of those that run, by the KV cache each of them holds: who is told a
    long answer has not ended yet.
    """
    now, before, held = lengths(scene), lengths(scene, reference=True), held_grew(scene)
    ratios = [held] if held is not None and held >= HELD_GREW_MIN else []
    if now is not None and before is not None and all(before):
        ratios += [new / old for new, old in zip(now, before, strict=True)]
    return max(ratios, default=1.0)


def held_grew(scene: Scene) -> float | None:
    """How many times the KV cache of before a running request holds; None: not measured."""
    used, running, pool = scene.gauge(KV_USED), scene.gauge(RUNNING), pool_grew(scene)
    if pool is None or not (used.value and used.before and running.value and running.before):
        return None
    return used.value / used.before * pool / (running.value / running.before)


def pool_grew(scene: Scene) -> float | None:
    """How many times the tokens of before the KV pool holds, whatever its blocks' size is now."""
    blocks = scene.gauge(KV_BLOCKS)
    if blocks.value is None or not blocks.before:
        return None
    return blocks.value / blocks.before * _block_grew(scene)


def _block_grew(scene: Scene) -> float:
    size = scene.engine.number(KV_BLOCK_SIZE)
    first = next((change for change in scene.changes if change.knob == KV_BLOCK_SIZE), None)
    if size is None or first is None or isinstance(first.before, str):
        return 1.0
    return size / first.before


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
