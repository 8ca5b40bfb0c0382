"""The folder all state lives below, TRIMTAB_HOME."""

from __future__ import annotations

import tempfile
from pathlib import Path

ALLOWED = "a folder one may write to, or a path where one can be made"


def state_folder(path: str | Path) -> Path:
    """That folder, made for its owner alone where there is none. Raises ValueError saying why it
    cannot hold state."""
    folder = Path(path).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass  # rights alone do not tell of a disk that is read-only or full
    except OSError as error:
        raise ValueError(error.strerror) from None
    return folder
