"""Rules that kernels' texts must keep, for no run on a CPU sees them broken."""

from __future__ import annotations

import pytest

from kdgen.plan.build import build_plan
from kdgen.render import Rendered, render
from kdgen.spec import load_spec
from kdgen.verify.text import text_problems

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


def test_comments_break_no_rule() -> None:
    assert text_problems([Rendered(RMSNORM.kernel, RMSNORM.text + "// atomicAdd( is not used, nor __expf(\n")]) == []
