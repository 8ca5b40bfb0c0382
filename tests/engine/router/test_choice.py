"""Who gets a request, over many of them."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.router.choice import BLOCK_BYTES, By, Choice, Residents, Wanted, wanted
from engine.router.config import Upstream
from engine.router.fleet import Engine
from engine.router.knobs import RouterSettings


class House:
    """Engines without processes and load, and the choice among them."""

    def __init__(self, **weights: int) -> None:
        upstreams = [Upstream(name, f"http://{name}", weight) for name, weight in weights.items()]
        self.engines = [Engine(each, 1 << i) for i, each in enumerate(upstreams)]
        self.settings = RouterSettings.of(upstreams)
        self.choice = Choice()

    def ask(self, request: Wanted, now: float = 1.0) -> tuple[str, By]:
        engine, by = self.choice.of(request, self.engines, self.settings, now)
        return engine.name, by

    def load(self, **loads: int) -> None:
        for engine in self.engines:
            engine.in_flight = loads.get(engine.name, 0)


def session(name: str) -> Wanted:
    return wanted({"prompt": "hello"}, session=name, tenant="")


def prompt(text: str) -> Wanted:
    return wanted({"prompt": text}, session="", tenant="")


def test_a_canary_of_20_gets_a_fifth_of_the_sessions_and_keeps_each() -> None:
    house = House(a=80, b=20)
    first = {f"s{i}": house.ask(session(f"s{i}"))[0] for i in range(2000)}
    share = Counter(first.values())["b"] / 2000
    assert 0.17 <= share <= 0.23  # of a binomial: 3.3 standard deviations
    fresh = House(a=80, b=20)  # another router, which remembers nothing
    assert all(fresh.ask(session(name))[0] == engine for name, engine in first.items())


def test_an_engine_that_leaves_moves_nobody_elses_sessions() -> None:
    all_three, two = House(a=100, b=100, c=100), House(a=100, b=100)
    for i in range(300):
        before, after = all_three.ask(session(str(i)))[0], two.ask(session(str(i)))[0]
        assert before in (after, "c")


def test_what_has_no_key_goes_as_the_weights_say() -> None:
    house = House(a=80, b=20)
    counts = Counter(house.ask(Wanted())[0] for _ in range(500))
    assert counts == {"a": 400, "b": 100}


def test_an_engine_that_comes_back_does_not_catch_up() -> None:
    house = House(a=100, b=100)
    both = house.engines
    house.engines = both[:1]
    for _ in range(100):
        house.ask(Wanted())
    house.engines = both
    counts = Counter(house.ask(Wanted())[0] for _ in range(10))
    assert abs(counts["a"] - counts["b"]) <= 1


def test_equal_engines_get_what_has_no_key_by_their_load() -> None:
    house = House(a=100, b=100)
    house.load(a=3, b=1)
    assert {house.ask(Wanted())[0] for _ in range(5)} == {"b"}


def test_prompts_that_begin_alike_go_where_the_longest_beginning_went() -> None:
    house = House(a=100, b=100)
    system, talk = "s" * 2 * BLOCK_BYTES, "t" * 4 * BLOCK_BYTES
    engine, by = house.ask(prompt(system + talk))
    assert by is By.HASH
    house.load(**{engine: 1})
    assert house.ask(prompt(system + talk + "u" * 3 * BLOCK_BYTES)) == (engine, By.PREFIX)
    assert house.choice.matched >= 5


def test_a_prefix_that_many_share_does_not_overload_the_engine_it_is_on() -> None:
    house = House(a=100, b=100, c=100)
    system = "s" * 6 * BLOCK_BYTES
    loads: Counter[str] = Counter()
    for i in range(90):  # none of them ends
        name, _ = house.ask(prompt(system + f"{i:02}" * BLOCK_BYTES))
        loads[name] += 1
        house.load(**loads)
    assert max(loads.values()) <= 1.5 * 30 + 1


def test_a_short_prefix_that_all_share_binds_nobody() -> None:
    house = House(a=80, b=20)
    system = "s" * 2 * BLOCK_BYTES
    prompts = [prompt(system + f"{i:04}" * BLOCK_BYTES) for i in range(1000)]
    counts = Counter(house.ask(each) for each in prompts)
    assert 0.16 <= counts["b", By.HASH] / 1000 <= 0.24  # 3.2 standard deviations
    assert counts["a", By.HASH] + counts["b", By.HASH] == 1000


@pytest.mark.parametrize(("load", "stays"), [(2, True), (8, False)])
def test_a_hot_session_stays_beyond_the_bound_of_others_and_not_beyond_its_own(
    load: int, stays: bool
) -> None:
    house = House(a=100, b=100)
    engine, _ = house.ask(session("x"))
    house.load(**{engine: load})  # of 3 it may have 3 (125 %: 2), of 9 it may have 7
    other = next(each.name for each in house.engines if each.name != engine)
    expected = (engine, By.SESSION) if stays else (other, By.SPILLED)
    assert house.ask(session("x")) == expected
    cold = house.ask(Wanted(tenant=session("x").session))
    assert cold == (other, By.SPILLED)


def test_a_session_that_was_moved_stays_where_it_is_now_until_it_is_forgotten() -> None:
    house = House(a=100, b=100)
    both = house.engines
    engine, _ = house.ask(session("x"))
    house.engines = [each for each in both if each.name != engine]
    moved, _ = house.ask(session("x"), now=2.0)
    house.engines = both
    assert house.ask(session("x"), now=3.0) == (moved, By.SESSION)
    assert house.ask(session("x"), now=400.0) == (engine, By.HASH)


def test_by_turns_and_by_load_alone() -> None:
    house = House(a=100, b=100)
    house.settings = house.settings.replaced({"policy": "round_robin"})
    assert [house.ask(session("x"))[0] for _ in range(4)] == ["a", "b", "a", "b"]
    house.settings = house.settings.replaced({"policy": "least_loaded"})
    house.load(a=2, b=3)
    assert house.ask(session("x"))[0] == "a"


def test_sessions_of_two_tenants_salts_and_models_are_not_one() -> None:
    text = "x" * BLOCK_BYTES
    one = wanted({"prompt": text}, session="s", tenant="t")
    assert wanted({"prompt": text}, session="s", tenant="u").session != one.session
    assert wanted({"prompt": text, "cache_salt": "c"}, session="", tenant="").blocks != one.blocks
    assert wanted({"prompt": text, "model": "m"}, session="", tenant="").blocks != one.blocks
    assert wanted({"prompt": text, "user": "s"}, session="", tenant="t").session == one.session


def test_messages_and_token_ids_have_beginnings_too() -> None:
    said = [{"role": "system", "content": "x" * 600}, {"role": "user", "content": "hello"}]
    more = [*said, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "y" * 600}]
    short = wanted({"messages": said}, session="", tenant="").blocks
    assert short == wanted({"messages": more}, session="", tenant="").blocks[: len(short)] != ()
    ids = list(range(200))
    assert wanted({"prompt": ids}, session="", tenant="").blocks != ()


def test_the_keys_longest_unused_are_forgotten_first() -> None:
    residents = Residents(most=2)
    for name in (b"a", b"b", b"a", b"c"):
        residents.put(name, 1, 1.0)
    assert [residents.where(name, 0.0) for name in (b"a", b"b", b"c")] == [1, 0, 1]
