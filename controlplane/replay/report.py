"""What is said of a replay before and after it: lines that begin with their subject."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.replay.figures import QUANTILES, Figures, Slo, answers_needed
from engine.replay import Status
from engine.traces.trace import Plan, Trace

TEXT_AT = 12  # the column where the text begins
COLUMN = 11
# Where P99 of the client's delay passes a tenth of TTFT's P50, within these bounds, it is told.
LATE_SHARE, LATE_S_MIN, LATE_S_MAX = 0.1, 0.005, 0.1
ALWAYS_TOLD = (Status.OK, Status.REJECTED, Status.LOST)


def before(trace: Trace, plan: Plan, engine: str, slo: Slo) -> list[str]:
    """What is about to be sent, and where."""
    rate = f", {_rate(plan.requests / plan.seconds)} a second" if plan.seconds else ""
    scales = (("times", trace.time_scale), ("lengths", trace.length_scale))
    scaled = "".join(f"; {what} × {scale:g}" for what, scale in scales if scale != 1)
    told = [
        line("Engine", engine),
        line("Trace", f"{trace.path} ({trace.format})"),
        line(
            "Load",
            f"{_requests(plan.requests)} in {plan.seconds:,.1f} s{rate}; on average "
            f"{plan.prompt_tokens / plan.requests:,.0f} tokens in and "
            f"{plan.output_tokens / plan.requests:,.0f} out{scaled}",
        ),
    ]
    if plan.repeated_tokens:
        share = plan.repeated_tokens / plan.prompt_tokens
        told.append(
            line(
                "Prefixes",
                f"{share:.1%} of the prompts' tokens are blocks that an earlier one began with "
                f"too; {trace.scaled_block_tokens} tokens a block",
            )
        )
    if trace.context_tokens is None:
        told.append(line("Cut", "nothing: the engine does not say how many tokens it takes"))
    elif plan.prompts_cut or plan.answers_cut:
        told.append(
            line(
                "Cut",
                f"{plan.prompts_cut:,} prompts and {plan.answers_cut:,} answers, to fit "
                f"{trace.context_tokens:,} tokens",
            )
        )
    if plan.left_out:
        told.append(line("Left out", f"{plan.left_out:,} that had no prompt or no answer"))
    if str(slo):
        told.append(line("Good is", str(slo)))
    return told


def after(figures: Figures, slo: Slo, ended_early: bool) -> list[str]:
    """How it went."""
    summary = figures.summary
    early = ", and ended before the trace did" if ended_early else ""
    told = [line("Sent", f"{_requests(summary.sent)} in {figures.sent_over_s:,.1f} s{early}")]
    fared = [
        f"{summary.counts[status]:,} {status}"
        for status in Status
        if summary.counts[status] or status in ALWAYS_TOLD
    ]
    if summary.duplicated:
        fared.append(f"{summary.duplicated:,} answered twice")
    told.append(line("Fared", ", ".join(fared)))
    if figures.short:
        told.append(line("Short", f"answers with fewer tokens than asked for: {figures.short:,}"))
    told.append(
        line(
            "Throughput",
            f"{_rate(summary.requests_per_s)} requests/s, {figures.prompt_tokens_per_s:,.0f} "
            f"tokens/s in, {summary.tokens_per_s:,.0f} out",
        )
    )
    if str(slo):
        share = figures.good / summary.sent if summary.sent else 0.0
        told.append(
            line("Goodput", f"{_rate(figures.goodput)} requests/s, {share:.1%} of all sent: {slo}")
        )
    return [*told, "", *_latencies(figures)]


def line(subject: str, text: str) -> str:
    return f"{subject:<{TEXT_AT}}{text}"


def _latencies(figures: Figures) -> Iterator[str]:
    rows = {
        "TTFT": figures.ttft_s,
        "TPOT": figures.tpot_s,
        "E2E": figures.e2e_s,
        "Sent late": figures.late_s,
    }
    yield line("ms", "".join(f"{_named(q):>{COLUMN}}" for q in QUANTILES))
    for name, values in rows.items():
        yield line(name, "".join(f"{_milliseconds(value):>{COLUMN}}" for value in values))
    missing = [
        f"{_named(q)} takes {answers_needed(q):,}"
        for q, *values in zip(QUANTILES, *rows.values(), strict=True)
        if None in values
    ]
    if missing:
        yield line("–", f"too few to tell: {', '.join(missing)}")
    late = figures.late_s[QUANTILES.index(0.99)]
    allowed = LATE_SHARE * (figures.ttft_s[0] or 0.0)
    if (figures.late_max_s if late is None else late) > min(max(allowed, LATE_S_MIN), LATE_S_MAX):
        yield ""
        yield line(
            "Beware",
            f"the client was late itself, up to {figures.late_max_s * 1000:,.0f} ms: this was not "
            "quite the trace's load. Latencies count from sending, so its delay is in none of "
            "them. Give it a CPU of its own, or a greater --time-scale",
        )


def _requests(count: int) -> str:
    return f"{count:,} request{'' if count == 1 else 's'}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.{0 if per_s >= 100 else 1 if per_s >= 10 else 2}f}"


def _named(q: float) -> str:
    return f"P{q * 100:g}"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:,.1f}" if seconds < 1 else f"{seconds * 1000:,.0f}"
