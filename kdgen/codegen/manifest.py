"""``manifest.json`` of a generated folder: the plan as plain data, hashes of templates and texts, and the resources that kernels need."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from kdgen.codegen.compile import Cubin, nvrtc_version
from kdgen.codegen.render import parts_of
from kdgen.codegen.texts import Generated
from kdgen.files.resources import templates_dir
from kdgen.plan.ir import Plan

#: Raise it when the manifest's structure changes.
MANIFEST_SCHEMA = "kdgen.manifest/3"


def manifest_text(generated: Generated, kernel_resources: Mapping[str, Any] | None, clang_format: str) -> str:
    """The text of ``manifest.json``."""
    folder = templates_dir()
    names = sorted({kernel.template for plan in (generated.plan, *generated.plan.special) for kernel in plan.kernels})
    templates = {f"kernels/{name}": _sha256((folder / "kernels" / name).read_bytes()) for name in names}
    templates |= {f"lib/{part}": _sha256((folder / "lib" / part).read_bytes()) for name in names for part in parts_of(name)}
    headers = {f"lib/gpu/{path.name}": _sha256(path.read_bytes()) for path in sorted((folder / "lib" / "gpu").iterdir()) if path.is_file()}
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "clang_format": clang_format,
        "templates": templates | headers,
        "files": {name: _sha256(text.encode()) for name, text in sorted(generated.texts.items())},
        "resources": kernel_resources,
        "plan": dataclasses.asdict(dataclasses.replace(generated.plan, special=())) | {"special": differences(generated.plan)},
    }
    return _pretty(manifest) + "\n"


def differences(plan: Plan) -> dict[str, Any]:
    """For each family, the kernels, buffers and notes of its special plan that ``plan`` lacks."""
    found: dict[str, Any] = {}
    for special in plan.special:
        names = ("kernels", "buffers", "notes")
        own = {name: [each for each in getattr(special, name) if each not in getattr(plan, name)] for name in names}
        found[special.family] = {
            name: [each if isinstance(each, str) else dataclasses.asdict(each) for each in own[name]] for name in names
        }
    return found


def resources(cubins: Sequence[Cubin]) -> dict[str, Any]:
    """The manifest's ``resources``, by architecture and kernel, with the NVRTC version that gave them."""
    names = ("registers", "static_smem", "dynamic_smem", "stack", "spill_stores", "spill_loads")
    archs: dict[str, dict[str, dict[str, int]]] = {arch: {} for arch in sorted({cubin.arch for cubin in cubins})}
    for cubin in cubins:
        archs[cubin.arch][cubin.name] = {name: getattr(cubin, name) for name in names}
    return {"nvrtc": nvrtc_version(), "archs": archs}


def recorded_in(manifest: Path) -> dict[str, Any]:
    """The manifest on disk; empty if it is missing or damaged, in which case the comparison of its text reports that."""
    try:
        found = json.loads(manifest.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_resources(found: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(found, dict) and isinstance(found.get("nvrtc"), str) and isinstance(found.get("archs"), dict)


def _pretty(value: object, indent: int = 0) -> str:
    """JSON in which a value that fits on one line is one line, such as a launch or a cost. That is easier to read and review."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(flat) + indent <= 120 or not isinstance(value, (dict, list, tuple)):
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{pad}{json.dumps(key, ensure_ascii=False)}: {_pretty(item, indent + 2)}" for key, item in value.items()]
    else:
        items = [pad + _pretty(item, indent + 2) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(items) + "\n" + " " * indent + closing


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
