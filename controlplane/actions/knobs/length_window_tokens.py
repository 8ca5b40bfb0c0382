"""How far the lengths of the prompts of one step may differ; 0: any. −1, adaptive, is no rung."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="length_window_tokens",
    label="length window",
    unit="tokens",
    minimum=-1,
    maximum=8192,
    ladder=(0, 64, 256, 1024),
)
