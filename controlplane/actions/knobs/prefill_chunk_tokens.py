"""How many prompt tokens of one request a step takes at most."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="prefill_chunk_tokens",
    label="prefill chunk",
    unit="tokens",
    minimum=32,
    maximum=4096,
    ladder=(32, 64, 128, 256, 512, 1024, 2048, 4096),
)
