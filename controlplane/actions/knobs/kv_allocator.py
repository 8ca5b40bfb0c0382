"""Whether a request is given KV blocks as it grows, or one run of them for all it may become."""

from controlplane.actions.knob import Knob

KNOB = Knob(
    slug="kv_allocator",
    label="KV allocator",
    choices=("contiguous", "paged"),
    apply_class="barrier",
)
