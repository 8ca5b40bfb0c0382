"""How evidence writes what it measured. In English, as all that is stored."""

from __future__ import annotations


def ms(seconds: float | None) -> str:
    """Seconds as “12.3 ms”, from one second on as “1.23 s”."""
    if seconds is None:
        return "?"
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1000:.3g} ms"


def several(count: float, one: str, many: str, form: str = "g") -> str:
    """“1 request waits”, “31 requests wait”; “1” is what reads so once it is written."""
    number = format(count, form)
    return f"{number} {one if number == '1' else many}"
