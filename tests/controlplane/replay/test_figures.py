from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import pytest

from controlplane.replay import report
from controlplane.replay.figures import QUANTILES, Slo, answers_needed, figures, quantiles
from controlplane.replay.options import options, slo
from controlplane.replay.results import SCHEMA
from engine.load import Request
from engine.replay import Record, Status
from engine.traces.formats import FORMATS
from engine.traces.trace import Plan, Trace


def answered(
    at_s: float = 0.0, *, late_s: float = 0.0, ttft_s: float = 0.1, e2e_s: float = 0.5,
    tokens: int = 5,
) -> Record:  # fmt: skip
    sent_s = at_s + late_s
    return Record(
        Request(at_s, 10, 5, f"r{at_s}"), sent_s, sent_s + ttft_s, sent_s + e2e_s, tokens,
        answers=1, http_status=200, status=Status.OK,
    )  # fmt: skip


def test_a_quantile_is_told_only_of_as_many_answers_as_bound_it_on_both_sides() -> None:
    assert [answers_needed(q) for q in QUANTILES] == [6, 36, 72, 368, 3688]
    values = [float(i) for i in range(72)]
    median, p90, p95, p99, p999 = quantiles([*values, math.nan])
    assert (median, p99, p999) == (35.5, None, None)
    assert p90 == pytest.approx(63.9)
    assert p95 == pytest.approx(67.45)
    assert quantiles(values[:71])[2] is None
    assert quantiles([]) == [None] * len(QUANTILES)


def test_an_answer_is_good_if_it_keeps_every_limit_there_is() -> None:
    record = answered(ttft_s=0.1, e2e_s=0.5)  # 4 gaps of 100 ms
    assert Slo().met(record)
    assert Slo(ttft=100, tpot=100.001, e2e=500).met(record)
    assert not Slo(ttft=99).met(record)
    assert not Slo(tpot=99).met(record)
    assert not Slo(e2e=499).met(record)
    assert Slo(tpot=1).met(answered(tokens=1))
    record.status = Status.FAILED
    assert not Slo().met(record)


def test_goodput_is_good_answers_a_second_and_lateness_the_clients_own() -> None:
    records = [answered(float(i), late_s=0.25 * (i == 7)) for i in range(10)]
    records += [
        Record(Request(9.5, 10, 5, "no"), 9.5, end_s=9.6, http_status=429, status=Status.REJECTED),
        Record(Request(9.9, 10, 5, "lost"), status=Status.LOST),
    ]
    records[3].tokens = 4
    records[4].first_s += 0.2
    found = figures(records, Slo(ttft=200), unsolicited=0)
    assert (found.good, found.short) == (9, 1)
    assert found.goodput == pytest.approx(9 / 9.5)
    assert found.late_max_s == pytest.approx(0.25)
    assert found.sent_over_s == 9.5
    assert found.prompt_tokens_per_s == pytest.approx(100 / 9.5)
    assert found.summary.counts[Status.LOST] == 1


def test_the_summary_says_what_the_sample_cannot_carry_and_when_the_client_was_late() -> None:
    records = [answered(float(i), late_s=0.3) for i in range(40)]
    told = report.after(figures(records, Slo(ttft=200), 0), Slo(ttft=200), False)
    text = "\n".join(told)
    assert "40 ok, 0 rejected, 0 lost" in text
    assert "100.0% of all sent: TTFT ≤ 200 ms" in text
    assert [line.split() for line in told if line.startswith(("ms", "TTFT"))] == [
        ["ms", "P50", "P90", "P95", "P99", "P99.9"],
        ["TTFT", "100.0", "100.0", "–", "–", "–"],
    ]
    assert "too few to tell: P95 takes 72, P99 takes 368, P99.9 takes 3,688" in text
    assert "the client was late itself, up to 300 ms" in text
    in_time = [answered(float(i), late_s=0.001) for i in range(40)]
    assert "late itself" not in "\n".join(report.after(figures(in_time, Slo(), 0), Slo(), False))


def test_a_replay_in_which_nothing_was_answered_is_summed_up_too() -> None:
    records = [Record(Request(0.0, 10, 5, "x"), 0.0, end_s=0.1, status=Status.INTERRUPTED)]
    text = "\n".join(report.after(figures(records, Slo(e2e=1), 0), Slo(e2e=1), True))
    assert "1 request in 0.0 s, and ended before the trace did" in text
    assert "0 ok, 0 rejected, 1 interrupted, 0 lost" in text
    assert "0.0% of all sent" in text


def test_what_is_cut_left_out_and_shared_is_told_before_anything_is_sent() -> None:
    trace = Trace(Path("t.jsonl"), "mooncake", length_scale=0.125, context_tokens=2048)
    plan = Plan(100, 50.0, 40_000, 2_000, prompts_cut=7, left_out=3, repeated_tokens=10_000)
    text = "\n".join(report.before(trace, plan, "m at u", Slo(tpot=50)))
    assert "100 requests in 50.0 s, 2.00 a second; on average 400 tokens in and 20 out" in text
    assert "25.0% of the prompts' tokens" in text
    assert "64 tokens a block" in text
    assert "7 prompts and 0 answers, to fit 2,048 tokens" in text
    assert "3 that had no prompt or no answer" in text
    assert "TPOT ≤ 50 ms" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft", "ttft: got '', allowed: a number above 0"),
        ("ttft=-1", "ttft: got '-1', allowed: a number above 0"),
        ("itl=5", "got 'itl=5', allowed: ttft, tpot, e2e, each once"),
        ("ttft=5,ttft=6", "got 'ttft=6', allowed: ttft, tpot, e2e, each once"),
    ],
)
def test_a_wrong_slo_is_told_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        slo(text)


def test_limits_are_milliseconds_by_name() -> None:
    assert slo("tpot=50,ttft=0.5") == Slo(ttft=0.5, tpot=50)


def test_the_help_explains_every_argument_within_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        options(["--help"])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert "Open loop" in told
    assert told.count("default:") >= 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "0"], "--requests: got '0', allowed: a whole number from 1 on"),
        (["--time-scale", "-1"], "--time-scale: got '-1', allowed: a number above 0"),
        (["--format", "xml"], "--format: invalid choice: 'xml'"),
    ],
)
def test_a_wrong_option_ends_with_what_is_allowed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options(["trace.csv", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_docs_name_every_format_column_status_and_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "replay.md").read_text()
    with pytest.raises(SystemExit):
        options(["--help"])
    named = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    for name in (*FORMATS, *SCHEMA.names, *Status, *named):
        assert f"`{name}" in page or f"{name} " in page, name
