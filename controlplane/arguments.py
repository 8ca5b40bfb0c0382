"""What the numbers of a command line may be; anything else is told with what is allowed."""

from __future__ import annotations

import argparse
import math


def above_0(text: str, most: float = math.inf) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= most or number == math.inf:
        limit = "" if most == math.inf else f", at most {most:g}"
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a number above 0{limit}")
    return number


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a whole number from 0 on")
    return int(text)
