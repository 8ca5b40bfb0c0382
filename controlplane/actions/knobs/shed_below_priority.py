"""Requests of a lower priority are turned away (429), so that the others keep their objective."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="shed_below_priority",
    label="lowest priority served",
    unit="priority",
    minimum=0,
    maximum=3,
    ladder=(0, 1, 2, 3),
    sheds=True,
)
