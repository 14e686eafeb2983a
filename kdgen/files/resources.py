"""Folders of shipped files: templates, specs and the demo model, in an installed wheel or beside the package; and the checkout's
folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kdgen.errors import KdgenError

#: The environment variable that names a folder of templates to use instead of kdgen's own.
TEMPLATES_VARIABLE = "KDGEN_TEMPLATES_DIR"
PACKAGE = Path(__file__).resolve().parents[1]


def import_path() -> str:
    """PYTHONPATH for processes that kdgen starts: this package's folder first, then this process's import path. Together with Python's
    ``-P`` it leaves out the current folder and the modules there.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = (str(PACKAGE.parent), *(str(Path(entry).absolute()) for entry in (*named, *sys.path) if entry))
    return os.pathsep.join(dict.fromkeys(entries))


def _folder(name: str) -> Path:
    for candidate in (PACKAGE / "_data" / name, PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise KdgenError(f"kdgen's {name} folder is missing beside {PACKAGE}: reinstall the package")


def checkout_folder(name: str) -> Path | None:
    """Folder ``name`` of the source checkout that holds this package, otherwise of one in the current folder, otherwise None."""
    candidates = (checkout / name for checkout in (PACKAGE.parent, Path.cwd()) if (checkout / "kdgen").is_dir())
    return next((folder for folder in candidates if folder.is_dir()), None)


def templates_dir() -> Path:
    """The folder of Jinja templates (``kernels/``, ``lib/``): $KDGEN_TEMPLATES_DIR, for trying edits, otherwise kdgen's own.

    Raises KdgenError when the variable does not name such a folder, or the installation is incomplete.
    """
    chosen = os.environ.get(TEMPLATES_VARIABLE)
    if not chosen:
        return _folder("templates")
    if not (Path(chosen) / "kernels").is_dir():
        raise KdgenError(
            f"{TEMPLATES_VARIABLE}={chosen} is not a folder of templates with kernels/ and lib/: correct the variable or unset it"
        )
    return Path(chosen)


def specs_dir() -> Path:
    """The folder of shipped specs, one ``<name>.yaml`` for each model. Raises KdgenError when the installation is incomplete."""
    return _folder("specs")


def demo_dir() -> Path:
    """The folder of the demo model: ``model-int4/``, ``drafter/`` and ``prompts.json``, as ``kdgen.demo.train`` writes them.

    Raises KdgenError when the installation is incomplete.
    """
    return _folder("demo")
