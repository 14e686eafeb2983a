"""Where things are: templates, shipped specs and the demo model in an installed wheel or beside the package, and the checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kdgen.errors import KdgenError

#: A folder of templates to use instead of kdgen's own.
TEMPLATES_VARIABLE = "KDGEN_TEMPLATES_DIR"
PACKAGE = Path(__file__).resolve().parents[1]


def import_path() -> str:
    """PYTHONPATH for processes of kdgen's own: this very package first, then what this process imports from. With Python's ``-P`` the
    folder that a user stands in is not among it, whatever modules lie there.
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
    """Folder ``name`` of the source checkout that this package lies in, else of the one that kdgen was started in, else None."""
    candidates = (checkout / name for checkout in (PACKAGE.parent, Path.cwd()) if (checkout / "kdgen").is_dir())
    return next((folder for folder in candidates if folder.is_dir()), None)


def templates_dir() -> Path:
    """The folder of Jinja templates (``kernels/``, ``lib/``): $KDGEN_TEMPLATES_DIR, for trying edits out, else kdgen's own.

    Raises KdgenError when the variable names no such folder, or the installation is incomplete.
    """
    chosen = os.environ.get(TEMPLATES_VARIABLE)
    if not chosen:
        return _folder("templates")
    if not (Path(chosen) / "kernels").is_dir():
        raise KdgenError(f"{TEMPLATES_VARIABLE}={chosen} is no templates folder: it needs kernels/ and lib/, or unset it")
    return Path(chosen)


def specs_dir() -> Path:
    """The folder of shipped specs, one ``<name>.yaml`` a model. Raises KdgenError when the installation is incomplete."""
    return _folder("specs")


def demo_dir() -> Path:
    """The folder of the demo model: ``model-int4/``, ``drafter/`` and ``prompts.json``, as ``kdgen.demo.train`` writes them.

    Raises KdgenError when the installation is incomplete.
    """
    return _folder("demo")
