"""How a driver is asked: it loads an engine once, then answers rounds. Any Python, nothing but it.

Lines of JSON, in on standard input, out on what was standard output; whatever an engine prints
itself goes to standard error.

    in   {"gguf", "folder", "dtype", "batch_max", "length_max"}   what to load
    out  {"version"}                                              loaded
    in   {"how", "prompts", "tokens"}                             a round
    out  {"tokens"}                                               what was generated, by prompt
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Answer = Callable[[str, Prompts, int], Prompts]
"""(how, prompts, new tokens of each) → the new tokens, greedily chosen, ends ignored."""


def serve(load: Callable[[dict[str, Any]], tuple[str, Answer]]) -> None:
    """Until standard input ends; `load` returns what was loaded, and what answers."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def tell(**what: object) -> None:
            out.write(json.dumps(what) + "\n")
            out.flush()

        version, answer = load(json.loads(sys.stdin.readline()))
        tell(version=version)
        for line in sys.stdin:
            asked = json.loads(line)
            tell(tokens=answer(asked["how"], asked["prompts"], asked["tokens"]))
