"""How many tokens of a swapped request are copied back ahead of its turn."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="prefetch_depth_tokens",
    label="prefetch depth",
    unit="tokens",
    minimum=0,
    maximum=8192,
    ladder=(0, 256, 1024, 4096),
)
