"""What each tenant may ask for: a token bucket each, by the tier it is in.

A request costs its prompt's tokens and those it may generate, times the model's scale. All of it is
taken at the door; when the request ends, however it does, what was not used is given back. A bucket
holds at most its burst, and fills continuously with its tokens a minute; it is never below 0.

Only listed tenants have a bucket of their own; all others share one (UNLISTED). So buckets, and
labels of metrics, are as many as the list is long, whatever clients write into the header.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.sched.request import Request

TENANTS_MAX = 256
TENANT_CHARS_MAX = 64
TIERS_MAX = 16
UNLISTED = "other"
REASONS = ("quota", "burst")  # too little is left now; more than the bucket ever holds
TOKENS_MAX = 10**12
NEVER = 400  # the status of a request that no wait would let in
SLACK_TOKENS = 1e-6  # a bucket that filled for exactly long enough is full enough, rounding or not


@dataclass(frozen=True)
class Tier:
    """`status`: what a request beyond it is answered, 429 or 503."""

    tokens_per_minute: int
    burst_tokens: int
    status: int = 429


TIERS = {
    "gold": Tier(12_000, 18_000),
    "saas": Tier(3_000, 6_000),
    "test": Tier(500, 500, 503),
}


@dataclass(frozen=True)
class Refusal:
    """Why a request is not let in; `retry_after_s` is None when waiting would not help."""

    reason: str
    message: str
    status: int
    retry_after_s: int | None


class Bucket:
    """Full at first. Times are monotonic seconds; earlier ones than the last count as the last."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.level = float(tier.burst_tokens)
        self.filled_at = -math.inf

    @property
    def tokens_per_s(self) -> float:
        return self.tier.tokens_per_minute / 60

    def fill(self, now: float) -> None:
        if now > self.filled_at:
            grown = self.level + (now - self.filled_at) * self.tokens_per_s
            self.level = min(grown, float(self.tier.burst_tokens))
            self.filled_at = now

    def take(self, cost: float, now: float) -> float:
        """0.0 when `cost` was taken; else nothing was, and in so many seconds it can be."""
        self.fill(now)
        missing = cost - self.level
        if missing > SLACK_TOKENS:
            return missing / self.tokens_per_s
        self.level = max(0.0, self.level - cost)
        return 0.0

    def give_back(self, tokens: float, now: float) -> None:
        self.fill(now)
        self.level = min(self.level + tokens, float(self.tier.burst_tokens))


class Quotas:
    """All buckets of one engine. `charge` and `settle` may be called by any thread."""

    def __init__(
        self,
        tenants: Mapping[str, str],
        tiers: Mapping[str, Tier] = TIERS,
        model_scale: float = 1.0,
    ) -> None:
        """`tenants`: name → name of its tier. `model_scale`: what a token of this model counts."""
        self.model_scale = model_scale
        self.tier_names = {**tenants, UNLISTED: "test"}
        self.buckets = {name: Bucket(tiers[tier]) for name, tier in self.tier_names.items()}
        self.listed = bool(tenants)
        self.used = dict.fromkeys(self.buckets, 0.0)
        self.throttled = dict.fromkeys(REASONS, 0)
        self.lock = threading.Lock()

    def cost(self, tokens: int) -> float:
        return 1.0 * tokens * self.model_scale

    def charge(self, request: Request, now: float) -> Refusal | None:
        """Takes what the request may come to; says why not when its tenant has not so much."""
        name = self._known(request.tenant)
        tier, cost = self.buckets[name].tier, self.cost(request.limit)
        who = f"x-tenant {name}, tier {self.tier_names[name]}"
        with self.lock:
            if cost > tier.burst_tokens:
                self.throttled["burst"] += 1
                return Refusal(
                    "tenant_burst",
                    f"{who}: {cost:g} tokens asked for at once, allowed: {tier.burst_tokens}",
                    NEVER,
                    None,
                )
            wait_s = self.buckets[name].take(cost, now)
            if wait_s > 0:
                self.throttled["quota"] += 1
                return Refusal(
                    "tenant_quota",
                    f"{who}: {cost:g} tokens asked for, left: {self.buckets[name].level:.0f}; "
                    f"allowed: {tier.tokens_per_minute} a minute",
                    tier.status,
                    math.ceil(wait_s),
                )
            request.charged = cost
        return None

    def settle(self, request: Request, now: float) -> None:
        """A request has ended: counts what it used, and gives the rest of its charge back."""
        generated = max(request.generated, len(request.tokens) - request.prompt_tokens)
        used = self.cost(request.prompt_tokens + generated if request.scheduled else 0)
        name = self._known(request.tenant)
        with self.lock:
            self.used[name] += used
            if request.charged:
                self.buckets[name].give_back(request.charged - used, now)
                request.charged = 0.0

    def _known(self, tenant: str) -> str:
        return tenant if tenant in self.buckets else UNLISTED


def read(path: Path) -> Quotas:
    """From a JSON file: `tenants` (name → tier), and if need be `tiers` (name → the fields of Tier)
    and `model_scale`. Raises ValueError naming the file, the field and what is allowed, or OSError.
    """
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or set(found) - {"tenants", "tiers", "model_scale"}:
            raise ValueError('want an object of "tenants", "tiers", "model_scale"')
        tiers = {**TIERS, **_tiers(found.get("tiers", {}))}
        scale = found.get("model_scale", 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1e6:
            raise ValueError(f"model_scale: got {scale!r}, allowed: above 0 to 1000000")
        return Quotas(_tenants(found.get("tenants"), tiers), tiers, float(scale))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _tenants(found: Any, tiers: Mapping[str, Tier]) -> dict[str, str]:
    if not isinstance(found, dict) or not 1 <= len(found) <= TENANTS_MAX:
        raise ValueError(f"tenants: want an object of 1 to {TENANTS_MAX} names with their tier")
    for name, tier in found.items():
        if not 1 <= len(name) <= TENANT_CHARS_MAX or name == UNLISTED:
            raise ValueError(
                f"tenants: got {name!r}, allowed: 1 to {TENANT_CHARS_MAX} characters, but not "
                f"{UNLISTED!r}, which is who is not listed"
            )
        if not isinstance(tier, str) or tier not in tiers:
            raise ValueError(f"tenants.{name}: got {tier!r}, allowed: {', '.join(tiers)}")
    return found


def _tiers(found: Any) -> dict[str, Tier]:
    if not isinstance(found, dict) or len(found) > TIERS_MAX:
        raise ValueError(f"tiers: want an object of at most {TIERS_MAX} tiers by name")
    known = {field.name for field in fields(Tier)}
    made = {}
    for name, given in found.items():
        want = (
            f"tiers.{name}: got {given!r}, want tokens_per_minute and burst_tokens (whole numbers "
            f"from 1 to {TOKENS_MAX}) and, if need be, status (429 or 503)"
        )
        if not isinstance(given, dict) or set(given) - known:
            raise ValueError(want)
        tier = replace(TIERS.get(name, Tier(0, 0)), **given)
        amounts = (tier.tokens_per_minute, tier.burst_tokens)
        whole = all(type(amount) is int and 1 <= amount <= TOKENS_MAX for amount in amounts)
        if not whole or tier.status not in (429, 503):
            raise ValueError(want)
        made[name] = tier
    return made
