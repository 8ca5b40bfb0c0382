"""Static configuration of one engine process: what a restart would be needed to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODELS = ("1.3m", "8m")  # built in
DTYPES = ("auto", "float32", "bfloat16")
MODEL_LEN_MIN, MODEL_LEN_MAX = 32, 8192  # tokens; the least holds the canary and the probe
SEQS_MAX = 256  # the upper bound of the knob max_num_seqs; sizes the per-sequence arrays
DRAIN_S_MAX = 3600
BLOCK_SIZES = (8, 16, 32, 64, 128)  # tokens; what the knob kv_block_size may be
# What the knob kv_dtype may be. With an underscore: the dtype of keys, that of values.
KV_DTYPES = ("auto", "bfloat16", "float16", "float16_int4", "float16_int8", "float32")
KV_LAYOUTS = ("interleaved", "separate")


@dataclass(frozen=True)
class EngineConfig:
    """Raises ValueError naming the field, its value and what is allowed.

    `kv_pool_blocks` blocks of `block_size` tokens are shared by all sequences; one sequence of
    `model_len_max` tokens must fit, so that a lone request can always finish. They set the size of
    the pool for good; the knob kv_block_size only cuts it otherwise, and starts at `block_size`.
    `model`: one of MODELS, or what models/loader.py finds by its name or path; such a model also
    has a `served_model_name`, which clients and metrics see. `dtype`: what it computes in, one of
    DTYPES. `prefix_cache` is where the knob of that name starts; `prefix_ttl_s` 0: cached prefixes
    stay until the pool needs their blocks; `prefix_warm` lists prompts to compute at the start
    (warm.py). `tenants` lists who is in which tier (sched/quotas.py). `host_tier_bytes`: host
    memory for the KV of preempted sequences. `queue_state`: folder of tasks (tasks.py); None: there
    are none. `cache`: folder of compiled decode steps; None: steps are not compiled.
    """

    name: str = "engine-0"
    service: str = "chat"
    node: str = "node-a"
    host: str = "127.0.0.1"
    port: int = 8100
    model: str = "1.3m"
    served_model_name: str = ""
    dtype: str = "auto"
    seed: int = 0
    threads: int = 1
    model_len_max: int = 2048
    kv_pool_blocks: int = 4096
    block_size: int = 16
    prefix_cache: str = "off"
    prefix_ttl_s: float = 0.0
    prefix_warm: Path | None = None
    tenants: Path | None = None
    host_tier_bytes: int = 268_435_456
    queue_requests_max: int = 512
    queue_tokens_max: int = 262_144
    drain_s_max: float = 10.0
    state: Path | None = None
    queue_state: Path | None = None
    cache: Path | None = None
    otlp_endpoint: str = ""
    ingest_token: str = ""
    faults_token: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, allowed: {', '.join(DTYPES)}")
        for field in ("threads", "queue_requests_max", "queue_tokens_max"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: got {getattr(self, field)}, allowed: 1 or more")
        if self.block_size not in BLOCK_SIZES:
            allowed = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_size: got {self.block_size}, allowed: {allowed} tokens")
        if self.prefix_cache not in ("off", "on"):
            raise ValueError(f"prefix_cache: got {self.prefix_cache!r}, allowed: off, on")
        if self.prefix_warm and self.prefix_cache == "off":
            raise ValueError(f"prefix_warm: got {self.prefix_warm}, allowed: with prefix_cache on")
        if not self.prefix_ttl_s >= 0:
            raise ValueError(f"prefix_ttl_s: got {self.prefix_ttl_s}, allowed: 0 or more seconds")
        if not 0 <= self.drain_s_max <= DRAIN_S_MAX:
            raise ValueError(
                f"drain_s_max: got {self.drain_s_max}, allowed: 0 to {DRAIN_S_MAX} seconds"
            )
        if self.host_tier_bytes < 0:
            raise ValueError(f"host_tier_bytes: got {self.host_tier_bytes}, allowed: 0 or more")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port: got {self.port}, allowed: 0 to 65535 (0 picks a free one)")
        if not MODEL_LEN_MIN <= self.model_len_max <= MODEL_LEN_MAX:
            raise ValueError(
                f"model_len_max: got {self.model_len_max}, allowed: {MODEL_LEN_MIN} to "
                f"{MODEL_LEN_MAX} tokens"
            )
        if self.kv_pool_blocks < self.blocks_per_sequence_max:
            raise ValueError(
                f"kv_pool_blocks: got {self.kv_pool_blocks}, allowed: at least "
                f"{self.blocks_per_sequence_max} (one sequence of {self.model_len_max} tokens)"
            )

    @property
    def blocks_per_sequence_max(self) -> int:
        return -(-self.model_len_max // self.block_size)

    @property
    def kv_pool_tokens(self) -> int:
        return self.kv_pool_blocks * self.block_size

    @property
    def model_name(self) -> str:
        """The name clients and metrics see, e.g. `llama-1.3m`."""
        return self.served_model_name or f"llama-{self.model}"
