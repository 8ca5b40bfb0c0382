"""What the policies of scheduling and admission show: a collector beside observe.Metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from engine.families import counter, gauge
from engine.observe import Metrics
from engine.sched.quotas import Quotas
from engine.sched.scheduler import Scheduler


class PolicyMetrics:
    """Read when /metrics is asked for; labels are queues, listed tenants, reasons: all bounded."""

    def __init__(self, metrics: Metrics, scheduler: Scheduler, quotas: Quotas) -> None:
        self.metrics = metrics
        self.scheduler = scheduler
        self.quotas = quotas

    def collect(self) -> Iterator[Metric]:
        labels, quotas = self.metrics.labels, self.quotas
        knobs = self.metrics.read().knobs
        lengths, fit = self.scheduler.lengths, self.scheduler.lengths.fit
        budgets = self.scheduler.priority.budgets(int(knobs["max_num_batched_tokens"]))
        yield gauge(
            "engine:priority_budget_tokens",
            "Of a step's tokens, those due to a queue that waits; 0: none waits, or not by weight.",
            [({**labels, "priority": k}, v) for k, v in budgets.items()],
        )
        yield counter(
            "engine:tenant_tokens",
            "Tokens used by requests that ended, by listed tenant; other: who is not listed.",
            [({**labels, "tenant": k}, v) for k, v in quotas.used.items()],
        )
        yield counter(
            "engine:tenant_throttled",
            "Requests turned away: too little left now (quota), more than a burst (burst).",
            [({**labels, "reason": k}, v) for k, v in quotas.throttled.items()],
        )
        for name, value, text in (
            (
                "engine:length_window",
                lengths.window if knobs["length_window_tokens"] else 0,
                "Tokens the lengths of one step's prompts may differ by; 0: any length.",
            ),
            ("engine:prompt_slice", lengths.slice, "Prompt tokens a step takes of one request."),
        ):
            yield gauge(name + "_tokens", text, [(labels, value)])
        if fit:
            yield gauge(
                "engine:prompt_length_fit_distance",
                "Kolmogorov-Smirnov distance of the newest prompts' lengths to what was fitted.",
                [({**labels, "distribution": k}, v) for k, v in fit.distances.items()],
            )
