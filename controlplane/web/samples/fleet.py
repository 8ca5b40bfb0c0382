"""Fleet cells, knobs and requests in every state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from controlplane.fleet.drift import Commanded
from controlplane.fleet.models import Engine
from controlplane.web.fleet import Cell
from controlplane.web.heat import BOUNDS_S, Heat, heat
from controlplane.web.knobs import KnobRow, configuration
from controlplane.web.measures import Filling
from controlplane.web.pages.traces import TraceRow, rows_of
from controlplane.web.samples.incidents import NOW, ago, objective
from controlplane.web.templatetags.ui import part
from tracing.types import HeatCell, Span, TraceSearch


def cells() -> list[Cell]:
    states = (
        ("ok", ""),
        ("acting", "acting"),
        ("burning", "missing an objective"),
        ("late", ""),
        ("unreachable", ""),
        ("lost", ""),
        ("stopped", ""),
    )
    by_state = [
        Cell(
            f"sample-{state}",
            f"engine-{i}",
            state,
            word,
            "chat · llama-1.3m",
            (("node", "node-a"),),
        )
        for i, (state, word) in enumerate(states)
    ]
    shares = ((0.04, 1), (0.3, 2), (0.62, 4), (1.0, 5))
    by_measure = [
        replace(by_state[0], key=f"sample-{level}", filling=Filling(share, level, part(share)))
        for share, level in shares
    ]
    return [*by_state, *by_measure, replace(by_state[0], key="sample-none", unmeasured=True)]


def knob_rows() -> tuple[KnobRow, ...]:
    """At its default, turned, drifted, a choice, unsupported, without bounds."""
    hot = {"apply_class": "hot", "default": 32, "minimum": 1, "maximum": 256, "unit": "requests"}
    barrier = {"apply_class": "barrier", "choices": ["on", "off"], "default": "on"}
    knobs = {
        "max_num_seqs": {**hot, "help": "Requests in the running batch."},
        "max_num_batched_tokens": {
            **hot,
            "minimum": 64,
            "maximum": 8192,
            "default": 2048,
            "unit": "tokens/step",
        },
        "max_wait_ms": {"apply_class": "hot", "minimum": 0, "maximum": 50, "unit": "ms"},
        "kv_block_size": {
            "apply_class": "barrier",
            "choices": [8, 16, 32, 64, 128],
            "unit": "tokens",
        },
        "graph_capture": {**barrier, "supported": False},
        "kv_pool_bytes": {"apply_class": "drain", "unit": "bytes"},
    }
    values = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_wait_ms": 10,
        "kv_block_size": 16,
        "graph_capture": "off",
        "kv_pool_bytes": 268_435_456,
    }
    at = ago(minutes=12).isoformat()
    set_by = {
        "max_num_batched_tokens": {
            "by": "trimtab/autopilot",
            "at": at,
            "from": 2048,
            "versions": 1,
        },
        "max_wait_ms": {"by": "cli/ada", "at": at, "from": 0, "versions": 3},
        "kv_block_size": {"by": "", "at": at, "from": 32, "versions": 1},
    }
    rows = configuration(Engine(knobs=knobs, values=values, set_by=set_by), []).rows
    drifted = replace(rows[2], drifted=True, commanded=Commanded(0, ago(minutes=20)))
    return (*rows[:2], drifted, *rows[3:])


def trace_rows() -> list[TraceRow]:
    """Answered, late, failed, and one that carries nothing."""
    latency = "gen_ai.latency."

    def span(number: int, took_s: float, queue_s: float | None, **more: Any) -> Span:
        carried = (
            {}
            if queue_s is None
            else {
                "gen_ai.request.id": f"cmpl-{number:016x}",
                f"{latency}time_in_queue": str(queue_s),
                f"{latency}time_in_model_prefill": "0.09",
                f"{latency}time_in_model_decode": str(took_s - queue_s - 0.09),
                f"{latency}time_to_first_token": str(queue_s + 0.09),
                "gen_ai.usage.prompt_tokens": "412",
                "gen_ai.usage.completion_tokens": "24",
            }
        )
        end_ns = int(ago(seconds=number).timestamp() * 1e9)
        return Span(
            trace_id=f"{number:032x}",
            span_id="",
            parent_span_id="",
            name="llm_request",
            kind=2,
            service="chat",
            instance="engine-0",
            attributes=carried,
            start_ns=end_ns - int(took_s * 1e9),
            duration_ns=int(took_s * 1e9),
            **{"status_code": 1, **more},
        )

    failed = {"status_code": 2, "status_message": "the client went away"}
    promise = objective()
    promise.spec = {"metric": "vllm:time_to_first_token_seconds", "threshold_ms": 500}
    return rows_of(
        [span(4, 0.42, 0.02), span(9, 2.9, 1.9), span(13, 1.2, 0.8, **failed), span(21, 0.7, None)],
        [promise],
    )


def heat_map() -> Heat | None:
    rows = [
        (c, 6 + r, int(24 * math.exp(-(r**2)) * (1 + c % 3)), c % 17 == 0 and r == 1)
        for c in range(60)
        for r in range(-1, 3)
    ]
    found = [HeatCell(c, r + 3 * (40 < c < 50), n, 2 * failed) for c, r, n, failed in rows if n]
    assert max(cell.row for cell in found) <= len(BOUNDS_S)
    return heat(TraceSearch(ago(minutes=60), NOW), 60.0, found)
