"""The default ``kdgen verify`` leaves no branch of a template out: every condition is seen both ways by a kernel that it checks."""

from __future__ import annotations

import re
from dataclasses import fields

from kdgen.files.resources import templates_dir
from kdgen.plan.attention import mma_obstacles
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Kernel
from kdgen.spec.model import load_spec
from kdgen.verify.plans import shared_plans
from kdgen.verify.tasks import DEFAULT_SPECS
from kdgen.verify.variants import variants


def kernels() -> list[Kernel]:
    both: tuple[Compute, ...] = ("f32", "bf16")
    specs = [*map(load_spec, DEFAULT_SPECS), *variants()]
    plans = [(spec, build_plan(spec, compute)) for spec in specs for compute in both if compute == "f32" or not mma_obstacles(spec)]
    shared = [each for spec, plan in plans for each in shared_plans(spec, plan)]
    return [kernel for plan in (*(plan for _, plan in plans), *shared) for each in (plan, *plan.special) for kernel in each.kernels]


def test_every_template_is_checked() -> None:
    assert {kernel.template for kernel in kernels()} == {path.name for path in (templates_dir() / "kernels").iterdir()}


def test_every_condition_is_seen_both_ways() -> None:
    rendered: dict[str, list[object]] = {}  # the contexts of each text
    for kernel in kernels():
        rendered.setdefault(f"kernels/{kernel.template}", []).append(kernel.params)
        text = (templates_dir() / "kernels" / kernel.template).read_text()
        for field, part in re.findall(r'(?:{% with p = p\.(\w+) %})?{% include "([\w.]+)" %}', text):
            rendered.setdefault(f"lib/{part}", []).append(getattr(kernel.params, field) if field else kernel.params)
    for name, contexts in rendered.items():
        for condition in set(re.findall(r"{% (?:el)?if (.+?) %}", (templates_dir() / name).read_text())):
            values = {bool(eval(condition, {"p": params})) for params in contexts}
            assert values == {False, True}, f"{name}: {condition} is only ever {values}"


def test_shapes_on_both_sides_of_what_kernels_tell_apart() -> None:
    """Dimensions that tiles divide and that they do not; splits of both lengths; one slice and several; odd halves of INT4 steps."""
    found = kernels()

    def values(template: str, name: str) -> set[int]:
        return {getattr(k.params, name) for k in found if k.template == template and name in {f.name for f in fields(k.params)}}  # type: ignore[arg-type]

    assert {rows % 32 == 0 for rows in values("linear_f32.cu.j2", "rows")} == {False, True}
    assert {rows % 16 == 0 for rows in values("linear_mma.cu.j2", "rows")} == {False, True}
    assert values("linear_f32.cu.j2", "slices") == {1, 4} == values("experts_f32.cu.j2", "slices")
    assert {cols % 64 for cols in values("experts_mma.cu.j2", "cols")} >= {0, 32}
    assert values("mla_attention_mma.cu.j2", "split") == {64, 128}
    assert values("mla_attention_wgmma.cu.j2", "group") == {1, 2, 8}
    assert {heads > 16 for heads in values("mla_attention_mma.cu.j2", "heads")} == {False, True}
    assert len(values("linear_mma.cu.j2", "warps")) > 1 and len(values("linear_mma.cu.j2", "stage_steps")) > 1
