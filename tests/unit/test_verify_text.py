"""Rules that kernels' texts must keep, for no run on a CPU sees them broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdgen.plan.build import build_plan
from kdgen.plan.shard import Shard
from kdgen.render import Rendered, render
from kdgen.spec import load_spec
from kdgen.verify.text import schedule_problems, text_problems

PLAN = build_plan(load_spec("tiny"), "f32")
RMSNORM = next(rendered for rendered in render(PLAN) if rendered.kernel.name == "rmsnorm_hidden")


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("wait_for_previous_kernel();", "", "waits 0 times"),
        ("wait_for_previous_kernel();", "if (blockIdx.x) return; wait_for_previous_kernel();", "has return before it waits"),
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


@pytest.mark.parametrize("program", ["prefill", "decode", "verify"])
def test_what_is_read_before_the_wait_is_old(program: str) -> None:
    """Kernels that the embedding lets start only when it has begun itself may read the step's rows early, and nothing else."""
    plan = build_plan(load_spec("k26")).on("sm_90a")
    texts = {rendered.kernel.name: rendered for rendered in render(plan)}
    plan = replace(plan, programs=(plan.program(program),))

    def problems(kernel: str, right: str, wrong: str) -> list[str]:
        assert right in texts[kernel].text
        edited = Rendered(texts[kernel].kernel, texts[kernel].text.replace(right, wrong, 1))
        return schedule_problems(plan, [*(each for name, each in texts.items() if name != kernel), edited])

    assert schedule_problems(plan, list(texts.values())) == []
    wait = "wait_for_previous_kernel();"
    early = problems("embed", f"{wait}\n  allow_next_kernel();", "begin_after_previous_kernel();")
    assert any(found.startswith("mla_attention reads row_path before it waits") for found in early), (
        "the embedding starts the others too early"
    )
    combine = "mla_combine" if program == "prefill" else "mla_combine_and_w_uv"
    assert problems(combine, wait, f"const float early = *split_max; {wait}") == [
        f"{combine} reads split_max before it waits for the kernel before it, and in {program} it may be new"
    ]
    if program != "prefill":  # whose experts are other kernels
        chooses = "  const bool chooses = blockIdx.x == 0;"
        early = problems("shared_down_proj_and_choice", chooses, f"  allow_next_kernel();\n{chooses}")
        assert f"experts_gate_up reads num_active before it waits for the kernel before it, and in {program} it may be new" in early


@pytest.mark.parametrize("sender", ["embed_to_ranks", "o_proj_to_ranks"])
def test_sums_read_what_is_old(sender: str) -> None:
    """A sum reads residual and rounds before it waits for the kernel that sends its parts, which must not start it earlier."""
    plan = build_plan(load_spec("k26"), shard=Shard(2, 1, "peer")).on("sm_90a")
    texts = {rendered.kernel.name: rendered for rendered in render(plan)}
    plan = replace(plan, programs=(plan.program("decode"),))
    assert schedule_problems(plan, list(texts.values())) == []
    allow, wait = "  allow_next_kernel();", "  wait_for_previous_kernel();"
    text = texts[sender].text.replace(allow, "", 1).replace(wait, f"{allow}\n{wait}", 1)
    edited = Rendered(texts[sender].kernel, text)
    found = schedule_problems(plan, [*(each for name, each in texts.items() if name != sender), edited])
    assert "rank_sum_norm reads residual before it waits for the kernel before it, and in decode it may be new" in found
