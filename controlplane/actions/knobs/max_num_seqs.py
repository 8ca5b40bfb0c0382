"""How many requests the engine runs at once; the rest wait. Lowering it drains, never preempts."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="max_num_seqs",
    label="running cap",
    unit="requests",
    minimum=1,
    maximum=256,
    ladder=(4, 8, 16, 32, 64, 128, 256),
)
