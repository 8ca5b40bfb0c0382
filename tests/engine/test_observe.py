from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.kv.stats import Memory
from engine.observe import CHANGERS_MAX, Histogram, Metrics, Reading, steps_1_2_5
from engine.pause import Pause
from engine.sched.request import Request
from engine.sched.scheduler import Outcome, Plan

# Sample names of vLLM 0.33.0 that this engine has too.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_num_preemptions": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:cache_config_info": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
}
OURS = {
    "engine:config_version": "gauge",
    "engine:knob": "gauge",
    "engine:step_seconds": "histogram",
    "engine:step_prefill_tokens": "counter",
    "engine:step_decode_tokens": "counter",
    "engine:steps": "counter",
    "engine:step_phase_seconds": "counter",
    "engine:busy_seconds": "counter",
    "engine:requests_received": "counter",
    "engine:requests_failed": "counter",
    "engine:config_changes": "counter",
    "engine:config_rollbacks": "counter",
    "engine:config_swap_seconds": "gauge",
    "engine:kv_blocks": "gauge",
    "engine:paused": "gauge",
    "engine:tasks": "gauge",
    "engine:kv_cached_blocks": "gauge",
    "engine:kv_token_bytes": "gauge",
    "engine:prefix_evictions": "counter",
    "engine:graph_capture_ready": "gauge",
    "engine:graph_capture_seconds": "gauge",
    "engine:graph_steps": "counter",
    "engine:graph_contexts": "counter",
    "engine:graph_misses": "counter",
    "engine:requests_shed": "counter",
    "engine:forward_seconds": "counter",
    "engine:forward_cpu_seconds": "counter",
    "engine:kv_free_runs": "gauge",
    "engine:kv_largest_free_run_blocks": "gauge",
    "engine:kv_internal_waste_tokens": "gauge",
    "engine:kv_stranded_tokens": "gauge",
    "engine:kv_alloc_stalls": "counter",
    "engine:kv_alloc_stall_seconds": "counter",
    "engine:kv_compactions": "counter",
    "engine:kv_compaction_seconds": "counter",
    "engine:tier_hits": "counter",
    "engine:tier_misses": "counter",
    "engine:tier_prefetch_late": "counter",
    "engine:tier_prefetch_tokens": "counter",
    "engine:tier_copy_bytes_per_second": "gauge",
}


def metrics(*, contiguous: bool = False) -> Metrics:
    memory = Memory(
        contiguous=contiguous,
        block_size=32,
        total=10,
        runs=np.array([1, 1, 2]),
        asked=(1, 3, 2),
        stalled=3 if contiguous else 0,
        waste_tokens=5,
    )
    reading = Reading(
        running=3,
        waiting=5,
        deferred=2,
        kv_usage_ratio=0.25,
        kv_blocks=2048,
        kv_dtype="bfloat16",
        kv_token_bytes=768,
        kv_cached_blocks=10,
        kv_evictions=4,
        config_version=7,
        knobs={
            "max_num_seqs": 32,
            "kv_block_size": 32,
            "graph_capture": "on",
            "prefix_cache": "on",
            "kv_allocator": "contiguous" if contiguous else "paged",
            "kv_dtype": "float16",
        },
        captured=None,
        contexts={"built": 2, "reused": 1},
        rollbacks=0,
        swap_s=0.004,
        spans_dropped=0,
        memory=memory,
        stalls=2,
        stall_s=1.5,
        compactions=1,
        compaction_s=0.01,
        tier_hits=3,
        tier_misses=1,
        tier_late=1,
        tier_prefetched={"begun": 48, "used": 16, "rolled_back": 16},
        tier_bytes_per_s=1e9,
        paused=Pause.KEEP,
        phase_s={"schedule": 1.5, "forward": 20.0},
        tasks={"queued": 3, "running": 1},
    )
    return Metrics(EngineConfig(), lambda: reading)


def test_the_exposition_has_vllms_names_types_and_labels() -> None:
    families = {f.name: f for f in text_string_to_metric_families(metrics().render().decode())}
    for name, kind in (VLLM | OURS).items():
        assert families[name].type == kind, name
        for sample in families[name].samples:
            assert sample.labels["model_name"] == "llama-1.3m"
            assert sample.labels["engine"] == "engine-0"
    assert families["vllm:num_requests_waiting"].samples[0].value == 5
    by_reason = families["vllm:num_requests_waiting_by_reason"].samples
    assert {s.labels["reason"]: s.value for s in by_reason} == {"capacity": 3, "deferred": 2}
    (info,) = families["vllm:cache_config_info"].samples
    assert info.labels["enable_prefix_caching"] == "True"
    assert info.labels["cache_dtype"] == "bfloat16"
    shown = {s.labels["knob"]: s.value for s in families["engine:knob"].samples}
    assert (shown["graph_capture"], shown["kv_block_size"], shown["kv_dtype"]) == (1, 32, 2)
    ttft = families["vllm:time_to_first_token_seconds"].samples
    assert [s.labels["le"] for s in ttft if s.name.endswith("_bucket")][:3] == [
        "0.001",
        "0.005",
        "0.01",
    ]


def values(subject: Metrics, label: str) -> dict[str, dict[str, float]]:
    """Of each family with that label, or "", its values."""
    return {
        family.name: {sample.labels.get(label, ""): sample.value for sample in family.samples}
        for family in subject.collect()
    }


def test_the_entropy_is_there_where_a_pool_can_fragment_and_a_word_is_its_place() -> None:
    paged, contiguous = metrics(), metrics(contiguous=True)
    assert "engine:kv_fragmentation_entropy" not in values(paged, "le")
    assert values(contiguous, "le")["engine:kv_fragmentation_entropy"] == {"": 1.5}
    runs = {"1": 2, "2": 3, "4": 3, "8": 3, "16": 3, "+Inf": 3}
    assert values(paged, "le")["engine:kv_free_runs"] == runs
    assert values(contiguous, "le")["engine:kv_largest_free_run_blocks"] == {"": 2}
    assert values(contiguous, "le")["engine:kv_alloc_stall_blocks"] == {"": 3}
    assert "engine:kv_alloc_stall_blocks" not in values(paged, "le")
    stranded = values(contiguous, "asked")["engine:kv_stranded_tokens"]
    assert stranded == {"median": 2 * 32, "largest": 4 * 32}
    assert values(paged, "asked")["engine:kv_stranded_tokens"] == {"median": 0, "largest": 0}
    for subject, place in ((paged, 1), (contiguous, 0)):
        assert values(subject, "knob")["engine:knob"]["kv_allocator"] == place
        assert values(subject, "knob")["engine:knob"]["graph_capture"] == 1


@pytest.mark.parametrize("at", ["vllm:cache_config_info", "vllm:num_preemptions"])
def test_no_count_of_prompt_tokens_falls_though_a_step_ends_while_it_is_read(at: str) -> None:
    subject = metrics()
    one = Request("a", np.zeros(64, np.int64), 1, 0.0)
    one.cached_tokens = 48
    nothing = np.empty(0)

    def by_source(step_at: str = "") -> dict[str, float]:
        found = {}
        for family in subject.collect():
            if family.name == step_at:
                plan = Plan([], np.empty(0, np.int64), [])
                subject.step(plan, Outcome([one], [1], [one], [], nothing), 0.0, 1.0)
            if family.name == "vllm:prompt_tokens_by_source":
                found = {sample.labels["source"]: sample.value for sample in family.samples}
        return found

    meanwhile, after = by_source(at), by_source()
    assert after == {"local_compute": 16, "local_cache_hit": 48}
    assert all(meanwhile[source] <= after[source] for source in after)


def test_a_histogram_counts_like_prometheus_does() -> None:
    histogram = Histogram((1, 2, 5))
    histogram.observe(np.array([0.5, 1.0, 1.5, 9.0]))
    histogram.add(2.0)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == 14.0


def test_token_buckets_grow_as_vllms_do() -> None:
    assert steps_1_2_5(100) == (1, 2, 5, 10, 20, 50, 100)
    assert steps_1_2_5(2048)[-1] == 2000


def test_who_changed_the_configuration_is_a_bounded_label() -> None:
    subject = metrics()
    subject.config_changed("agent/action-17")
    subject.config_changed("agent action-18")
    assert subject.changes == {"agent": 2}
    for i in range(50):
        subject.config_changed(f"someone-{i}")
    assert len(subject.changes) == CHANGERS_MAX + 1
    assert sum(subject.changes.values()) == 52
