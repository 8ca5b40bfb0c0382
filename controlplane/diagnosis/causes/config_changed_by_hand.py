"""Somebody moved a setting right before it went bad, and what it moves has moved.

Runbook: docs/causes/config_changed_by_hand.md. The likeliest reason for a system to change is that
someone changed it, so a change of configuration around the onset counts three times the odds of
its other evidence (LOOP 3.5). An edit whose effect is nowhere to be seen is still not to blame.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from controlplane.diagnosis.cause import (
    GRAPH_STEPS,
    KV_USED,
    PREEMPTIONS,
    PREFILL_TIME,
    QUEUE_TIME,
    REJECTED,
    RUNNING,
    SHED,
    STEP_TIME,
    WAITING,
    Change,
    Fact,
    Finding,
    Scene,
    Track,
    Wish,
    attributed,
    counts_requests,
    counts_shed,
    eager_share,
    gettext_noop,
    held_grew,
    measured,
    ms,
    score,
    step_time,
    traffic_fact,
)

BEFORE_WINDOWS = 4  # a change so long before the first bad window may be why
AFTER_WINDOWS = 2  # it is seen at the end of a window, and the first bad one began before that
PRIOR_ODDS = 3.0
REACH_MIN = 0.75  # of the smaller value: requests and tokens come in lumps
EFFECT_MIN = 1.25  # what the setting moves, now over before

CHANGES = "engine:config_changes_total"
PROMPT = "vllm:request_prompt_tokens"
STEP_TOKENS = "vllm:iteration_tokens_total"


@dataclass(frozen=True)
class Effect:
    """What a change of a setting would be seen in: a metric and how to read it."""

    metric: str
    how: str  # mean or heavy of a histogram, level, rate, held by each, eager: the share of steps
    unit: str
    word: str
    least: float = 0.0  # what is less harms nobody

    def shown(self, value: float) -> str:
        if self.unit == "s":
            return ms(value)
        return f"{value:.3g}" if self.unit in ("1/s", "requests") else f"{value:.0%}"


STEP_MEAN = Effect(STEP_TIME, "mean", "s", "the mean step's time")
STEP_HEAVY = Effect(STEP_TIME, "heavy", "s", "the 99th percentile of a step's time")
QUEUE = Effect(QUEUE_TIME, "mean", "s", "the mean time in the queue")
PREFILL = Effect(PREFILL_TIME, "mean", "s", "the mean time of a prompt")
SENT_BACK = Effect(PREEMPTIONS, "rate", "1/s", "preemptions a second")
HELD = Effect(KV_USED, "held", "share", "the share of the KV cache a running request holds")
WAIT = Effect(WAITING, "level", "requests", "the requests waiting")
TURNED_AWAY = Effect(REJECTED, "rate", "1/s", "requests turned away a second")
SHED_AWAY = Effect(SHED, "rate", "1/s", "requests turned away by their priority a second")
DOOR = (TURNED_AWAY, SHED_AWAY)  # makes nobody late: only who counts them misses them
STALLED = Effect(
    "engine:kv_alloc_stall_seconds_total",
    "rate",
    "share of the time",
    "the share of the time that no run of free blocks was long enough",
    least=0.05,
)

# Setting and direction (`_direction`) → what shows its harm, and the causes that are then its
# consequence.
EFFECTS: dict[tuple[str, str], tuple[tuple[Effect, ...], tuple[str, ...]]] = {
    ("max_num_seqs", "down"): ((WAIT, QUEUE), ("running_cap_too_small",)),
    ("max_num_seqs", "up"): ((STEP_MEAN, SENT_BACK), ("batch_too_large", "kv_pool_exhausted")),
    ("max_num_batched_tokens", "up"): ((STEP_HEAVY,), ("batch_too_large",)),
    ("max_num_batched_tokens", "down"): ((PREFILL, QUEUE), ()),
    ("prefill_chunk_tokens", "up"): ((STEP_HEAVY,), ("batch_too_large",)),
    ("prefill_chunk_tokens", "down"): ((PREFILL, QUEUE), ()),
    ("max_wait_ms", "up"): ((QUEUE,), ()),
    ("kv_block_size", "up"): ((HELD,), ("kv_pool_exhausted",)),
    ("prefix_cache", "down"): ((PREFILL, QUEUE), ()),
    ("graph_capture", "down"): (
        (
            Effect(
                GRAPH_STEPS,
                "eager",
                "share of steps",
                "the share of steps without a captured graph",
            ),
        ),
        ("graph_capture_lost", "slow_host"),
    ),
    ("shed_below_priority", "up"): (
        (SHED_AWAY,),
        ("shed_by_priority",),
    ),
    ("backpressure", "up"): ((TURNED_AWAY,), ()),
    ("backpressure", "down"): ((WAIT, QUEUE), ()),
    ("tenant_quotas", "up"): ((TURNED_AWAY,), ()),
    ("tenant_quotas", "down"): ((WAIT, QUEUE), ()),
    ("kv_allocator", "contiguous"): (
        (STALLED, QUEUE),
        ("kv_fragmentation", "kv_pool_exhausted"),
    ),
    ("kv_compaction", "down"): ((STALLED,), ("kv_fragmentation",)),
}

# A setting that limits something is felt only where that reaches the smaller of its two values.
REACHES: dict[str, tuple[str, float | None]] = {
    "max_num_seqs": (RUNNING, None),
    "prefill_chunk_tokens": (PROMPT, 0.9),
    "max_num_batched_tokens": (STEP_TOKENS, 0.99),
}


class ConfigChangedByHand:
    slug = "config_changed_by_hand"
    label = gettext_noop("configuration changed by hand")

    def examine(self, scene: Scene) -> Finding:
        seen = [(change, _strongest(scene, change)) for change in _near(scene)]
        change, effect = max(seen, key=lambda one: _blame(scene, one), default=(None, None))
        evidence = (
            counts_requests(scene),
            _changed_fact(scene, change),
            _in_force_fact(scene, change),
            _effect_fact(change, effect),
            *attributed(scene, change),
            traffic_fact(scene, grew=False),
        )
        facts = {}
        remedy: tuple[Wish, ...] = ()
        if change is not None:
            facts = {
                "knob": change.knob,
                "before": change.before,
                "after": change.after,
                "by": change.by,
                "changed_at": change.at.isoformat(),
            }
            why = f"{change.knob} was {change.before} before {change.by} changed it"
            remedy = (Wish(change.knob, change.before, why, exact=True),)
        total = score(evidence)
        return Finding(
            self.slug,
            _with_prior(total) if change is not None else total,
            _because(scene, change, effect),
            facts,
            evidence,
            remedy,
            "" if remedy else "nobody changed a setting",
            explains=_consequences(change),
        )


def _with_prior(share: float) -> float:
    """The score whose odds are PRIOR_ODDS times those of `share`; a refuted one stays refuted."""
    if share < 0.5:
        return share
    return round(PRIOR_ODDS * share / (1 + (PRIOR_ODDS - 1) * share), 3)


def _near(scene: Scene) -> list[Change]:
    """Changes by hand around the onset, oldest first."""
    earliest = scene.bad_since - timedelta(seconds=BEFORE_WINDOWS * scene.window_s)
    latest = scene.bad_since + timedelta(seconds=AFTER_WINDOWS * scene.window_s)
    return [c for c in scene.changes if c.by_hand and earliest <= c.at <= latest]


def _direction(change: Change) -> str:
    """Up or down; of a word that is neither on nor off, the word."""
    if isinstance(change.after, str):
        return {"on": "up", "off": "down"}.get(change.after, change.after)
    if isinstance(change.before, str):
        return "down"
    return "up" if change.after > change.before else "down"


def _effects(change: Change) -> tuple[tuple[Effect, ...], tuple[str, ...]]:
    return EFFECTS.get((change.knob, _direction(change)), ((), ()))


def _consequences(change: Change | None) -> tuple[str, ...]:
    return _effects(change)[1] if change is not None else ()


Seen = tuple[Effect, Track]


def _grown(seen: tuple[Change, Seen | None]) -> float:
    """Now over before of the effect; a metric that was 0 has grown without bound."""
    effect = seen[1]
    if effect is None or effect[1].value is None or effect[1].before is None:
        return 0.0
    now, before = effect[1].value, effect[1].before
    if now < effect[0].least:
        return 0.0
    return now / before if before > 0 else (float("inf") if now > 0 else 0.0)


def _blame(scene: Scene, seen: tuple[Change, Seen | None]) -> tuple[bool, float]:
    """Of several changes, one that does enough by itself before one whose effect is greater."""
    return all(fact.supports for fact in attributed(scene, seen[0])), _grown(seen)


def _strongest(scene: Scene, change: Change) -> Seen | None:
    """The effect of the change that has grown most; None where nothing is known to show it."""
    if not _reached(scene, change):
        return None
    found = [
        (effect, _track(scene, effect))
        for effect in _effects(change)[0]
        if effect not in DOOR or counts_shed(scene)
    ]
    return max(found, key=lambda seen: _grown((change, seen)), default=None)


def _reached(scene: Scene, change: Change) -> bool:
    """Whether what the setting limits comes near it at all; True where that is not measured."""
    metric, quantile = REACHES.get(change.knob, ("", None))
    if not metric or isinstance(change.before, str) or isinstance(change.after, str):
        return True
    if quantile is None:
        reach = scene.gauge(metric, over="max").value
    else:
        histogram = scene.histogram(metric)
        reach = histogram.quantile(quantile) if histogram else None
    return reach is None or reach >= REACH_MIN * min(change.before, change.after)


def _track(scene: Scene, effect: Effect) -> Track:
    if effect.how == "level":
        return scene.gauge(effect.metric)
    if effect.how == "rate":
        return scene.rate(effect.metric)
    if effect.how == "eager":
        return eager_share(scene)
    if effect.how == "held":
        return _held(scene)
    track = scene.means(effect.metric)
    if effect.how == "heavy":
        old, new = (scene.histogram(effect.metric, reference=r) for r in (True, False))
        track = Track(
            old.quantile(0.99) if old else None, new.quantile(0.99) if new else None, track.points
        )
    step = step_time(scene)
    if effect.metric == STEP_TIME and step and step.is_slower and track.value is not None:
        # What no token explains is not what a batch's setting does.
        track = Track(track.before, track.value * (1 - (step.slower or 0.0)), track.points)
    return track


def _held(scene: Scene) -> Track:
    """Of a pool as large as before: what has become of it is not the setting's doing."""
    used, running, grew = scene.gauge(KV_USED), scene.gauge(RUNNING), held_grew(scene)
    if grew is None or not used.before or not running.before:
        return Track(None, None)
    each = used.before / running.before
    return Track(each, each * grew, used.points)


def _changed_fact(scene: Scene, change: Change | None) -> Fact:
    if change is None:
        return measured(
            "Nobody but Trimtab is known to have changed a setting when it began",
            False,
            metric=CHANGES,
            unit="changes",
            value=0.0,
            threshold=1.0,
            required=True,
            weight=2,
        )
    early_s = (scene.bad_since - change.at).total_seconds()
    when = (
        f"{early_s:.0f} s before the first bad window"
        if early_s > 0
        else "during the first bad windows"
    )
    return measured(
        f"{change.by} changed {change.knob} from {change.before} to {change.after} at "
        f"{change.at:%H:%M:%S} UTC, {when}",
        True,
        metric=CHANGES,
        unit="s",
        value=early_s,
        threshold=BEFORE_WINDOWS * scene.window_s,
        required=True,
        weight=2,
    )


def _in_force_fact(scene: Scene, change: Change | None) -> Fact:
    if change is None:
        return measured("No such change is in force", False, metric=CHANGES, weight=0.5)
    now = scene.engine.values.get(change.knob)
    return measured(
        f"{change.knob} is {now} now",
        now == change.after,
        metric="engine:knob",
        value=_shown(scene, change.knob, now),
        threshold=_shown(scene, change.knob, change.after),
        required=True,
    )


def _shown(scene: Scene, knob: str, value: object) -> float | None:
    """A value as the engine's gauge shows it: of a word, its place among the choices."""
    if isinstance(value, str):
        words = scene.engine.words(knob)
        return float(words.index(value)) if value in words else None
    return float(value) if isinstance(value, int | float) else None


def _effect_fact(change: Change | None, seen: Seen | None) -> Fact:
    if change is None or seen is None:
        text = "There is no change whose effect could be seen"
        if change is not None:
            text = (
                f"No effect of {change.knob} at {change.after} instead of {change.before} is to be "
                "seen in what it limits"
            )
        return measured(text, False, metric=CHANGES, required=True)
    effect, track = seen
    if track.value is None or track.before is None:
        text = f"How {effect.word} moved was not measured"
    else:
        text = (
            f"{effect.word[0].upper()}{effect.word[1:]}, which {change.knob} moves, "
            f"was {effect.shown(track.before)} before and is {effect.shown(track.value)}"
        )
    return measured(
        text,
        _grown((change, seen)) >= EFFECT_MIN,
        track=track,
        metric=effect.metric,
        unit=effect.unit,
        threshold=EFFECT_MIN * track.before if track.before is not None else None,
        required=True,
        weight=2,
    )


def _because(scene: Scene, change: Change | None, seen: Seen | None) -> str:
    if change is None:
        return "nobody is known to have changed a setting when it began"
    text = (
        f"{change.by} changed {change.knob} from {change.before} to {change.after} at "
        f"{change.at:%H:%M:%S} UTC"
    )
    if seen and seen[1].value is not None and seen[1].before is not None:
        before, now = map(seen[0].shown, (seen[1].before, seen[1].value))
        text += f" and {seen[0].word} went from {before} to {now}"
    return scene.because(text)


CAUSE = ConfigChangedByHand()
