"""How many tokens one engine step may take, prefill and decode together."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="max_num_batched_tokens",
    label="token budget of a step",
    unit="tokens/step",
    minimum=64,
    maximum=8192,
    ladder=(128, 256, 512, 1024, 2048, 4096),
)
