"""How long a step may wait for more arrivals before it starts."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="max_wait_ms",
    label="batching wait",
    unit="ms",
    minimum=0,
    maximum=50,
    ladder=(0, 2, 5, 10, 20, 50),
)
