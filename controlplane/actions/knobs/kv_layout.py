"""Whether keys and values have tensors of their own, or a block of each by turns in one."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="kv_layout",
    label="KV layout",
    choices=("interleaved", "separate"),
    apply_class="barrier",
)
