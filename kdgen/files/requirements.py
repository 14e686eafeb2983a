"""Which release of another package kdgen needs, as its own metadata says: the pins stand in pyproject.toml alone."""

from __future__ import annotations

import importlib.metadata


def requirement(package: str) -> str:
    """What to give ``pip install`` for ``package``: with kdgen's pin, or the name alone where kdgen runs without being installed."""
    try:
        wanted = importlib.metadata.requires("kdgen") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    found = (each.partition(";")[0].strip() for each in wanted)
    return next((each for each in found if each.startswith(package) and not each[len(package) :][:1].isalnum()), package)
