"""Whether decode steps are replayed from a captured graph, or run one operation at a time."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="graph_capture",
    label="graph capture",
    choices=("off", "on"),
    apply_class="barrier",
)
