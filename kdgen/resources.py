"""Where the templates and shipped specs are: inside an installed wheel, or beside the package in a source checkout."""

from __future__ import annotations

from pathlib import Path

from kdgen.errors import KdgenError

PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    for candidate in (PACKAGE / "_data" / name, PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise KdgenError(f"kdgen's {name} folder is missing beside {PACKAGE}: reinstall the package")


def templates_dir() -> Path:
    """The folder of Jinja templates (``kernels/``, ``lib/``). Raises KdgenError when the installation is incomplete."""
    return _folder("templates")


def specs_dir() -> Path:
    """The folder of shipped specs, one ``<name>.yaml`` a model. Raises KdgenError when the installation is incomplete."""
    return _folder("specs")
