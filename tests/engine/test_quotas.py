"""What a tenant may ask for: exact buckets, as many as are listed, and nothing charged twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core import Core, Rejected
from engine.knobs import NotPossible
from engine.sched.quotas import TIERS, Bucket, Quotas, Tier, read
from engine.sched.request import Finish, Request
from tests.engine.conftest import request
from tests.engine.test_core import Ends

TIER = Tier(tokens_per_minute=600, burst_tokens=900)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 900), st.integers(0, 900)), max_size=60)
)
def test_a_bucket_holds_what_an_exact_one_holds_and_is_never_below_0_or_above_its_burst(
    orders: list[tuple[int, int, int]],
) -> None:
    """Each order: milliseconds later, tokens to take, tokens of them to give back."""
    bucket, exact = Bucket(TIER), Fraction(900)
    at_ms = 0
    for later_ms, tokens, back in orders:
        at_ms += later_ms
        exact = min(exact + Fraction(later_ms, 100), Fraction(900))
        wait_s = bucket.take(tokens, at_ms / 1000)
        if wait_s == 0:
            exact -= tokens
            bucket.give_back(min(back, tokens), at_ms / 1000)
            exact = min(exact + min(back, tokens), Fraction(900))
        else:
            assert wait_s == pytest.approx(float((tokens - exact) / 10), abs=1e-6)
        assert bucket.level == pytest.approx(float(exact), abs=1e-6)
        assert 0 <= bucket.level <= 900


def test_after_the_wait_it_is_told_a_request_is_let_in_and_not_before() -> None:
    bucket = Bucket(TIER)
    assert bucket.take(900, 5.0) == 0
    wait_s = bucket.take(321, 5.0)
    assert wait_s == pytest.approx(32.1)
    assert bucket.take(321, 5.0 + wait_s - 0.01) > 0
    assert bucket.take(321, 5.0 + wait_s) == 0
    assert bucket.level == pytest.approx(0, abs=1e-6)


def test_a_clock_that_stands_still_or_goes_back_fills_nothing() -> None:
    bucket = Bucket(TIER)
    bucket.take(900, 5.0)
    bucket.give_back(100, 4.0)
    assert bucket.take(101, 5.0) > 0
    assert bucket.level == 100


def served(tenant: str, prompt: int = 10, generated: int = 0, max_tokens: int = 90) -> Request:
    one = request(tenant, [66] * prompt, max_tokens)
    one.tenant, one.generated, one.scheduled = tenant, generated, float(bool(generated))
    return one


def test_what_was_charged_and_not_used_is_given_back_once() -> None:
    subject = Quotas({"acme": "test"})
    one = served("acme", generated=30)
    assert subject.charge(one, 1.0) is None
    assert subject.buckets["acme"].level == 400
    subject.settle(one, 1.0)
    assert (subject.buckets["acme"].level, subject.used["acme"]) == (460, 40)
    subject.settle(one, 1.0)
    assert subject.buckets["acme"].level == 460


def test_a_request_that_never_ran_costs_nothing() -> None:
    subject = Quotas({"acme": "gold"})
    one = served("acme")
    assert subject.charge(one, 1.0) is None
    subject.settle(one, 1.0)
    assert (subject.buckets["acme"].level, subject.used["acme"]) == (18_000, 0)


def test_one_cancelled_after_it_was_sent_back_pays_for_what_it_had_generated() -> None:
    subject = Quotas({"acme": "gold"})
    one = served("acme")
    one.scheduled = 1.0
    subject.charge(one, 1.0)
    one.tokens = one.tokens.repeat(2)[:17]
    subject.settle(one, 1.0)
    assert subject.used["acme"] == 17


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acme", "shop", "who", ""]),
            st.integers(1, 300),
            st.integers(1, 300),
            st.floats(0, 1),
            st.floats(0, 20),
        ),
        max_size=60,
    )
)
def test_no_tenant_gets_more_than_its_burst_and_what_its_minutes_fill(
    orders: list[tuple[str, int, int, float, float]],
) -> None:
    subject = Quotas({"acme": "gold", "shop": "saas"}, model_scale=2.0)
    now, flying = 0.0, []
    for tenant, prompt, most, share, later in orders:
        now += later
        one = served(tenant, prompt, max(1, int(share * most)), most)
        if subject.charge(one, now) is None:
            flying.append(one)
        if len(flying) > 3:
            subject.settle(flying.pop(0), now)
    for one in flying:
        subject.settle(one, now)
    for name, tier in (("acme", TIERS["gold"]), ("shop", TIERS["saas"]), ("other", TIERS["test"])):
        filled = tier.burst_tokens + now * tier.tokens_per_minute / 60
        assert subject.used[name] <= filled + 1e-6
        assert 0 <= subject.buckets[name].level <= tier.burst_tokens
    assert set(subject.used) == {"acme", "shop", "other"}


def test_who_is_not_listed_shares_one_bucket_whatever_he_calls_himself() -> None:
    subject = Quotas({"acme": "gold"})
    refused = [subject.charge(served(f"x{i}"), 1.0) for i in range(6)]
    assert [bool(one) for one in refused] == [False] * 5 + [True]
    last = refused[-1]
    assert last is not None
    assert (last.reason, last.status, last.retry_after_s) == ("tenant_quota", 503, 12)
    assert last.message == (
        "x-tenant other, tier test: 100 tokens asked for, left: 0; allowed: 500 a minute"
    )
    assert len(subject.buckets) == 2


def test_more_than_a_burst_at_once_can_never_be_served_and_is_told_so() -> None:
    subject = Quotas({"acme": "saas"}, model_scale=2.0)
    refused = subject.charge(served("acme", 2000, max_tokens=1001), 1.0)
    assert refused is not None
    assert (refused.reason, refused.status, refused.retry_after_s) == ("tenant_burst", 400, None)
    assert refused.message == (
        "x-tenant acme, tier saas: 6002 tokens asked for at once, allowed: 6000"
    )
    assert subject.throttled == {"quota": 0, "burst": 1}
    assert subject.buckets["acme"].level == 6000


def written(folder: Path, content: object) -> Path:
    path = folder / "tenants.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_names_tenants_and_may_change_tiers_or_add_one(tmp_path: Path) -> None:
    tiers = {"test": {"status": 429}, "own": {"tokens_per_minute": 60, "burst_tokens": 70}}
    found = read(
        written(
            tmp_path, {"tenants": {"a": "gold", "b": "own"}, "tiers": tiers, "model_scale": 0.5}
        )
    )
    assert {name: bucket.tier for name, bucket in found.buckets.items()} == {
        "a": Tier(12_000, 18_000, 429),
        "b": Tier(60, 70, 429),
        "other": Tier(500, 500, 429),
    }
    assert found.cost(8) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting property name"),
        ([], 'want an object of "tenants", "tiers", "model_scale"'),
        ({"tenant": {}}, 'want an object of "tenants", "tiers", "model_scale"'),
        ({}, "tenants: want an object of 1 to 256 names with their tier"),
        ({"tenants": {}}, "tenants: want an object of 1 to 256 names with their tier"),
        ({"tenants": {"a": "silver"}}, "tenants.a: got 'silver', allowed: gold, saas, test"),
        ({"tenants": {"a": []}}, r"tenants.a: got \[\], allowed: gold, saas, test"),
        ({"tenants": {"other": "gold"}}, "tenants: got 'other', allowed: 1 to 64 characters"),
        ({"tenants": {"": "gold"}}, "tenants: got '', allowed: 1 to 64 characters"),
        ({"tenants": {"a": "gold"}, "model_scale": 0}, "model_scale: got 0, allowed: above 0"),
        (
            {"tenants": {"a": "gold"}, "tiers": {"x": 3}},
            "tiers.x: got 3, want tokens_per_minute and burst",
        ),
        (
            {"tenants": {"a": "gold"}, "tiers": {"gold": {"rate": 3}}},
            "tiers.gold: got {'rate': 3}, want",
        ),
        (
            {"tenants": {"a": "gold"}, "tiers": {"x": {"tokens_per_minute": 5}}},
            "tiers.x: got .*, want .*whole numbers from 1",
        ),
        ({"tenants": {"a": "gold"}, "tiers": {"gold": {"status": 200}}}, "429 or 503"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_field(
    tmp_path: Path, content: object, words: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.fixture
def served_core(tmp_path: Path) -> Iterator[tuple[Core, Ends]]:
    ends = Ends()
    tenants = written(tmp_path, {"tenants": {"acme": "test"}})
    core = Core(EngineConfig(tenants=tenants, queue_requests_max=3), ends)
    yield core, ends
    core.stop()


def test_the_engine_charges_what_it_takes_in_and_settles_however_it_ends(
    served_core: tuple[Core, Ends],
) -> None:
    core, ends = served_core
    core.start()
    core.runtime.change({"tenant_quotas": "on"}, 1, "test")
    bucket = core.quotas.buckets["acme"]

    def ask(name: str, max_tokens: int) -> Request:
        one = request(name, [66] * 10, max_tokens)
        one.tenant = "acme"
        core.submit(one)
        return one

    ask("ends", 20)
    ends.wait(1)
    assert core.quotas.used["acme"] == 30
    core.pause(True)
    gone = ask("gone", 450)
    with pytest.raises(Rejected, match="x-tenant acme, tier test: 460 tokens asked") as caught:
        ask("too much", 450)
    assert caught.value.status == 503
    assert core.metrics.rejected["tenant_quota"] == 1
    core.cancel(gone)
    assert ends.wait(2)[1].finish is Finish.ABORT
    assert core.quotas.used["acme"] == 30
    assert 470 <= bucket.level <= 500


def test_who_is_turned_away_for_another_reason_is_not_charged(
    served_core: tuple[Core, Ends],
) -> None:
    core, _ = served_core
    core.start()
    core.pause(True)
    core.runtime.change({"tenant_quotas": "on"}, 1, "test")
    for i in range(4):
        one = request(str(i), [66] * 10, 10)
        one.tenant = "acme"
        if i < 3:
            core.submit(one)
        else:
            with pytest.raises(Rejected, match="3 requests are waiting"):
                core.submit(one)
    assert core.quotas.buckets["acme"].level == pytest.approx(440, abs=20)
    assert one.charged == 0


def test_quotas_without_a_list_are_refused_and_said_not_to_be_supported(tmp_path: Path) -> None:
    ends = Ends()
    core = Core(EngineConfig(state=tmp_path), ends)
    core.start()
    with pytest.raises(NotPossible, match="tenant_quotas: no tenants are listed; start"):
        core.runtime.change({"tenant_quotas": "on"}, 1, "test")
    core.stop()
    assert core.runtime.running.config.tenant_quotas == "off"
    assert list(core.barrier.unsupported) == ["tenant_quotas"]


def test_a_restart_without_the_list_that_quotas_need_says_so(tmp_path: Path) -> None:
    tenants = written(tmp_path, {"tenants": {"acme": "gold"}})
    core = Core(EngineConfig(tenants=tenants, state=tmp_path), Ends())
    core.start()
    core.runtime.change({"tenant_quotas": "on"}, 1, "test")
    core.stop()
    with pytest.raises(NotPossible, match="no tenants are listed"):
        Core(EngineConfig(state=tmp_path), Ends())
    again = Core(EngineConfig(tenants=tenants, state=tmp_path), Ends())
    again.start()
    again.stop()
    assert again.runtime.running.config.tenant_quotas == "on"
