"""How keys and values are kept: narrower ones take less memory, and round the answers."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="kv_dtype",
    label="KV dtype",
    choices=("auto", "bfloat16", "float16", "float16_int4", "float16_int8", "float32"),
    apply_class="barrier",
)
