from __future__ import annotations

import pytest

from slo.openslo import (
    FileError,
    contract_document,
    documents,
    objective_document,
    text_of,
)

FILE = """\
apiVersion: openslo/v1
kind: SLO
metadata:
  name: chat-ttft
  displayName: First token within 500 ms
spec:
  service: chat
  indicator:
    spec:
      latency:
        metric: vllm:time_to_first_token_seconds
        threshold_ms: 500
  timeWindow:
    - duration: 4w
      isRolling: true
  objectives:
    - targetPercent: 99
---
apiVersion: trimtab/v1
kind: Contract
metadata: {name: gold}
spec:
  provider: Platform
  consumer: Order centre
  objectives: [chat-ttft]
  fee: {amount: 12000, currency: EUR}
  penalty: {basis: step, percent: 5, step_percent: 0.1}
  startsOn: 2026-03-01
"""


def test_a_file_says_what_the_api_takes() -> None:
    objective, contract = documents(FILE)
    assert (objective.noun, contract.noun) == ("objectives", "contracts")
    assert objective.spec == {
        "slug": "chat-ttft",
        "name": "First token within 500 ms",
        "service": "chat",
        "indicator": "latency",
        "spec": {"metric": "vllm:time_to_first_token_seconds", "threshold_ms": 500},
        "window_days": 28,
        "target": 0.99,
    }
    assert contract.spec == {
        "slug": "gold",
        "provider": "Platform",
        "consumer": "Order centre",
        "objectives": ["chat-ttft"],
        "fee": 12000,
        "currency": "EUR",
        "terms": {"basis": "step", "percent": 5, "step_percent": 0.1},
        "starts_on": "2026-03-01",
    }


@pytest.mark.parametrize(
    ("index", "param", "path", "line"),
    [
        (0, "spec.threshold_ms", "spec.indicator.spec.latency.threshold_ms", 12),
        (0, "spec.source", "spec.indicator.spec.latency.source", 10),
        (0, "target", "spec.objectives[0].targetPercent", 17),
        (0, "window_days", "spec.timeWindow[0].duration", 14),
        (0, "fast_burn", "spec.fastBurn", 6),
        (0, "slug", "metadata.name", 4),
        (0, "colour", "colour", 1),
        (1, "terms.percent", "spec.penalty.percent", 27),
        (1, "currency", "spec.fee.currency", 26),
    ],
)
def test_a_field_of_the_api_is_found_in_the_file(
    index: int, param: str, path: str, line: int
) -> None:
    assert documents(FILE)[index].at(param) == (path, line)


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("kind: SLO", "kind: Service", 1, "apiVersion: openslo/v1, kind: Service; allowed: apiV"),
        ("openslo/v1", "openslo/v1alpha", 1, "allowed: apiVersion: openslo/v1, kind: SLO; "),
        ("service: chat", "servce: chat", 7, "spec.servce: not supported; did you mean service?"),
        ("service: chat", "owner: me", 7, "spec.owner: not supported; allowed here: service, "),
        ("  indicator:", "  indicater:", 8, "indicater: not supported; did you mean indicator?"),
        ("    spec:", "    op: {}\n    spec:", 9, "spec.indicator.op: not supported; allowed"),
        ("kind: SLO", "kinds: SLO", 2, "kinds: not supported; did you mean kind?"),
        ("4w", "1h", 14, r"timeWindow\[0\].duration: got '1h', allowed: days or weeks"),
        ("isRolling: true", "isRolling: false", 15, "allowed: true, for windows roll"),
        ("isRolling: true", "calendar: {}", 15, "calendar: not supported"),
        ("    - targetPercent: 99", "    - {}", 17, "wanted: target or targetPercent"),
        ("targetPercent: 99", "targetPercent: lots", 17, "got 'lots', wanted: a number"),
        ("      latency:", "      latency: {}\n      success:", 9, "one indicator by its name"),
        ("service: chat", "service: chat\n  service: code", 8, "'service' stands here twice"),
        ("service: chat", "budgetingMethod: Timeslices", 7, "allowed: Occurrences"),
        ("service: chat", "alertPolicies: []", 7, "spec.alertPolicies: not supported"),
        ("service: chat", "service: [", 9, "expected"),
        ("metadata:", "metadata: &a", 7, "a plain name is wanted as key"),
        ("{amount: 12000, currency: EUR}", "12000", 26, "spec.fee: got 12000, wanted: names"),
        ("2026-03-01", "2026-02-31", 28, "day"),
    ],
)
def test_what_does_not_fit_is_named_with_its_line(
    before: str, after: str, line: int, words: str
) -> None:
    text = FILE.replace(before, after, 1)
    if after == "metadata: &a":
        text = text.replace("service: chat", "<<: *a")
    with pytest.raises(FileError, match=words) as caught:
        documents(text)
    assert caught.value.line == line


def test_a_file_that_unfolds_without_end_is_refused() -> None:
    bomb = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(FileError, match="too much, or nested too deep"):
        documents("\n".join(bomb))
    with pytest.raises(FileError, match="nested too deep"):
        documents("a: " + "[" * 100 + "]" * 100)


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n"])
def test_an_empty_file_declares_nothing(text: str) -> None:
    assert documents(text) == []


def test_what_the_api_answers_comes_back_as_the_file_that_declares_it() -> None:
    objective, contract = documents(FILE)
    row = {**objective.spec, "fast_burn": 14.4, "enabled": True}
    agreed = {**contract.spec, "name": "Gold", "period": "month"}
    text = text_of([objective_document(row), contract_document(agreed)])
    again, agreed_again = documents(text)
    assert again.spec == row
    assert agreed_again.spec == agreed
