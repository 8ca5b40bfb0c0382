"""What is named, what is a rival, and what is no second fault."""

from __future__ import annotations

from controlplane.diagnosis.cause import UNKNOWN, Fact, Finding, score
from controlplane.diagnosis.facts import SCORE_REFUTED_MAX
from controlplane.diagnosis.ranking import rank


def finding(cause: str, score: float, *explains: str) -> Finding:
    return Finding(cause, score, f"of {cause}", explains=explains)


def named(*findings: Finding) -> list[str]:
    return [each.cause for each in rank(findings).named]


def test_what_follows_from_another_is_a_rival_however_well_it_scores() -> None:
    ranking = rank([finding("queue", 1.0), finding("host", 0.8, "queue"), finding("batch", 0.2)])
    assert [f.cause for f in ranking.named] == ["host"]
    assert [f.cause for f in ranking.rivals] == ["queue", "batch"]
    assert ranking.because == "of host"


def test_a_refuted_one_explains_nothing() -> None:
    assert named(finding("queue", 0.9), finding("host", 0.4, "queue")) == ["queue"]


def test_two_that_do_not_explain_each_other_are_both_named_best_first() -> None:
    ranking = rank([finding("graph", 0.8), finding("memory", 0.9), finding("third", 0.7)])
    assert [f.cause for f in ranking.named] == ["memory", "graph"]
    assert ranking.because == "of memory; besides, of graph"


def test_what_both_explain_is_said_once() -> None:
    host, edit = (
        Finding(cause, 0.8, f"TTFT p99 is 2 s because {why}")
        for cause, why in (("a", "the host is slow"), ("b", "alice was here"))
    )
    assert rank([host, edit]).because == (
        "TTFT p99 is 2 s because the host is slow; besides, alice was here"
    )


def test_two_that_explain_each_other_are_still_named() -> None:
    assert named(finding("a", 0.9, "b"), finding("b", 0.8, "a")) == ["a", "b"]


def test_below_the_bar_it_is_unknown_with_what_the_nearest_fails_on() -> None:
    fact = Fact("nobody waits", False, required=True)
    ranking = rank([Finding("queue", 0.4, "", evidence=(fact,)), finding("host", 0.1)])
    assert ranking.named == ()
    assert ranking.best.cause == UNKNOWN
    assert ranking.because.endswith("the nearest, queue, fails on: nobody waits")
    assert [f.cause for f in ranking.rivals] == ["queue", "host"]


def test_of_refuted_ones_that_score_alike_the_nearest_is_what_most_speaks_for() -> None:
    def refuted(cause: str, *supporting: bool, applies: bool = True) -> Finding:
        facts = [Fact("a sign", each) for each in supporting]
        evidence = (Fact(f"no {cause}", False, required=True), *facts)
        return Finding(cause, score(evidence), "", evidence=evidence, applies=applies)

    ranking = rank(
        [
            refuted("another objective's", True, True, True, True, applies=False),
            refuted("a half", True, True, False),
            refuted("most", True, True, True),
        ]
    )
    assert {finding.score for finding in ranking.rivals} == {SCORE_REFUTED_MAX}
    assert [finding.cause for finding in ranking.rivals] == [
        "most", "a half", "another objective's"
    ]  # fmt: skip
    assert ranking.because.endswith("the nearest, most, fails on: no most")
