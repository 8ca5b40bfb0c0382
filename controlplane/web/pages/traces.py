"""/traces/<id>/: where the time of one request went, in a sentence and as a waterfall."""

from __future__ import annotations

from django.http import Http404, HttpResponse

from controlplane.web.access import TenantRequest, page, send
from controlplane.web.waterfall import waterfall
from tracing import query

TRACE_ID_CHARS = 32


@page
def trace(request: TenantRequest, trace_id: str) -> HttpResponse:
    """Raises Http404 for a trace this tenant never sent, or that has been forgotten since."""
    spans = query.reader(str(request.tenant.pk)).trace(trace_id)
    if not spans:
        raise Http404(f"trace {trace_id} is not stored for {request.tenant}")
    drawn = waterfall(spans)
    attributes = drawn.root.attributes
    context = {
        "trace_id": trace_id,
        "waterfall": drawn,
        "queue_s": drawn.parts.get("queue"),
        "prefill_s": drawn.parts.get("prefill"),
        "decode_s": drawn.parts.get("decode"),
        "gap_s": drawn.parts.get("gap"),
        "ttft_s": _seconds(attributes.get("gen_ai.latency.time_to_first_token")),
        "prompt_tokens": attributes.get("gen_ai.usage.prompt_tokens"),
        "completion_tokens": attributes.get("gen_ai.usage.completion_tokens"),
    }
    return send(request, "trace.html", context)


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
