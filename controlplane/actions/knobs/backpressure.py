"""Whether a busy engine with a long queue turns requests away. Nothing here wishes for it."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="backpressure",
    label="back-pressure",
    choices=("off", "on"),
)
