"""How a contract finds its implementations: one module each, in the folder beside it.

Here, in the lowest room that has a contract, for all that do.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def plugins(folder: str, name: str) -> dict[str, Any]:
    """What every module of the package `folder` calls `name`, by slug, in the slugs' order.

    AssertionError for one whose slug is not its file's name.
    """
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        plugin = getattr(importlib.import_module(f"{folder}.{module.name}"), name)
        assert plugin.slug == module.name, f"{folder}.{module.name} calls itself {plugin.slug!r}"
        found[module.name] = plugin
    return dict(sorted(found.items()))
