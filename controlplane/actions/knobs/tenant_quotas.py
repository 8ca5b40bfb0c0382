"""Whether each tenant is held to the tokens a minute of its tier. Nothing here wishes for it."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="tenant_quotas",
    label="tenant quotas",
    choices=("off", "on"),
)
