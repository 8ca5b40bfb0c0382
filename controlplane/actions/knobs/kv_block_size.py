"""How many tokens a KV block holds: larger ones gather faster and waste more of the last one."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="kv_block_size",
    label="KV block size",
    unit="tokens",
    minimum=8,
    maximum=128,
    ladder=(8, 16, 32, 64, 128),
    apply_class="barrier",
)
