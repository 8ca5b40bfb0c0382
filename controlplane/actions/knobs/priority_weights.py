"""Whether priorities share the engine by weight, or whoever comes first goes first."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="priority_weights",
    label="priority weights",
    choices=("off", "on"),
)
