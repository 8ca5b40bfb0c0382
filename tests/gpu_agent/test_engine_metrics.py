"""The Prometheus text format, line by line, and what becomes of it in OTLP."""

from __future__ import annotations

import gzip
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from gpu_agent import otlp
from gpu_agent.source import Family, Kind, Reading, SourceError
from gpu_agent.sources.engine_metrics import EngineMetrics, Exposition

from .servers import EngineServer, Quiet, Server


def read(text: str, **limits: int) -> tuple[dict[str, Family], Exposition]:
    page = Exposition(**limits)
    for line in text.splitlines():
        page.feed(line)
    return {family.name: family for family in page.families()}, page


def test_types_decide_what_a_sample_is() -> None:
    families, page = read(
        "# HELP a_total All \\n the \\\\ things.\n# TYPE a_total counter\na_total 3\n"
        "# TYPE b gauge\nb 2.5 1700000000000\nc 1e3\n"
        '# TYPE d summary\nd{quantile="0.5"} 7\nd_sum 9\nd_count 2\n'
        "# TYPE e counter\ne_total 4\n"
    )
    kinds = {name: family.kind for name, family in families.items()}
    assert kinds == {
        "a_total": Kind.SUM,
        "b": Kind.GAUGE,
        "c": Kind.GAUGE,
        "d": Kind.GAUGE,
        "d_sum": Kind.SUM,
        "d_count": Kind.SUM,
        "e_total": Kind.SUM,
    }
    assert families["a_total"].help == "All \n the \\ things."
    assert families["b"].samples[0].value == 2.5
    assert page.lines_bad == 0


def test_label_values_keep_their_escapes_braces_and_commas() -> None:
    families, _ = read('x{path="C:\\\\a\\"b\\nc",q="a,b}=1{",empty="",} 1')
    assert families["x"].samples[0].labels == {"path": 'C:\\a"b\nc', "q": "a,b}=1{", "empty": ""}


@given(st.dictionaries(st.sampled_from(["a", "b", "_c"]), st.text(max_size=20)))
def test_any_label_value_survives_the_escape_and_back(labels: dict[str, str]) -> None:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    pairs = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
    page = Exposition()
    page.feed(f"x{{{pairs}}} 1")
    assert page.families()[0].samples[0].labels == labels


def test_special_numbers() -> None:
    families, page = read("a NaN\nb +Inf\nc -Inf\nd 0x10\ne 1_000\nf\ng 1 2 3\n")
    assert math.isnan(families["a"].samples[0].value)
    assert (families["b"].samples[0].value, families["c"].samples[0].value) == (math.inf, -math.inf)
    assert set(families) == {"a", "b", "c"}
    assert page.lines_bad == 4
    assert page.bad_example == "d: '0x10' is not a number"


def test_a_bad_line_is_counted_and_the_rest_is_read() -> None:
    families, page = read('a 1\nb{x="unclosed 2\n{} 3\n# TYPE c nonsense\nd{x=1} 4\nz 5\n')
    assert set(families) == {"a", "z"}
    assert page.lines_bad == 4


HISTOGRAM = """# TYPE h histogram
h_bucket{m="x",le="0.5"} 4
h_bucket{m="x",le="+Inf"} 9
h_bucket{m="x",le="0.1"} 1
h_sum{m="x"} 3.5
h_count{m="x"} 9
# TYPE h_created gauge
h_created{m="x"} 1.7e9
"""


def test_buckets_become_one_histogram_and_created_is_ignored() -> None:
    families, page = read(HISTOGRAM)
    assert set(families) == {"h"}
    sample = families["h"].histograms[0]
    assert (list(sample.bounds), list(sample.counts)) == ([0.1, 0.5], [1, 3, 5])
    assert (sample.sum, sample.count, sample.labels) == (3.5, 9, {"m": "x"})
    assert page.series == 1


def test_a_histogram_that_falls_is_left_out_and_counted() -> None:
    families, page = read(HISTOGRAM.replace('le="0.5"} 4', 'le="0.5"} 10'))
    assert families["h"].histograms == []
    assert page.lines_bad == 1
    assert page.bad_example == "h: buckets are not cumulative"


def test_a_family_really_called_created_is_kept() -> None:
    families, _ = read("# TYPE sessions_created gauge\nsessions_created 4\n")
    assert families["sessions_created"].samples[0].value == 4


def test_series_above_the_limit_are_counted_and_left_out() -> None:
    families, page = read("".join(f'a{{n="{n}"}} 1\n' for n in range(5)), series_max=3)
    assert len(families["a"].samples) == 3
    assert page.series_over == 2


def test_otlp_carries_kind_labels_times_and_bounds() -> None:
    families, _ = read(HISTOGRAM + '# TYPE c_total counter\nc_total{r="stop"} 12\ng 1.5\n')
    reading = Reading({"service.name": "chat"}, 2_000, list(families.values()), 1_000)
    message = ExportMetricsServiceRequest.FromString(
        gzip.decompress(otlp.encode(reading, version="1.2"))
    )
    resource = message.resource_metrics[0]
    assert resource.resource.attributes[0].value.string_value == "chat"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    total = metrics["c_total"].sum
    assert (total.is_monotonic, total.aggregation_temporality) == (True, 2)
    point = total.data_points[0]
    assert (point.as_double, point.time_unix_nano, point.start_time_unix_nano) == (12, 2_000, 1_000)
    assert metrics["g"].gauge.data_points[0].as_double == 1.5
    histogram = metrics["h"].histogram.data_points[0]
    assert list(histogram.explicit_bounds) == [0.1, 0.5]
    assert list(histogram.bucket_counts) == [1, 3, 5]
    assert (histogram.count, histogram.sum) == (9, 3.5)


NOISE = st.text(alphabet='ab_ {}=",\\\\#0159e+-.NaIf\\n\\t', max_size=40)
LINES = st.one_of(
    NOISE,
    st.builds("# TYPE {} {}".format, st.sampled_from(["a", "b"]), st.sampled_from(["histogram"])),
    st.builds('a_bucket{{le="{}"}} {}'.format, st.floats(), st.floats()),
    st.builds("a_{} {}".format, st.sampled_from(["sum", "count", "total"]), st.floats()),
    st.builds("process_start_time_seconds {}".format, st.floats()),
)


@given(st.lists(LINES, max_size=12))
def test_whatever_a_page_says_is_read_or_counted_and_can_be_encoded(lines: list[str]) -> None:
    page = Exposition()
    for line in lines:
        page.feed(line)
    families = page.families()
    assert otlp.encode(Reading({}, 1, families, page.start_ns()), version="1")
    assert page.lines == len(lines)


def source(url: str, **limits: int) -> EngineMetrics:
    return EngineMetrics(
        engine="engine-0", service="chat", node="node-1", url=url, timeout_s=2.0, **limits
    )


def test_an_engine_is_read_over_http(engine: EngineServer) -> None:
    reading = source(engine.url).collect()
    assert reading.resource["service.instance.id"] == "engine-0"
    assert {family.name for family in reading.families} == {
        "vllm:num_requests_running",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds",
    }
    assert reading.notes == {"lines_bad": 0, "series": 3, "series_over": 0}


class Page(Server):
    def __init__(self, body: bytes, *, missing_bytes: int = 0) -> None:
        super().__init__()
        self.page = body
        self.missing_bytes = missing_bytes

    def serve(self, request: Quiet, method: str) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(self.page) + self.missing_bytes))
        request.end_headers()
        request.wfile.write(self.page)
        request.close_connection = True


@pytest.mark.parametrize(
    ("body", "missing_bytes", "words"),
    [
        (b"#" * 200 + b"\n" + b"#" * 200, 0, "more than 300 bytes"),
        (b"a\n" * 60, 0, "more than 50 lines"),
        (b"a 1\n", 7, "the page broke off, 7 bytes short"),
    ],
)
def test_a_page_too_large_or_cut_short_is_refused(
    body: bytes, missing_bytes: int, words: str
) -> None:
    with (
        Page(body, missing_bytes=missing_bytes) as server,
        pytest.raises(SourceError, match=words),
    ):
        source(server.url, page_bytes_max=300, lines_max=50).collect()


def test_an_engine_that_is_gone_is_named(engine: EngineServer) -> None:
    engine.down = True
    with pytest.raises(SourceError, match=r"/metrics: HTTP 503, want 200"):
        source(engine.url).collect()
    with pytest.raises(SourceError, match="Connection refused"):
        source("http://127.0.0.1:1").collect()
