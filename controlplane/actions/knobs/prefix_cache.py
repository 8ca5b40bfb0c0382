"""Whether requests begin with the KV blocks of others that began with the same tokens."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="prefix_cache",
    label="prefix cache",
    choices=("off", "on"),
    apply_class="barrier",
)
