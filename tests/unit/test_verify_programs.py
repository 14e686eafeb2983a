"""Whole programs under the checker: what it finds in a plan's arguments. ``kdgen verify`` runs all the models, and one on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import kdgen.verify.decoding.programs as programs
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Launch, Limits, Plan, Stage
from kdgen.plan.shard import Shard
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.decoding.programs import check_programs, model_of_ranks, models

SMALLEST = models()[0]


def named(changes: dict[str, str]) -> Callable[[Launch], Launch]:
    """The launch with other buffers where these were."""

    def change(launch: Launch) -> Launch:
        args = (replace(bound, arg=replace(bound.arg, name=changes.get(bound.arg.name, bound.arg.name))) for bound in launch.args)
        return replace(launch, args=tuple(args))

    return change


def changed(plan: Plan, program: str, kernel: str, change: Callable[[Launch], Launch]) -> Plan:
    """``plan`` with other launches of ``kernel`` in one program."""

    def stage(each: Stage) -> Stage:
        return replace(each, launches=tuple(change(launch) if launch.kernel == kernel else launch for launch in each.launches))

    found = tuple(replace(each, stages=tuple(map(stage, each.stages))) if each.name == program else each for each in plan.programs)
    assert found != plan.programs
    return replace(plan, programs=found)


def problem(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Plan], Plan]) -> str:
    """What the check says of the smallest model with an edited plan."""

    def edited(spec: Spec, compute: object, limits: Limits, shard: object) -> Plan:
        return edit(build_plan(spec, SMALLEST.compute, limits))

    monkeypatch.setattr(programs, "build_plan", edited)
    check = check_programs(SMALLEST)
    assert check.status == "failed" and not check.bits
    return check.why


def test_every_program_runs() -> None:
    check = check_programs(SMALLEST)
    assert (check.status, check.why) == ("ok", "") and check.bits > 0
    assert check.detail.startswith("prefill, decode, draft_top_k, verify, draft: ")


@pytest.mark.parametrize(
    ("program", "kernel", "changes", "said"),
    [
        ("verify", "rmsnorm_q_a", {"kv_a": "attention"}, "rmsnorm_q_a .* uninitialised: .* of attention "),
        ("verify", "rmsnorm_hidden", {"num_tokens": "num_active"}, "uninitialised: .* of num_active "),
        ("decode", "moe_combine", {"topk_weights": "router_logits"}, "row .* differs"),
        ("verify", "tree_rows", {"row_position": "row_slot", "row_slot": "row_position"}, "race: .* of kv_cache "),
        ("prefill", "logit_rows", {"row_sequence": "row_position", "row_position": "row_sequence"}, "out of bounds: .* of seed "),
        ("verify", "kv_compact", {"accepted_count": "tree_size"}, "kv_compact .* uninitialised: .* of accepted_nodes "),
        ("draft", "draft_block", {"draft_begin": "step_begin"}, "row .* differs|uninitialised"),
    ],
)
def test_wrong_arguments_of_a_program(
    program: str, kernel: str, changes: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = problem(monkeypatch, lambda plan: changed(plan, program, kernel, named(changes)))
    assert re.search(said, why), why


def test_an_early_use_that_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(plan: Plan) -> Plan:
        return replace(plan, kernels=tuple(replace(each, early=("residual",)) if each.name == "embed" else each for each in plan.kernels))

    assert problem(monkeypatch, edit) == "embed may use residual before it waits for the previous kernel, but no launch does"


def test_a_program_that_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    why = problem(monkeypatch, lambda plan: replace(plan, programs=(*plan.programs, replace(plan.programs[0], name="another"))))
    assert why == "no launch of another"


def _launched(plan: Plan) -> set[str]:
    """Templates of the kernels that the plan's programs launch."""
    names = {launch.kernel for program in plan.programs for launch, _ in program.launches()}
    return {kernel.template for kernel in plan.kernels if kernel.name in names}


@pytest.mark.parametrize("name", ["k26", "deepseek-v3", "glm-4.7-flash", "deepseek-v2-lite", "moonlight-16b-a3b", "tiny2"])
def test_the_models_have_every_template(name: str) -> None:
    """What published models launch, on one rank and on two that reach each other's memory, is launched by the default models, too."""
    here = {template for model in models() for template in _launched(build_plan(model.spec, model.compute).on(model.family))}
    shared = model_of_ranks()
    here |= _launched(build_plan(shared.spec, shared.compute, shard=Shard(2, 0, "peer")).on(shared.family))
    for shard in (Shard(1, 0, "gather"), Shard(2, 0, "peer")):
        plan = build_plan(load_spec(name), shard=shard)
        for each in (plan, *plan.special):
            assert _launched(each) <= here, shard
