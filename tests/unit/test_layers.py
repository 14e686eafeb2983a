"""Imports go down the list of rooms, from those that use to those that are used, also where they stand inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "kdgen"
#: From the bottom up. A room imports what stands before it, and itself.
ROOMS = (
    "errors", "files", "spec", "text", "plan", "codegen", "ranks", "backends", "drafters", "weights", "reference", "runtime", "forecast",
    "bench", "demo", "verify", "cli", "__main__",
)  # fmt: skip


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of kdgen that a module imports, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("kdgen."))
        elif isinstance(node, ast.ImportFrom) and node.module == "kdgen":
            yield from (f"kdgen.{each.name}" for each in node.names if each.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kdgen."):
            yield str(node.module)


def upward(path: str, text: str) -> list[str]:
    """The imports of the module ``path`` (below kdgen/) that go up."""
    room = Path(path).parts[0].removesuffix(".py")
    place = ROOMS.index(room)
    return [f"kdgen/{path} imports {module}" for module in imported(ast.parse(text)) if ROOMS.index(module.split(".")[1]) > place]


def test_imports_go_down() -> None:
    modules = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.name != "__init__.py"]
    found = [each for path in modules for each in upward(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_an_upward_import_is_seen_in_a_function_too() -> None:
    assert upward("plan/ir.py", "from kdgen.spec import rope") == []
    assert upward("plan/ir.py", "def f():\n    from kdgen.runtime.engine import Engine") == [
        "kdgen/plan/ir.py imports kdgen.runtime.engine"
    ]
    assert upward("spec/model.py", "from kdgen import plan") == ["kdgen/spec/model.py imports kdgen.plan"]
    assert upward("codegen/render.py", "import kdgen.backends.base") == ["kdgen/codegen/render.py imports kdgen.backends.base"]


def test_only_rooms_lie_beside_the_errors() -> None:
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert files <= {"__init__.py", "errors.py", "py.typed", "__main__.py"}
    assert folders == set(ROOMS) - {"errors", "__main__"}
