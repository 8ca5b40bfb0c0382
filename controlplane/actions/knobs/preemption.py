"""Whether a preempted request's KV is computed again, or kept in host memory meanwhile."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="preemption",
    label="preemption",
    choices=("recompute", "swap"),
)
