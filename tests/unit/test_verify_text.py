"""Rules that kernels' texts must keep, for no run on a CPU sees them broken."""

from __future__ import annotations

import pytest

from kdgen.codegen.render import Rendered, render
from kdgen.plan.build import build_plan
from kdgen.plan.ops.outbox import TO_RANKS
from kdgen.plan.shard import Shard
from kdgen.spec.model import load_spec
from kdgen.verify.kernels.text_rules import text_problems

PLAN = build_plan(load_spec("tiny"), "f32")
RMSNORM = next(rendered for rendered in render(PLAN) if rendered.kernel.name == "rmsnorm_hidden")


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("square_sum = warp_sum(square_sum);", "atomicAdd(&total, square_sum);", "atomic operation atomicAdd"),
        ("1.0f / sqrtf(", "__frsqrt_rn(", "inexact function __frsqrt_rn"),
    ],
)
def test_broken_rules_are_found(right: str, wrong: str, said: str) -> None:
    assert right in RMSNORM.text and text_problems([RMSNORM]) == []
    (problem,) = text_problems([Rendered(RMSNORM.kernel, RMSNORM.text.replace(right, wrong, 1))])
    assert problem.startswith("rmsnorm_hidden") and said in problem


def test_a_sender_waits_before_it_lets_the_next_kernel_begin() -> None:
    """Every kernel that sends, by what each of its template's variants has."""
    plans = [build_plan(load_spec("tiny"), compute, shard=Shard(2, 1, "peer")) for compute in ("f32", "bf16")]
    senders = [each for plan in plans for each in render(plan) if each.kernel.name.endswith(TO_RANKS)]
    assert {each.kernel.template for each in senders} >= {"linear_f32.cu.j2", "linear_mma.cu.j2", "moe_combine.cu.j2", "embed.cu.j2"}
    assert text_problems(senders) == []
    for each in senders:
        early = each.text.replace("  griddepcontrol_wait();", "  griddepcontrol_launch_dependents();\n  griddepcontrol_wait();", 1)
        (problem,) = text_problems([Rendered(each.kernel, early)])
        assert problem.startswith(f"{each.kernel.name} sends results, but lets the next kernel start before")


def test_comments_break_no_rule() -> None:
    assert text_problems([Rendered(RMSNORM.kernel, RMSNORM.text + "// atomicAdd( is not used, nor __expf(\n")]) == []
