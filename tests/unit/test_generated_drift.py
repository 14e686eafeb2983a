"""What is committed under ``generated/`` is what the templates make now. Nothing is compiled here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdgen.codegen.folders import DEFAULT_ARCHS, MANIFEST, check, plans_for
from kdgen.codegen.format import clang_format_many
from kdgen.plan.arch import target_for
from kdgen.plan.build import own_kernels
from kdgen.plan.ir import Plan

GENERATED = Path(__file__).resolve().parents[2] / "generated"
PLANS = plans_for([])
EVERY = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.directory)


def test_every_folder_is_there_and_no_other() -> None:
    assert {path.name for path in GENERATED.iterdir()} == {plan.directory for plan in PLANS}


@EVERY
def test_no_drift(plan: Plan) -> None:
    found = check([plan], out=GENERATED, compile=False)
    command = "kdgen build" + ("" if plan.is_default else f" --dtype {plan.compute}") + f" {plan.spec_name}"
    diffs = "\n".join(difference.diff for difference in found.differences)
    assert not found.differences, f"run: {command}\n{diffs[:5000]}"


@EVERY
def test_no_other_files(plan: Plan) -> None:
    expected = {f"{kernel.name}.cu" for kernel in plan.kernels} | {MANIFEST}
    for special in plan.special:
        expected |= {f"{kernel.name}_{special.family}.cu" for kernel in own_kernels(special, plan).kernels}
    assert {path.name for path in (GENERATED / plan.directory).iterdir()} == expected


@EVERY
def test_formatted(plan: Plan) -> None:
    texts = [path.read_text() for path in sorted((GENERATED / plan.directory).glob("*.cu"))]
    assert clang_format_many(texts) == texts
    longest = max((line for text in texts for line in text.splitlines()), key=len)
    assert len(longest) <= 120, longest


@EVERY
def test_no_comment_makes_a_statement_break(plan: Plan) -> None:
    """A comment behind a long statement makes clang-format break the statement, which is then hard to read: it goes before it."""
    for path in sorted((GENERATED / plan.directory).glob("*.cu")):
        lines = [line.split("//")[0].rstrip() for line in path.read_text().splitlines()]
        commented = [i for i, line in enumerate(path.read_text().splitlines()) if "//" in line and lines[i]]
        for i in commented:
            before = lines[i - 1]
            whole = not before or before.endswith((";", "{", "}", ":", ")", "else", ">")) or before.lstrip().startswith("#")
            assert whole, f"{path.name}:{i}: {before} {lines[i].lstrip()}"


@EVERY
def test_recorded_resources(plan: Plan) -> None:
    """No kernel that is committed spills, uses local memory, or needs more shared memory than its architecture has."""
    recorded = json.loads((GENERATED / plan.directory / MANIFEST).read_text())["resources"]["archs"]
    assert set(recorded) == set(DEFAULT_ARCHS)
    for arch, kernels in recorded.items():
        assert set(kernels) == {kernel.name for kernel in plan.on(target_for(arch).family).kernels}
        for name, needs in kernels.items():
            assert needs["stack"] == needs["spill_stores"] == needs["spill_loads"] == 0, (arch, name, needs)
            kernel = plan.on(target_for(arch).family).kernel(name)
            most = 99 * 1024 if kernel in plan.kernels else target_for(arch).smem_per_block
            assert needs["static_smem"] + needs["dynamic_smem"] <= min(target_for(arch).smem_per_block, most), (arch, name, needs)
            assert needs["registers"] * kernel.block // kernel.cluster <= 65536, (arch, name, needs)
