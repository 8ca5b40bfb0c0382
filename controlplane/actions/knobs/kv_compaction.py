"""Whether a contiguous KV pool is moved together when a request finds no run long enough."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="kv_compaction",
    label="KV compaction",
    choices=("off", "on"),
)
