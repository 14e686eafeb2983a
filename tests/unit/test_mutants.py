"""Wrong edits of the templates, each a plausible bug, are caught by the kernel checks, which name the kernel that was edited."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import kdgen.render
from kdgen.backends import open_backend
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute
from kdgen.resources import templates_dir
from kdgen.spec import load_spec
from kdgen.verify.bench import TOKENS
from kdgen.verify.kernels import check_kernels


@dataclass(frozen=True)
class Mutant:
    name: str
    template: str
    right: str
    wrong: str
    compute: Compute
    #: the weakest mode that sees it; a race that the plain order of threads hides needs the checker
    backend: str = "cpu"


BARRIER = "__syncthreads();"
MUTANTS = (
    Mutant("mask f32", "mla_attention_f32.cu.j2", "position < prefix ?", "position <= prefix ?", "f32"),
    Mutant("mask bf16", "mla_attention_mma.cu.j2", "tile_key + key < end_key ?", "tile_key + key <= end_key ?", "bf16"),
    Mutant("scale f32", "mla_attention_f32.cu.j2", "= dot * SCALE", "= dot", "f32"),
    Mutant("scale bf16", "mla_attention_mma.cu.j2", "rescale = expf(running_max - new_max)", "rescale = 1.0f", "bf16"),
    Mutant("barrier before the partial sums", "linear_f32.cu.j2", BARRIER, "", "f32"),
    Mutant("barrier before the last tile is overwritten", "mla_attention_mma.cu.j2",
           f"{BARRIER}  // before this stage", "// before this stage", "bf16", "cpu-checker"),
    Mutant("barrier before the next tokens", "experts_f32.cu.j2",
           f"{BARRIER}  // before the next tokens", "// before the next tokens", "f32", "cpu-checker"),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(templates_dir(), tmp_path / "templates")
    file = tmp_path / "templates" / "kernels" / mutant.template
    text = file.read_text()
    assert mutant.right in text, "the template has changed: write this mutant anew"
    file.write_text(text.replace(mutant.right, mutant.wrong, 1))
    monkeypatch.setattr(kdgen.render, "templates_dir", lambda: tmp_path / "templates")

    # a latent of 256 has splits of 128 keys, 4 tiles: only from the third on are the two stages of the tensor-core kernel loaded again
    spec = load_spec("tiny2").model_copy(update={"kv_lora_rank": 256})
    plan = build_plan(spec, mutant.compute)
    others = {"rmsnorm.cu.j2", "router_topk.cu.j2"}
    plan = replace(plan, kernels=tuple(kernel for kernel in plan.kernels if kernel.template in {mutant.template, *others}))
    checker = mutant.backend == "cpu-checker"
    checks = check_kernels(open_backend(mutant.backend), spec, plan, tokens=(2, 33) if checker else TOKENS)
    caught = [check for check in checks if not check.ok]
    assert caught
    assert {check.template for check in caught} == {mutant.template}
    if checker:  # the checker names the kernel in what it says, too
        assert all(check.kernel in check.why for check in caught)
