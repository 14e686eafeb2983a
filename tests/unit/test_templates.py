"""Templates against their contexts: the names they use are exactly the fields they are given."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import jinja2
import pytest
from jinja2 import meta, nodes

from kdgen.codegen.folders import plans_for
from kdgen.codegen.render import environment, hexfloat, parts_of, render
from kdgen.errors import KdgenError
from kdgen.files.resources import templates_dir
from kdgen.plan import ops
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute
from kdgen.plan.ops.rows import Advance
from kdgen.plan.shard import Exchange, Shard
from kdgen.spec.model import load_spec

TEMPLATES = sorted((templates_dir() / "kernels").glob("*.cu.j2"))
PHASES = sorted({part for path in TEMPLATES for part in parts_of(path.name)})
_PHASE = re.compile(r'(?:{% with p = p\.(\w+) %})?{% include "([\w.]+)" %}(?:{% endwith %})?')
DTYPES: tuple[Compute, ...] = ("f32", "bf16")


def contexts() -> dict[str, set[type]]:
    """The dataclasses each template is rendered with, over every shipped spec in both dtypes, and for one of two ranks."""
    found: dict[str, set[type]] = {}
    for dtype in DTYPES:
        shared = [build_plan(load_spec("tiny"), dtype, shard=Shard(2, 0, exchange)) for exchange in get_args(Exchange)]
        for plan in (*plans_for([], dtype), *shared):
            for kernel in (kernel for each in (plan, *plan.special) for kernel in each.kernels):
                found.setdefault(kernel.template, set()).add(type(kernel.params))
    return found


CONTEXTS = contexts()


def test_every_template_is_used_and_every_context_has_one() -> None:
    assert set(CONTEXTS) == {path.name for path in TEMPLATES}
    declared = {value for module in op_modules() for value in vars(module).values() if is_context(value)}
    whole = {context for found in CONTEXTS.values() for context in found}
    parts = {context_of(field) for context in whole for field in dataclasses.fields(context)} - {None}
    assert whole | parts == declared


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_names_used_are_the_fields(path: Path) -> None:
    (context,) = CONTEXTS[path.name]
    assert dataclasses.is_dataclass(context) and context.__dataclass_params__.frozen  # type: ignore[attr-defined]
    phases = [(phase[1], phase[2]) for phase in _PHASE.finditer(path.read_text())]
    used = names_used(_PHASE.sub("", path.read_text())) | {field for field, _ in phases if field}
    for field, part in phases:
        of_phase = names_used((templates_dir() / "lib" / part).read_text())
        if field:  # a phase with a context of its own
            (hint,) = (each for each in dataclasses.fields(context) if each.name == field)
            part_context = context_of(hint)
            assert part_context and of_phase <= {each.name for each in dataclasses.fields(part_context)}
        else:
            used |= of_phase
    assert used == {field.name for field in dataclasses.fields(context)}


def context_of(field: dataclasses.Field[object]) -> Any:
    """The context of a phase that a field is, if it is one."""
    name = str(field.type).removesuffix(" | None")
    return next((found for module in op_modules() if is_context(found := vars(module).get(name))), None)


def op_modules() -> list[ModuleType]:
    return [importlib.import_module(f"kdgen.plan.ops.{each.name}") for each in pkgutil.iter_modules(ops.__path__)]


def is_context(value: object) -> bool:
    """Whether it is a context of a template, or of a phase of one."""
    return isinstance(value, type) and dataclasses.is_dataclass(value) and "ontext of " in (value.__doc__ or "")


def names_used(text: str) -> set[str]:
    """The fields of p that a text uses. Else it uses only what ``render`` gives every template."""
    tree = environment().parse(text)
    assert meta.find_undeclared_variables(tree) <= {"p", "signature", "block", "smem", "page_slots"}
    assert sum(node.name == "p" for node in tree.find_all(nodes.Name)) == sum(
        1 for node in tree.find_all(nodes.Getattr) if isinstance(node.node, nodes.Name)
    )
    return {node.attr for node in tree.find_all(nodes.Getattr) if isinstance(node.node, nodes.Name) and node.node.name == "p"}


@pytest.mark.parametrize("name", PHASES)
def test_size_and_shape_of_phases(name: str) -> None:
    text = (templates_dir() / "lib" / name).read_text()
    lines = text.splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) <= 140 and "\t" not in text and text.endswith("\n")
    assert lines[0].startswith("{# ") and "#include" not in text and "__global__" not in text and "asm" not in text
    code = re.sub(r"\{#.*?#\}|//[^\n]*", "", text, flags=re.DOTALL)
    assert "griddepcontrol" not in code and "previous_kernel" not in code, "a kernel waits, not its phases"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_size_and_shape(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    most = 300 if path.name.endswith("_wgmma.cu.j2") else 200  # copies, barriers and the roles of warpgroups in one kernel
    assert len(lines) <= most, "a third variant branch means a new template"
    assert max(map(len, lines)) <= 140 and "\t" not in text and text.endswith("\n")
    assert lines[0].startswith("// ") and text.count('#include "primitives.cuh"') == text.count("#include") == 1
    assert text.count("__global__") == 1 and "asm" not in text, "hardware is reached through templates/lib"


@pytest.mark.parametrize("value", [None, True, False, 1.5])
def test_values_that_cpp_reads_differently_are_refused(value: object) -> None:
    with pytest.raises(KdgenError, match="use a filter"):
        environment().from_string("{{ p }}").render(p=value)


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ p.rows }}").render(p=Advance("advance"))


def test_a_template_that_does_not_fit_names_itself_and_the_kernel() -> None:
    (plan,) = plans_for(["tiny"])
    kernels = tuple(dataclasses.replace(k, params=Advance("argmax")) if k.name == "argmax" else k for k in plan.kernels)
    with pytest.raises(KdgenError, match=r"template argmax\.cu\.j2, kernel argmax of tiny: .*sharded"):
        render(dataclasses.replace(plan, kernels=kernels))


def test_an_edited_template_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own text and what it includes, though this process keeps its templates, and the cache what Jinja2 made of them."""
    shutil.copytree(templates_dir(), tmp_path / "templates")
    monkeypatch.setenv("KDGEN_TEMPLATES_DIR", str(tmp_path / "templates"))
    (plan,) = plans_for(["tiny"])
    plan = dataclasses.replace(plan, kernels=(plan.kernel("argmax"),))
    for edit in range(2):
        for part in ("kernels/argmax.cu.j2", "lib/argmax.cuh.j2"):
            file = tmp_path / "templates" / part
            file.write_text(f"{file.read_text()}// edit {edit} of {part}\n")
            assert f"// edit {edit} of {part}\n" in render(plan)[0].text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "0x1p+0f /* 1 */"), (1e-6, "0x1.0c6f7ap-20f /* 1e-06 */"), (2.5, "0x1.4p+1f /* 2.5 */"), (0.0, "0x0p+0f /* 0 */")],
)
def test_float_literals_are_exact(value: float, text: str) -> None:
    import numpy as np

    assert hexfloat(value) == text
    assert float.fromhex(text.split("f /*")[0]) == float(np.float32(value))
