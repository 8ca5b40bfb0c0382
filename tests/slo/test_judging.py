from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from pytest_django import Settings

from controlplane.accounts.models import Tenant
from slo import judging
from slo.budget import Counts
from slo.models import Objective, Reading
from slo.readings import counts_between
from slo.services import Judgement, objectives_judge
from tests.kills import killed_at_every_statement
from tests.memory_reader import MemoryReader
from tests.slo.fleet_of_samples import (
    SETTLED,
    START,
    TTFT,
    WINDOW,
    Engine,
    a_tenant,
    an_objective,
)
from tracing.types import Grid, HistogramSeries, Labels, Signal, Span

pytestmark = pytest.mark.django_db


@pytest.fixture
def objective(tenant: Tenant) -> Objective:
    return an_objective(tenant)


@pytest.fixture
def reader() -> MemoryReader:
    return MemoryReader()


def judge(tenant: Tenant, reader: MemoryReader, at: datetime) -> list[Judgement]:
    return objectives_judge(tenant=tenant, reader=reader, now=at + SETTLED)


def span_ending(at: datetime) -> Span:
    began_ns = int((at.timestamp() - 1) * 1e9)
    return Span("t", "s", "", "llm_request", 2, "chat", "engine-0", began_ns, 10**9, 0)


def last(judgements: list[Judgement], scope: str = "") -> Judgement:
    return [j for j in judgements if j.scope == scope][-1]


def test_a_window_is_judged_once_its_data_had_time_to_arrive(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    end = Engine(reader).serve(90, 10, windows=8)
    early = objectives_judge(tenant=tenant, reader=reader, now=end + timedelta(seconds=6))
    assert last(early).window_end == end - WINDOW
    (engine, whole) = judge(tenant, reader, end)
    assert (engine.scope, whole.scope) == ("engine-0", "")
    assert (whole.window_end, whole.good, whole.total) == (end, 90, 100)
    assert whole.bad_share == pytest.approx(0.10)
    assert whole.burn == pytest.approx(10)
    assert whole.fresh
    assert judge(tenant, reader, end) == []


def test_what_cannot_be_a_count_spoils_no_sum(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(90, 10, windows=4))
    engine.counts[1] += 1e300
    bad = engine.serve(0, 0)
    newest = last(judge(tenant, reader, bad))
    assert (newest.window_end, newest.total, newest.bad) == (bad, 0, False)
    assert newest.signal != Signal.OK
    engine.counts = [0.0] * 5  # it starts anew
    end = engine.serve(90, 10, windows=4)
    judge(tenant, reader, end)
    assert counts_between(objective, "", bad, end) == Counts(360, 400)
    assert counts_between(objective, "", START, end) == Counts(720, 800)


def test_a_window_is_judged_at_once_when_each_engine_was_heard_of_at_its_end(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    one, two = Engine(reader, "engine-0"), Engine(reader, "engine-1")
    one.serve(90, 10)
    judge(tenant, reader, two.serve(90, 10))
    end = two.serve(90, 10)
    one.scrape(end - timedelta(seconds=10))
    one.scrape(end - timedelta(seconds=5))
    now = end + timedelta(seconds=1)
    assert objectives_judge(tenant=tenant, reader=reader, now=now) == []  # engine-0 is to come
    one.counts[1:3] = [140, 60]
    one.scrape(end - timedelta(seconds=0.6))  # an agent's last of the window
    found = objectives_judge(tenant=tenant, reader=reader, now=now)
    assert [(j.scope, j.window_end, j.good) for j in found] == [
        ("engine-0", end, 50),
        ("engine-1", end, 90),
        ("", end, 140),
    ]


def test_an_engine_that_left_is_not_waited_for(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    left, stays = Engine(reader, "engine-0"), Engine(reader, "engine-1")
    left.serve(90, 10)
    judge(tenant, reader, stays.serve(90, 10))
    judge(tenant, reader, stays.serve(90, 10))
    end = stays.serve(90, 10)
    found = objectives_judge(tenant=tenant, reader=reader, now=end + timedelta(seconds=1))
    newest = {j.scope: j.signal for j in found if j.window_end == end}
    assert newest == {"engine-0": Signal.STALE, "engine-1": Signal.OK, "": Signal.OK}


def test_engines_beyond_those_judged_one_by_one_are_given_their_time(
    tenant: Tenant, objective: Objective, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "SCOPES_PER_OBJECTIVE_MAX", 1)
    one, two = Engine(reader, "engine-0"), Engine(reader, "engine-1")
    two.serve(90, 10)
    judge(tenant, reader, one.serve(90, 10))
    end = one.serve(90, 10)
    now = end + timedelta(seconds=1)
    assert objectives_judge(tenant=tenant, reader=reader, now=now) == []
    two.serve(50, 50)
    assert last(judge(tenant, reader, end)).good == 140


def test_spans_that_came_do_not_tell_that_all_came(tenant: Tenant, reader: MemoryReader) -> None:
    an_objective(tenant, spec={"source": "spans", "threshold_ms": 500})
    reader.stored_spans += [span_ending(START + timedelta(seconds=s)) for s in range(1, 40)]
    judge(tenant, reader, START + WINDOW)
    end = START + 2 * WINDOW
    assert objectives_judge(tenant=tenant, reader=reader, now=end + timedelta(seconds=6)) == []
    assert last(judge(tenant, reader, end)).window_end == end


def test_a_window_over_the_fast_burn_is_bad(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    assert not last(judge(tenant, reader, engine.serve(86, 14))).bad
    assert last(judge(tenant, reader, engine.serve(85, 15))).bad
    assert not last(judge(tenant, reader, engine.serve(0, 19))).bad


def test_a_fresh_install_with_everything_failing_is_bad_from_the_first_window(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    """The fast rule needs no history; the pairs wait until their share of the budget is gone."""
    engine = Engine(reader)
    verdicts = [last(judge(tenant, reader, engine.serve(0, 50))) for _ in range(20)]
    assert all(v.bad and v.fresh for v in verdicts)
    assert not any(p.firing for p in verdicts[-1].pairs)
    nine_minutes = [last(judge(tenant, reader, engine.serve(0, 50))) for _ in range(16)]
    assert [p.name for p in nine_minutes[-1].pairs if p.firing] == ["1h/5m"]


def test_each_engine_and_the_service_have_their_own_scope(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    one, two = Engine(reader, "engine-0"), Engine(reader, "engine-1")
    Engine(reader, "engine-9", service="other").serve(1, 1)
    one.serve(100, 0)
    judgements = judge(tenant, reader, two.serve(50, 50))
    newest = {j.scope: (j.good, j.total, j.bad) for j in judgements if j.total}
    assert newest == {
        "engine-0": (100, 100, False),
        "engine-1": (50, 100, True),
        "": (150, 200, True),
    }


def test_signals_tell_quiet_stale_and_missing_apart(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    assert last(judge(tenant, reader, START)).signal == Signal.MISSING
    engine = Engine(reader)
    assert last(judge(tenant, reader, engine.serve(10, 0))).signal == Signal.OK
    quiet = last(judge(tenant, reader, engine.serve(0, 0)))
    assert (quiet.signal, quiet.bad_share, quiet.burn, quiet.bad) == (
        Signal.NO_TRAFFIC, None, None, False,
    )  # fmt: skip
    silent = judge(tenant, reader, engine.silence(windows=1))
    assert {j.scope: j.signal for j in silent} == {"engine-0": "stale", "": "stale"}


def test_samples_that_stop_inside_a_window_leave_it_stale_but_counted(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    end = engine.serve(10, 0)
    engine.counts[2] += 50
    engine.scrape(end + timedelta(seconds=4))
    judgement = last(judge(tenant, reader, end + WINDOW))
    assert (judgement.signal, judgement.bad, judgement.total) == (Signal.STALE, False, 50)


def test_late_data_amend_the_window_and_the_budget(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(10, 0))
    judge(tenant, reader, engine.silence(windows=1))
    for seconds in (5, 10, 15):
        late = START + WINDOW + timedelta(seconds=seconds)
        reader.add(TTFT, late, (0, 10, 2 * seconds, 0, 0), engine.labels)
    judgements = judge(tenant, reader, START + 3 * WINDOW)
    late_ones = [j for j in judgements if j.window_end == START + 2 * WINDOW]
    assert {(j.scope, j.total, j.signal, j.fresh) for j in late_ones} == {
        ("engine-0", 30, Signal.OK, True),
        ("", 30, Signal.OK, True),
    }
    reader.add(TTFT, START + 2 * WINDOW, (0, 10, 31, 0, 0), engine.labels)
    judgements = judge(tenant, reader, START + 4 * WINDOW)
    amended = [j for j in judgements if j.window_end == START + 2 * WINDOW]
    assert {(j.total, j.fresh) for j in amended} == {(31, False)}
    assert counts_between(objective, "", START, START + 3 * WINDOW) == Counts(10, 41)


def test_a_replayed_spool_fills_a_gap_older_than_eight_windows(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(10, 0))
    before_gap = list(engine.counts)
    for window in range(20):
        judge(tenant, reader, engine.silence(windows=1))
        assert engine.window == window + 2
    engine.counts[2] += 40
    judge(tenant, reader, engine.serve(10, 0))
    assert counts_between(objective, "", START, START + 22 * WINDOW) == Counts(20, 60)
    in_gap = START + timedelta(seconds=100)
    engine.reader.add(TTFT, in_gap, (*before_gap[:2], 40, 0, 0), engine.labels)
    judge(tenant, reader, engine.serve(10, 0))
    assert counts_between(objective, "", START, START + 23 * WINDOW) == Counts(30, 70)
    booked_in = Reading.objects.get(scope="", window_end=START + 7 * WINDOW)
    assert (booked_in.good, booked_in.total, booked_in.signal) == (0, 40, Signal.OK)


def test_a_control_plane_that_slept_catches_up(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(10, 0))
    end = engine.serve(9, 1, windows=100)
    judgements = judge(tenant, reader, end)
    whole = [j for j in judgements if j.scope == ""]
    assert [j.fresh for j in whole] == [False] * 92 + [True] * 8
    assert [j.window_end for j in judgements] == sorted(j.window_end for j in judgements)
    assert counts_between(objective, "", START, end) == Counts(910, 1_010)


def test_a_long_sleep_is_made_up_for_in_bounded_passes(
    tenant: Tenant, objective: Objective, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "CATCH_UP_WINDOWS_MAX", 20)
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(10, 0))
    end = engine.serve(9, 1, windows=60)
    passes = [judge(tenant, reader, end) for _ in range(4)]
    whole = [len([j for j in judgements if j.scope == ""]) for judgements in passes]
    assert whole == [20, 20, 20, 0]
    paired = [any(j.pairs for j in judgements) for judgements in passes]
    assert paired == [False, False, True, False]
    assert counts_between(objective, "", START, end) == Counts(550, 610)


def test_windows_older_than_the_spool_are_given_up(
    tenant: Tenant, objective: Objective, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "CATCH_UP_WITHIN", 30 * WINDOW)
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(10, 0))
    end = engine.serve(10, 0, windows=40)
    judge(tenant, reader, end)
    assert counts_between(objective, "", START, end) == Counts(310, 310)


def test_a_long_cut_is_counted_once_the_spool_was_replayed(
    tenant: Tenant, objective: Objective, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than one pass reads, and of one engine of two, whose own rows end after an hour."""
    monkeypatch.setattr(judging, "CATCH_UP_WINDOWS_MAX", 20)
    engine, other = Engine(reader), Engine(reader, "engine-1")
    spool = Engine(MemoryReader())
    for one in (engine, other, spool):
        end = one.serve(10, 0, windows=8)
    judge(tenant, reader, end)
    spool.serve(6, 4, windows=60)
    engine.silence(windows=60)
    for _ in range(3):
        judge(tenant, reader, other.serve(10, 0, windows=20))
    Reading.objects.filter(scope="engine-0", window_end__gt=START + 20 * WINDOW).delete()
    engine.counts = list(spool.counts)
    for one in (other, engine):
        end = one.serve(10, 0)
    judge(tenant, reader, end)
    for samples in spool.reader.samples[TTFT].values():
        for at, counts in samples[25:]:
            reader.add(TTFT, at, counts, engine.labels)
    for _ in range(6):
        for one in (other, engine):
            end = one.serve(10, 0)
        judge(tenant, reader, end)
    assert counts_between(objective, "engine-0", START, end) == Counts(510, 750)
    assert counts_between(objective, "", START, end) == Counts(510 + 750, 1_500)
    heard = Reading.objects.filter(scope="engine-0")
    assert (heard.count(), heard.exclude(signal=Signal.OK).count()) == (75, 0)


def test_data_25_s_late_are_bad_news_all_the_same(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    bad_and_fresh: list[datetime] = []
    for _ in range(10):
        end = engine.serve(50, 50)
        late = judge(tenant, reader, end + timedelta(seconds=25))
        bad_and_fresh += [j.window_end for j in late if j.scope == "" and j.bad and j.fresh]
    assert len(bad_and_fresh) == len(set(bad_and_fresh)) >= 8


def test_a_clock_set_back_does_not_stop_judging(
    tenant: Tenant, objective: Objective, reader: MemoryReader, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(10, 0))
    judge(tenant, reader, START + timedelta(hours=2))
    judge(tenant, reader, engine.serve(0, 100))
    judgements = judge(tenant, reader, engine.serve(0, 100))
    judged = {(j.window_end, j.bad, j.fresh) for j in judgements if j.scope == ""}
    assert judged == {(START + n * WINDOW, True, True) for n in (2, 3)}
    assert "the clock was set back" in caplog.text
    assert not Reading.objects.filter(window_end__gt=START + 3 * WINDOW).exists()


def test_another_window_width_counts_no_event_twice(
    tenant: Tenant, objective: Objective, reader: MemoryReader, settings: Settings
) -> None:
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(10, 0, windows=5))
    settings.TRIMTAB_CONTROL_WINDOW_S = 10
    end = engine.serve(10, 0, windows=5)
    judge(tenant, reader, end)
    end = engine.serve(10, 0, windows=2)
    judge(tenant, reader, end)
    assert counts_between(objective, "", START, end) == Counts(120, 120)


def test_widths_that_are_no_binary_fraction_stay_on_one_grid(
    tenant: Tenant, objective: Objective, reader: MemoryReader, settings: Settings
) -> None:
    settings.TRIMTAB_CONTROL_WINDOW_S = 10.1
    engine = Engine(reader)
    for _ in range(6):
        end = engine.serve(10, 0, windows=3)
        judge(tenant, reader, end)
    ends = list(Reading.objects.filter(scope="").order_by("window_end").values_list("window_end"))
    gaps = {(b - a).total_seconds() for (a,), (b,) in pairwise(ends)}
    assert gaps == {10.1}


def test_spans_are_judged_too(tenant: Tenant, reader: MemoryReader) -> None:
    an_objective(tenant, spec={"source": "spans", "threshold_ms": 500})
    assert last(judge(tenant, reader, START)).signal == Signal.MISSING
    reader.stored_spans += [span_ending(START + timedelta(seconds=1))] * 30
    judgement = last(judge(tenant, reader, START + WINDOW), "engine-0")
    assert (judgement.total, judgement.bad, judgement.signal) == (30, True, Signal.OK)
    assert last(judge(tenant, reader, START + 2 * WINDOW)).signal == Signal.NO_TRAFFIC


def test_a_threshold_the_histogram_cannot_answer_is_a_problem_until_it_can(
    tenant: Tenant, reader: MemoryReader
) -> None:
    objective = an_objective(tenant, spec={"threshold_ms": 300})
    end = Engine(reader).serve(10, 0)
    assert judge(tenant, reader, end) == []
    objective.refresh_from_db()
    assert "threshold_ms=300.0: allowed: a bucket edge of" in objective.problem
    reader.bounds[TTFT] = [0.25, 0.3, 1.0]
    assert judge(tenant, reader, end)
    objective.refresh_from_db()
    assert objective.problem == ""


class HalfBroken(MemoryReader):
    """A store that fails for one metric."""

    def histogram(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: object = ()
    ) -> list[HistogramSeries]:
        if metric == "broken":
            raise OSError("disk on fire")
        return super().histogram(metric, grid, where=where, by=("instance",))


def test_one_broken_objective_does_not_stop_the_others(
    tenant: Tenant, objective: Objective, caplog: pytest.LogCaptureFixture
) -> None:
    an_objective(tenant, slug="a-broken", spec={"metric": "broken", "threshold_ms": 500})
    reader = HalfBroken()
    judgements = judge(tenant, reader, Engine(reader).serve(10, 0))
    assert {j.objective.slug for j in judgements} == {"chat-ttft"}
    assert "objective a-broken was not judged" in caplog.text


def test_disabled_objectives_and_other_tenants_are_left_alone(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    an_objective(a_tenant("other"))
    an_objective(tenant, slug="off", enabled=False)
    judgements = judge(tenant, reader, Engine(reader).serve(10, 0))
    assert {j.objective.pk for j in judgements} == {objective.pk}


def test_a_kill_between_any_two_statements_costs_no_event(
    tenant: Tenant, objective: Objective, reader: MemoryReader
) -> None:
    engine = Engine(reader)
    judge(tenant, reader, engine.serve(9, 1))
    end = engine.serve(9, 1, windows=2)
    judgements, deaths = killed_at_every_statement(
        lambda: judge(tenant, reader, end), lambda: list(Reading.objects.values())
    )
    assert deaths > 10
    assert [(j.scope, j.fresh) for j in judgements] == [("engine-0", True), ("", True)] * 2
    assert counts_between(objective, "", START - WINDOW, end) == Counts(27, 30)
