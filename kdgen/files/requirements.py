"""The release of another package that kdgen needs, from kdgen's metadata, so that only pyproject.toml has the pins."""

from __future__ import annotations

import importlib.metadata


def requirement(package: str) -> str:
    """The argument of ``pip install`` for ``package``: with kdgen's pin, or only the name if kdgen is not installed."""
    try:
        wanted = importlib.metadata.requires("kdgen") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    found = (each.partition(";")[0].strip() for each in wanted)
    return next((each for each in found if each.startswith(package) and not each[len(package) :][:1].isalnum()), package)
